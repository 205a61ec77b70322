"""Gated multi-head latent attention without position encoding, for Megatron's self-attention slot.

Source: K3 technical report (arXiv 2607.24653).

    c_q = RMSNorm(W_qa x), q = W_qb c_q         (or q = W_q x without q_lora_rank)
    [c_kv | k_pe] = W_kva x                      k_pe is shared by the heads and, without rotation, just a channel block
    [k_nope | v] = W_kvb RMSNorm(c_kv)           k = [k_nope | k_pe]
    y = W_o [ sigmoid(W_g x) * Attention(q, k, v) ]

Megatron's ``MLASelfAttention`` always rotates part of q and k and has no output gate, and its local form is refused
under sequence and context parallelism, so this is a module of its own; parameter names follow Megatron's.

Shapes: s local sequence, S whole sequence, b batch, d hidden, n heads of this rank, r key-value latent width,
p shared key channels (``qk_pos_emb_head_dim``), v value width.
"""

from typing import Any

import torch
from einops import rearrange
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from k3_plugins.transformer.core_attention import gather_sequence, self_attention_core
from k3_plugins.transformer.gated_mla.config import GatedMLAConfig
from k3_plugins.transformer.logit_maxima import LogitMaxima
from k3_plugins.transformer.norm import RMSNorm
from k3_plugins.transformer.tensor_parallel import ReplicatedLinear, enter_region, local_column_linear


class GatedMLASelfAttention(MegatronModule):
    """Gated NoPE MLA in Megatron's self-attention slot; heads are split over the tensor-parallel group.

    Under context parallelism the ranks exchange the compressed latent (r + p channels a token), never keys and values.

    Args:
        config: Megatron's MLA config (``--multi-latent-attention``), which carries all sizes.
        layer_number: 1-based number in the whole model.
        mla_config: flags of the feature.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        mla_config: GatedMLAConfig,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,  # the exchange is always an all-gather of the latent
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        if attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"gated MLA is causal; it cannot be built with {attn_mask_type}")
        super().__init__(config=config)
        self.layer_number = layer_number
        self.mla_config = mla_config
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group, self.cp_group = self.pg_collection.tp, self.pg_collection.cp
        self.forward_calls = 0
        self.logit_maxima: LogitMaxima | None = None  # set by whoever wants the largest logits
        self.generation_cache: Any = None  # a LatentCache (generation.py) while text is generated

        heads, tp = config.num_attention_heads, self.tp_group.size()
        if heads % tp:
            raise ValueError(
                f"{heads} attention heads cannot be split over --tensor-model-parallel-size {tp}; choose a size that "
                "divides --num-attention-heads."
            )
        self.local_heads = heads // tp
        self.q_head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        self.softmax_scale = self.q_head_dim**-0.5

        def column(input_size: int, output_size: int, label: str) -> ColumnParallelLinear:
            label = f"{name}.{label}" if name else label
            return local_column_linear(input_size, output_size, config, self.tp_group, name=label)

        if config.q_lora_rank is None:
            self.linear_q_proj = column(config.hidden_size, heads * self.q_head_dim, "linear_q_proj")
        else:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, mla_config.mla_latent_norm_eps)
            self.linear_q_up_proj = column(config.q_lora_rank, heads * self.q_head_dim, "linear_q_up_proj")
        self.linear_kv_down_proj = ReplicatedLinear(
            config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim, config
        )
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, mla_config.mla_latent_norm_eps)
        self.linear_kv_up_proj = column(
            config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim), "linear_kv_up_proj"
        )
        if mla_config.mla_output_gate:
            self.linear_gate = column(config.hidden_size, heads * config.v_head_dim, "linear_gate")
        self.linear_proj = RowParallelLinear(
            heads * config.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
            name=f"{name}.linear_proj" if name else "linear_proj",
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: object | None = None,
        **rotary: object,
    ) -> tuple[Tensor, None]:
        """One gated MLA layer.

        Args:
            hidden_states: ``[s, b, d]`` (``[s/TP, b, d]`` under sequence parallelism).
            attention_mask: ignored; the mask is causal, cut at the boundaries in ``packed_seq_params``.
            packed_seq_params: boundaries of packed sequences (``thd``, b = 1).
            rotary: Megatron's rotary arguments, all None: there is no position encoding.

        Returns:
            ``[s, b, d]`` (or its sequence shard) and no bias.
        """
        if inference_context is not None:
            raise NotImplementedError(
                "Megatron's inference engine does not run gated MLA; use k3_plugins' own generation."
            )
        self.forward_calls += 1
        if self.generation_cache is not None:
            return self.generation_cache.advance(self, hidden_states), None
        x = enter_region(hidden_states, self.config, self.tp_group)
        latent = enter_region(self.compress(hidden_states), self.config, self.tp_group)
        key, value = self.expand(gather_sequence(latent, self.cp_group))
        out = self_attention_core(
            self.query(hidden_states, x),
            key,
            value,
            scale=self.softmax_scale,
            dropout_p=self.config.attention_dropout if self.training else 0.0,
            packed_seq_params=packed_seq_params,
            cp_group=self.cp_group,
            maxima=self.logit_maxima if self.training else None,
        ).flatten(2)
        return self.linear_proj(self.gate(out, x).to(hidden_states.dtype))[0], None

    def compress(self, hidden_states: Tensor) -> Tensor:
        """The token's cache entry: normalised latent and shared key channels, ``[s, b, d]`` to ``[s, b, r + p]``."""
        latent, key_shared = self.linear_kv_down_proj(hidden_states).split(
            [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1
        )
        return torch.cat([self.kv_layernorm(latent), key_shared], dim=-1)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[S, b, n, qk]`` and values ``[S, b, n, v]`` from latents ``[S, b, r + p]``."""
        latent, key_shared = latent.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        up = rearrange(self.linear_kv_up_proj(latent)[0], "s b (n c) -> s b n c", n=self.local_heads)
        key, value = up.split([self.config.qk_head_dim, self.config.v_head_dim], dim=-1)
        key_shared = key_shared.unsqueeze(2).expand(-1, -1, self.local_heads, -1)
        return torch.cat([key, key_shared], dim=-1), value

    def query(self, hidden_states: Tensor, x: Tensor) -> Tensor:
        """Queries ``[s, b, n, qk]``; ``x`` is ``hidden_states`` after it entered the tensor-parallel region."""
        if self.config.q_lora_rank is None:
            q = self.linear_q_proj(x)[0]
        else:
            compressed = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            q = self.linear_q_up_proj(enter_region(compressed, self.config, self.tp_group))[0]
        return rearrange(q, "s b (n c) -> s b n c", n=self.local_heads)

    def gate(self, out: Tensor, x: Tensor) -> Tensor:
        """sigmoid(W_g x) * out in the precision of ``out`` (at least fp32), ``[s, b, n * v]``."""
        if not self.mla_config.mla_output_gate:
            return out
        return torch.sigmoid(self.linear_gate(x)[0].to(out.dtype)) * out
