"""Floating-point operations of one token, forward. A multiply-add counts as two; attention sees half the context."""

from __future__ import annotations

from k3_plugins.models.kimi_k3.config import KimiK3Config
from k3_plugins.plan.parameters import first_parts, kda_sizes, last_parts, layer_parts
from k3_plugins.transformer.attention_residuals.config import forward_flops_per_token as residual_flops

FMA = 2


def layer_flops(config: KimiK3Config, layer: int, context: int) -> float:
    """Of one layer (0-based), averaged over the tokens of a sequence of ``context`` tokens."""
    flops = FMA * sum(p.parameters * p.share_used for p in layer_parts(config, layer) if p.multiplied)
    if config.attention_pattern[layer]:
        _, sizes = kda_sizes(config)
        # decay, readout for the correction, update, readout of a K x V state
        return flops + FMA * 4 * sizes.num_value_heads * sizes.head_dim * sizes.value_head_dim
    widths = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
    return flops + FMA * config.num_attention_heads * widths * context / 2


def feed_forward_flops(config: KimiK3Config, layer: int) -> tuple[float, float, float]:
    """Of a layer's dense network, of its routed experts with router and projections, and of its shared experts."""
    kinds = {"dense feed-forward": 0, "router": 1, "latent projections": 1, "experts": 1, "shared experts": 2}
    flops = [0.0, 0.0, 0.0]
    for part in layer_parts(config, layer):
        if part.name in kinds:
            flops[kinds[part.name]] += FMA * part.parameters * part.share_used
    return flops[0], flops[1], flops[2]


def ends_flops(config: KimiK3Config) -> float:
    """Of the embedding and the output layer."""
    parts = [*first_parts(config), *last_parts(config)]
    return FMA * sum(part.parameters for part in parts if part.multiplied)


def model_flops(config: KimiK3Config, context: int) -> float:
    """Of the whole model, the aggregations of Attention Residuals included."""
    flops = ends_flops(config) + sum(layer_flops(config, layer, context) for layer in range(config.num_layers))
    if config.attn_res_block_size is not None:
        flops += residual_flops(config.num_layers, config.attn_res_block_size, config.hidden_size)
    return flops
