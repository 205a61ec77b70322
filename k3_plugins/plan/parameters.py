"""Parameters of a model, part by part, and how each part is split over ranks.

Letters: d hidden size, l latent width of the experts (d without one), f width of an expert, E experts, k per token, H
heads, K key and V value width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from k3_plugins.models.kimi_k3.config import KimiK3Config
from k3_plugins.transformer.kda.config import KDAConfig, KDASizes

Sharding = Literal["replicated", "tensor", "expert", "vocabulary"]
"""Whole on every rank of a stage; cut over TP; whole experts over EP; rows of the vocabulary over TP."""


@dataclass(frozen=True)
class Part:
    """Parameters of one kind in one place of the model."""

    name: str
    parameters: int
    sharding: Sharding
    share_used: float = 1.0
    """Of the parameters, the share that takes part in the computation of one token."""
    multiplied: bool = True
    """Whether each used parameter costs a multiply-add per token (not so for norms and the embedding's lookup)."""


def kda_sizes(config: KimiK3Config) -> tuple[KDAConfig, KDASizes]:
    """The KDA feature's own description of this model."""
    kda = KDAConfig(
        kda_num_heads=config.kda_num_heads,
        kda_head_dim=config.kda_head_dim,
        kda_value_head_dim=config.kda_value_head_dim,
        kda_conv_kernel_size=config.kda_conv_kernel_size,
        kda_gate=config.kda_gate,
        kda_output_gate=config.kda_output_gate,
        kda_output_gate_bias=config.kda_output_gate_bias,
    )
    return kda, KDASizes.resolve(kda, config.num_attention_heads, config.kda_head_dim)


def _kda(config: KimiK3Config) -> Iterator[Part]:
    kda, sizes = kda_sizes(config)
    d, keys, values = config.hidden_size, sizes.num_heads * sizes.head_dim, sizes.num_value_heads * sizes.value_head_dim
    decay = sizes.num_value_heads * sizes.head_dim
    yield Part("KDA projections", d * (2 * keys + values + sizes.num_value_heads) + values * d, "tensor")
    yield Part("KDA decay, down", d * sizes.head_dim, "replicated")
    yield Part("KDA decay, up", sizes.head_dim * decay, "tensor")
    if kda.kda_output_gate == "full-rank":
        yield Part("KDA output gate", d * values, "tensor")
    else:
        yield Part("KDA output gate, down", d * sizes.value_head_dim, "replicated")
        yield Part("KDA output gate, up", sizes.value_head_dim * values, "tensor")
        if kda.kda_output_gate_bias:
            yield Part("KDA output gate, bias", values, "tensor", multiplied=False)
    yield Part("KDA convolutions", kda.kda_conv_kernel_size * (2 * keys + values), "tensor")
    yield Part("KDA decay, A_log and dt_bias", sizes.num_value_heads + decay, "tensor", multiplied=False)
    yield Part("KDA output norm", sizes.value_head_dim, "replicated", multiplied=False)


def _mla(config: KimiK3Config) -> Iterator[Part]:
    d, heads = config.hidden_size, config.num_attention_heads
    query, value = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    if config.q_lora_rank is None:
        yield Part("MLA query", d * heads * query, "tensor")
    else:
        yield Part("MLA query, down", d * config.q_lora_rank, "replicated")
        yield Part("MLA query norm", config.q_lora_rank, "replicated", multiplied=False)
        yield Part("MLA query, up", config.q_lora_rank * heads * query, "tensor")
    yield Part("MLA latent, down", d * (config.kv_lora_rank + config.qk_pos_emb_head_dim), "replicated")
    yield Part("MLA latent norm", config.kv_lora_rank, "replicated", multiplied=False)
    yield Part("MLA latent, up", config.kv_lora_rank * heads * (config.qk_head_dim + value), "tensor")
    if config.mla_output_gate:
        yield Part("MLA output gate", d * heads * value, "tensor")
    yield Part("MLA output", heads * value * d, "tensor")


def _moe(config: KimiK3Config) -> Iterator[Part]:
    d, f, count = config.hidden_size, config.expert_ffn_hidden_size, config.num_experts
    assert count is not None
    width = config.moe_latent_size or d
    yield Part("router", d * count, "replicated")
    yield Part("router bias", count, "replicated", multiplied=False)
    if config.moe_latent_size is not None:
        yield Part("latent projections", 2 * d * width, "replicated")
        yield Part("latent norm", width, "replicated", multiplied=False)
    yield Part("experts", count * 3 * width * f, "expert", share_used=config.moe_top_k / count)
    if config.num_shared_experts:
        yield Part("shared experts", 3 * d * f * config.num_shared_experts, "tensor")


def layer_parts(config: KimiK3Config, layer: int) -> list[Part]:
    """The parts of one layer (0-based)."""
    d = config.hidden_size
    parts = [Part("layer norms", 2 * d, "replicated", multiplied=False)]
    if config.attn_res_block_size is not None:
        # a query and a key norm before each of the two sublayers
        parts.append(Part("attention residuals", 4 * d, "replicated", multiplied=False))
    parts += _kda(config) if config.attention_pattern[layer] else _mla(config)
    if config.moe_pattern[layer]:
        parts += _moe(config)
    else:
        parts.append(Part("dense feed-forward", 3 * d * config.dense_ffn_hidden_size, "tensor"))
    return parts


def first_parts(config: KimiK3Config) -> list[Part]:
    """What stands before the first layer."""
    return [Part("embedding", config.vocab_size * config.hidden_size, "vocabulary", multiplied=False)]


def last_parts(config: KimiK3Config) -> list[Part]:
    """What stands behind the last layer."""
    d = config.hidden_size
    parts = [Part("final norm", d, "replicated", multiplied=False)]
    if config.attn_res_block_size is not None:
        parts.append(Part("attention residuals", 2 * d, "replicated", multiplied=False))
    return [*parts, Part("output layer", config.vocab_size * d, "vocabulary")]


def mtp_parts(config: KimiK3Config) -> list[Part]:
    """One depth of multi-token prediction: a layer like the model's last, behind a projection of two normalised inputs.

    Its output layer and, where the first stage is on the same rank, its embedding are the model's own.
    """
    d = config.hidden_size
    parts = [
        Part("MTP projection", 2 * d * d, "tensor"),
        Part("MTP norms", 3 * d, "replicated", multiplied=False),
        *layer_parts(config, config.num_layers - 1),
    ]
    if config.attn_res_block_size is not None:
        parts.append(Part("attention residuals", 2 * d, "replicated", multiplied=False))
    return parts


def orthogonalised(part: Part) -> bool:
    """Whether Per-Head Muon updates the part: every weight matrix but those of the vocabulary and the convolutions."""
    return part.multiplied and part.sharding != "vocabulary" and part.name != "KDA convolutions"


def all_parts(config: KimiK3Config) -> list[Part]:
    """Every part of the model, layer after layer."""
    layers = [part for layer in range(config.num_layers) for part in layer_parts(config, layer)]
    return [*first_parts(config), *layers, *last_parts(config)]


def total(config: KimiK3Config) -> int:
    """Parameters of the language model (the router's bias, a buffer, is not one)."""
    return sum(part.parameters for part in all_parts(config) if part.name != "router bias")


def active(config: KimiK3Config) -> float:
    """Parameters that compute one token; the embedding, which is only looked up, does not count."""
    return sum(part.parameters * part.share_used for part in all_parts(config) if part.name not in _NOT_ACTIVE)


def vision(config: KimiK3Config) -> int:
    """Parameters of the vision encoder and its projector; 0 for a model that was published without one."""
    vit = config.vision
    if vit is None:
        return 0
    d, inner = vit.moonvit_hidden_size, vit.moonvit_num_heads * vit.moonvit_head_dim
    patches = 3 * vit.moonvit_patch_size**2 * d + vit.moonvit_position_grid**2 * d
    block = 4 * d * inner + 2 * d * vit.moonvit_ffn_size + 2 * d
    width = 4 * d  # 2 x 2 patches make a token
    norm = config.hidden_size if vit.moonvit_projector_norm == "post" else d
    return patches + vit.moonvit_num_layers * block + d + width * width + width * config.hidden_size + norm


_NOT_ACTIVE = frozenset(("router bias", "embedding"))


def on_rank(part: Part, tensor_parallel: int, expert_parallel: int, vocabulary: int, padded: int) -> int:
    """Parameters of a part on one rank of its stage.

    Args:
        vocabulary, padded: size of the vocabulary, and with the rows that Megatron adds to cut it evenly.
    """
    if part.name == "router bias":
        return 0  # a buffer
    divisor = {"replicated": 1, "tensor": tensor_parallel, "expert": expert_parallel, "vocabulary": tensor_parallel}
    count = part.parameters
    if part.sharding == "vocabulary":
        count = count // vocabulary * padded
    return count // divisor[part.sharding]
