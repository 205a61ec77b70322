"""The Kimi Delta Attention layer for Megatron's self-attention slot.

Sources: Kimi Linear (arXiv 2510.26692, section 3) and the K3 technical report (arXiv 2607.24653).

    q, k = L2Norm(SiLU(ShortConv(W x)))      v = SiLU(ShortConv(W_v x))      beta = sigmoid(W_beta x)
    z = W_f2 W_f1 x + dt_bias                g = kda_gate(z, A_log)          o = KDA(q, k, v, g, beta)
    y = W_o [ sigmoid(W_g x) * RMSNorm(o) ]

Shapes: s sequence, b batch, d hidden, H key heads, HV value heads, K key width, V value width; under tensor
parallelism H and HV count the heads of one rank. Megatron's activations are ``[s, b, d]``, the operators take
``[b, s, ...]``.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

from k3_plugins.memory import annotate
from k3_plugins.transformer.kda.config import KDAConfig, KDASizes
from k3_plugins.transformer.kda.context_parallel import (
    contiguous_to_zigzag,
    kda_cp,
    short_conv_cp,
    zigzag_to_contiguous,
)
from k3_plugins.transformer.kda.ops import kda, kda_gate
from k3_plugins.transformer.kda.short_conv import short_conv
from k3_plugins.transformer.norm import RMSNorm, parameter_device, rms_norm
from k3_plugins.transformer.tensor_parallel import (
    ReplicatedLinear,
    enter_region,
    local_column_linear,
    share_over_region,
)

L2_NORM_EPS = 1e-6
"""Added to the squared norm of q and k, as fla's and transformers' L2 normalisation do."""

TP_SHARDED = ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias")
"""This module's own parameters that are split over the tensor-parallel ranks along dimension 0."""


class KimiDeltaAttention(MegatronModule):
    """KDA in Megatron's self-attention slot.

    Heads are split over the tensor-parallel group. ``A_log`` and ``dt_bias`` stay in fp32 whatever the model's
    parameter dtype, and are drawn in fp32: a bf16 draw of log U(1, 16) yields -inf for some heads.

    Args:
        config: Megatron's transformer config.
        layer_number: 1-based number in the whole model.
        kda_config: flags of the feature.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        kda_config: KDAConfig,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,  # softmax attention's choice of exchange; KDA has one of its own
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        if attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"KDA is causal; it cannot be built with {attn_mask_type}")
        super().__init__(config=config)
        self.layer_number = layer_number
        self.kda_config = kda_config
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group, self.cp_group = self.pg_collection.tp, self.pg_collection.cp
        self.sizes = sizes = KDASizes.resolve(kda_config, config.num_attention_heads, config.kv_channels)
        self.forward_calls = 0
        self.generation_cache: Any = None  # a KDACache (generation.py) while text is generated

        tp = self.tp_group.size()
        if sizes.num_heads % tp:
            raise ValueError(
                f"{sizes.num_heads} KDA heads cannot be split over --tensor-model-parallel-size {tp}; choose a size "
                "that divides --kda-num-heads."
            )
        self.local_heads = sizes.num_heads // tp
        self.local_value_heads = sizes.num_value_heads // tp
        key_width, value_width = sizes.num_heads * sizes.head_dim, sizes.num_value_heads * sizes.value_head_dim
        decay_width = sizes.num_value_heads * sizes.head_dim

        def column(
            output_size: int, label: str, input_size: int = config.hidden_size, bias: bool = False
        ) -> ColumnParallelLinear:
            label = f"{name}.{label}" if name else label
            return local_column_linear(input_size, output_size, config, self.tp_group, bias=bias, name=label)

        self.linear_q = column(key_width, "linear_q")
        self.linear_k = column(key_width, "linear_k")
        self.linear_v = column(value_width, "linear_v")
        self.linear_beta = column(sizes.num_value_heads, "linear_beta")
        self.linear_decay_down = ReplicatedLinear(config.hidden_size, sizes.head_dim, config)
        self.linear_decay_up = column(decay_width, "linear_decay_up", input_size=sizes.head_dim)
        if kda_config.kda_output_gate == "full-rank":
            self.linear_gate = column(value_width, "linear_gate")
        else:
            self.linear_gate_down = ReplicatedLinear(config.hidden_size, sizes.value_head_dim, config)
            self.linear_gate = column(
                value_width, "linear_gate", input_size=sizes.value_head_dim, bias=kda_config.kda_output_gate_bias
            )
        # The weight is shared by all heads, hence summed over the ranks' heads in forward, not by Megatron.
        self.out_norm = RMSNorm(config, sizes.value_head_dim, config.layernorm_epsilon, sequence_parallel=False)
        self.linear_proj = RowParallelLinear(
            value_width,
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

        device = parameter_device(config)
        kernel = kda_config.kda_conv_kernel_size
        for label, width in (("q_conv", key_width), ("k_conv", key_width), ("v_conv", value_width)):
            shape = (width // tp, kernel)
            setattr(self, label, nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device)))
        self.A_log = nn.Parameter(torch.empty(self.local_value_heads, dtype=torch.float32, device=device))
        self.dt_bias = nn.Parameter(torch.empty(decay_width // tp, dtype=torch.float32, device=device))
        for label in TP_SHARDED:
            set_tensor_model_parallel_attributes(getattr(self, label), is_parallel=True, dim=0, stride=1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give this module's own parameters their initial values.

        Each is drawn whole, in fp32, from the default CPU generator (seeded alike on all tensor-parallel ranks) and
        then cut, so that the values depend neither on the tensor-parallel size nor on the device or dtype. They are
        set even with ``perform_initialization`` off: an uninitialised dt_bias is not a model.
        """
        fan_in_bound = 1.0 / math.sqrt(self.kda_config.kda_conv_kernel_size)  # nn.Conv1d's default for depthwise
        for label in ("q_conv", "k_conv", "v_conv"):
            self._draw(label, lambda full: full.uniform_(-fan_in_bound, fan_in_bound))
        if self.kda_config.kda_gate == "bounded":
            self._draw("A_log", lambda full: full.zero_())
        else:
            self._draw("A_log", lambda full: full.uniform_(1.0, 16.0).log_())
        self._draw("dt_bias", _draw_dt_bias)

    def _draw(self, label: str, fill: Callable[[Tensor], Tensor]) -> None:
        """Fill this rank's rows of a parameter from a draw of all rows."""
        param = getattr(self, label)
        rows = param.shape[0]
        full = torch.empty(rows * self.tp_group.size(), *param.shape[1:], dtype=torch.float32, device="cpu")
        fill(full)
        with torch.no_grad():
            param.copy_(full[rows * self.tp_group.rank() : rows * (self.tp_group.rank() + 1)])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Keep ``A_log`` and ``dt_bias`` in fp32 when the model is cast (``Float16Module`` casts every parameter)."""
        kept = {label: self._parameters[label] for label in ("A_log", "dt_bias")}
        exact = {label: param.detach().clone() for label, param in kept.items()}
        super()._apply(fn, recurse)
        for label in kept:
            moved = self._parameters[label]
            if moved.is_floating_point() and moved.dtype != exact[label].dtype:
                # Same device as the cast parameter, but the values from before the cast.
                restored = exact[label].to(moved.device) if not exact[label].is_meta else moved.float()
                moved.data = restored
        return self

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: object | None = None,
        **rotary: object,
    ) -> tuple[Tensor, None]:
        """One KDA layer.

        Args:
            hidden_states: ``[s, b, d]`` (``[s/TP, b, d]`` under sequence parallelism).
            attention_mask: ignored; KDA is causal by construction and packed sequences come in ``packed_seq_params``.
            packed_seq_params: boundaries of packed sequences (``thd``, b = 1).
            rotary: Megatron's rotary arguments, all None: KDA has no position encoding.

        Returns:
            ``[s, b, d]`` (or its sequence shard) and no bias.
        """
        if inference_context is not None:
            raise NotImplementedError("Megatron's inference engine does not run KDA; use k3_plugins' own generation.")
        self.forward_calls += 1
        if self.generation_cache is not None:
            return self.generation_cache.advance(self, hidden_states), None
        cu_seqlens = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q

        x_here = enter_region(hidden_states, self.config, self.tp_group)
        decay_low = enter_region(self.linear_decay_down(hidden_states), self.config, self.tp_group)
        # Megatron deals sequences out in zigzag order for softmax attention; a recurrence wants contiguous slices.
        x, decay_low = (zigzag_to_contiguous(t, self.cp_group, dim=0) for t in (x_here, decay_low))

        q = self._short_conv(self.linear_q(x)[0], self.q_conv, cu_seqlens)
        k = self._short_conv(self.linear_k(x)[0], self.k_conv, cu_seqlens)
        v = self._short_conv(self.linear_v(x)[0], self.v_conv, cu_seqlens)
        q, k = (l2_norm(rearrange(t, "b s (h k) -> b s h k", k=self.sizes.head_dim)) for t in (q, k))
        v = rearrange(v, "b s (h v) -> b s h v", v=self.sizes.value_head_dim)

        z = self.linear_decay_up(decay_low)[0].to(self.dt_bias.dtype) + self.dt_bias
        z = rearrange(z, "s b (h k) -> b s h k", k=self.sizes.head_dim)
        # sums of log decays are exponentiated: rounding would add up
        g = annotate(kda_gate(z, self.A_log, self.kda_config.gate_lower_bound), name="gate", exact=True)
        beta = torch.sigmoid(rearrange(self.linear_beta(x)[0], "s b h -> b s h").to(g.dtype))

        o = self._recurrence(q, k, v, g, beta, cu_seqlens)
        o = contiguous_to_zigzag(o, self.cp_group, dim=1)
        return self.linear_proj(self._gated_norm(o, hidden_states, x_here))[0], None

    def _short_conv(self, x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """``[s, b, c]`` to ``[b, s, c]`` through the causal convolution and SiLU."""
        x = rearrange(x, "s b c -> b s c")
        if self.cp_group.size() > 1:
            return short_conv_cp(x, weight, group=self.cp_group, cu_seqlens=cu_seqlens)
        return short_conv(x, weight, cu_seqlens=cu_seqlens)

    def _recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None
    ) -> Tensor:
        """The KDA operator on this rank's contiguous slice, ``[b, s, HV, V]``."""
        backend, bound = self.kda_config.kda_backend, self.kda_config.gate_lower_bound
        if self.cp_group.size() > 1:
            group = self.cp_group
            return kda_cp(q, k, v, g, beta, group=group, cu_seqlens=cu_seqlens, backend=backend, gate_lower_bound=bound)
        o, _ = kda(q, k, v, g, beta, cu_seqlens=cu_seqlens, backend=backend, gate_lower_bound=bound)
        return o

    def _gated_norm(self, o: Tensor, hidden_states: Tensor, x: Tensor) -> Tensor:
        """sigmoid(gate) * RMSNorm(o) in fp32, ``[b, s, HV, V]`` to ``[s, b, HV * V]`` in the input's dtype."""
        if self.kda_config.kda_output_gate == "low-rank":
            x = enter_region(self.linear_gate_down(hidden_states), self.config, self.tp_group)
        gate = self.linear_gate(x)[0]
        weight = share_over_region(self.out_norm.weight, self.tp_group)
        normed = rearrange(rms_norm(o, weight, self.out_norm.eps), "b s h v -> s b (h v)")
        return (torch.sigmoid(gate.to(normed.dtype)) * normed).to(hidden_states.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict:
        """Megatron's distributed-checkpoint description; own parameters are split over TP along dimension 0."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            tensor_parallel_layers_axis_map=dict.fromkeys(TP_SHARDED, 0),
            sharded_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for label, module in self.named_children():
            sharded.update(
                sharded_state_dict_default(
                    module, f"{prefix}{label}.", sharded_offsets, metadata, tp_group=self.tp_group
                )
            )
        return sharded


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, in at least fp32, returned in x's dtype."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + L2_NORM_EPS)).to(x.dtype)


def _draw_dt_bias(full: Tensor) -> Tensor:
    """Inverse softplus of dt, dt = exp(U(log 1e-3, log 0.1)) clamped at 1e-4."""
    dt = full.uniform_(math.log(1e-3), math.log(0.1)).exp_().clamp_(min=1e-4)
    return dt.add_(torch.log(-torch.expm1(-dt)))
