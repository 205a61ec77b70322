"""The splitting rule of every kind of module: which rows of its weights belong together.

Rules are found by class name along a module's bases, so that this feature imports no other one. A module of your own
says it itself: a method ``muon_splits()`` that returns the same as a rule,

    {relative parameter name: Split(...), or the reason (a string) why AdamW updates it}

A weight that no rule claims goes to AdamW: orthogonalising a fused weight as one matrix would mix its parts without a
word.

Letters: f width of a feed-forward layer, l input and output width of the experts, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from k3_plugins.optimizer.per_head_muon.splits import Split, whole

Claims = Mapping[str, "Split | str"]

CONVOLUTION = "depthwise convolution kernel"
EMBEDDING = "embedding"


def claims_of(module: Any) -> Claims:
    """What a module says about its parameters; empty for a module without a rule."""
    if hasattr(module, "muon_splits"):
        return module.muon_splits()
    for base in type(module).__mro__:
        rule = _RULES.get(f"{base.__module__}:{base.__qualname__}")
        if rule is not None:
            return rule(module)
    return {}


def _whole(module: Any, *names: str) -> Claims:
    """One matrix for each of these linear layers."""
    return {f"{name}.weight": whole(getattr(module, name).weight.shape[0]) for name in names if _has(module, name)}


def _has(module: Any, name: str) -> bool:
    return getattr(getattr(module, name, None), "weight", None) is not None


def _present(module: Any, claims: Claims) -> Claims:
    """The claims on layers that this module has: some are optional."""
    return {path: claim for path, claim in claims.items() if _has(module, path.removesuffix(".weight"))}


def _self_attention(module: Any) -> Claims:
    """Megatron fuses, group by group: the group's query heads, their output gates if there are any, a key, a value."""
    config = module.config
    width = module.hidden_size_per_attention_head
    per_group = config.num_attention_heads // config.num_query_groups
    gates = (("gate", width),) * per_group if getattr(config, "attention_output_gate", False) else ()
    group = (*((("q", width),) * per_group), *gates, ("k", width), ("v", width))
    return {
        "linear_qkv.weight": Split(group, config.num_query_groups, "head"),
        **_whole(module, "linear_proj"),
    }


def _cross_attention(module: Any) -> Claims:
    heads, width = module.config.num_attention_heads, module.hidden_size_per_attention_head
    return {
        "linear_q.weight": Split((("q", width),), heads, "head"),
        "linear_kv.weight": Split((("k", width), ("v", width)), heads, "head"),
        **_whole(module, "linear_proj"),
    }


def _latent_attention(module: Any) -> Claims:
    """Megatron's MLA and the gated one: per-head up-projections, fused down-projections, an output gate per head."""
    config = module.config
    heads, rope = config.num_attention_heads, config.qk_pos_emb_head_dim
    query = Split((("q", config.qk_head_dim + rope),), heads, "head")
    down = (("kv", config.kv_lora_rank), ("k shared", rope))
    claims: dict[str, Split | str] = {
        "linear_q_proj.weight": query,
        "linear_q_up_proj.weight": query,
        "linear_kv_up_proj.weight": Split((("k", config.qk_head_dim), ("v", config.v_head_dim)), heads, "head"),
        "linear_kv_down_proj.weight": Split(down),
        "linear_gate.weight": Split((("gate", config.v_head_dim),), heads, "head"),
    }
    if config.q_lora_rank is not None:
        claims["linear_qkv_down_proj.weight"] = Split((("q", config.q_lora_rank), *down))
    return {**_present(module, claims), **_whole(module, "linear_q_down_proj", "linear_proj")}


def _kda(module: Any) -> Claims:
    sizes = module.sizes
    return {
        "linear_q.weight": Split((("q", sizes.head_dim),), sizes.num_heads, "head"),
        "linear_k.weight": Split((("k", sizes.head_dim),), sizes.num_heads, "head"),
        "linear_v.weight": Split((("v", sizes.value_head_dim),), sizes.num_value_heads, "head"),
        "linear_decay_up.weight": Split((("decay", sizes.head_dim),), sizes.num_value_heads, "head"),
        "linear_gate.weight": Split((("gate", sizes.value_head_dim),), sizes.num_value_heads, "head"),
        **_whole(module, "linear_beta", "linear_decay_down", "linear_gate_down", "linear_proj"),
        **dict.fromkeys(("q_conv", "k_conv", "v_conv"), CONVOLUTION),
    }


def _mlp(module: Any) -> Claims:
    """Gate and up are stacked in the first layer, alike on every tensor rank."""
    if not module.config.gated_linear_unit:
        return _whole(module, "linear_fc1", "linear_fc2")
    half = module.linear_fc1.weight.shape[0] // 2
    return {
        "linear_fc1.weight": Split((("gate", half), ("up", half)), order="local"),
        **_whole(module, "linear_fc2"),
    }


def _grouped_linear(module: Any, name: str, parts: Callable[[int], tuple[tuple[str, int], ...]]) -> Claims:
    """Transformer Engine's grouped linear layer: one weight per expert (``weight0``, ...), or all stacked in one."""
    claims: dict[str, Split | str] = {}
    for key, weight in getattr(module, name).named_parameters(recurse=False):
        if key.startswith("weight"):
            stacked = weight.dim() == 3
            rows = weight.shape[-2]
            claims[f"{name}.{key}"] = Split(
                parts(rows), weight.shape[0] if stacked else 1, "expert" if stacked else "", "local"
            )
    return claims


def _grouped_experts_te(module: Any) -> Claims:
    gated, interleaved = module.config.gated_linear_unit, module.config.moe_mlp_glu_interleave_size

    def first(rows: int) -> tuple[tuple[str, int], ...]:
        if not gated:
            return (("", rows),)
        run = interleaved or rows // 2
        return (("gate", run), ("up", run)) * (rows // (2 * run))

    return {
        **_grouped_linear(module, "linear_fc1", first),
        **_grouped_linear(module, "linear_fc2", lambda rows: (("", rows),)),
    }


def _stacked_experts(module: Any) -> Claims:
    """``[E, 2 f, l]`` and ``[E, l, f]``: one matrix per expert, gate and up apart."""
    experts, rows, _ = module.weight1.shape
    gate_up = (("gate", rows // 2), ("up", rows // 2))
    return {
        "weight1": Split(gate_up, experts, "expert", "local"),
        "weight2": Split((("", module.weight2.shape[1]),), experts, "expert", "local"),
    }


def _single_weight(module: Any) -> Claims:
    return {"weight": whole(module.weight.shape[0])}


def _moe_layer(module: Any) -> Claims:
    return _whole(module, "fc1_latent_proj", "fc2_latent_proj")


def _multi_token_prediction(module: Any) -> Claims:
    return _whole(module, "eh_proj")


def _vision_block(module: Any) -> Claims:
    head = {name: Split(((name, module.head_dim),), module.config.num_attention_heads, "head") for name in "qkv"}
    return {
        **{f"linear_{name}.weight": split for name, split in head.items()},
        **_whole(module, "linear_proj", "linear_fc1", "linear_fc2"),
    }


def _projector(module: Any) -> Claims:
    return _whole(module, "linear_fc1", "linear_fc2")


def _embedding(module: Any) -> Claims:
    # Megatron tags word embeddings only; a learned position embedding is 2-D and looks like any other matrix.
    return {name: EMBEDDING for name, _ in module.named_parameters()}


_RULES: dict[str, Callable[[Any], Claims]] = {
    "megatron.core.transformer.attention:SelfAttention": _self_attention,
    "megatron.core.transformer.attention:CrossAttention": _cross_attention,
    "megatron.core.transformer.multi_latent_attention:MLASelfAttention": _latent_attention,
    "megatron.core.transformer.mlp:MLP": _mlp,
    "megatron.core.transformer.moe.experts:TEGroupedMLP": _grouped_experts_te,
    "megatron.core.transformer.moe.router:Router": _single_weight,
    "megatron.core.transformer.moe.moe_layer:MoELayer": _moe_layer,
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer": _multi_token_prediction,
    "megatron.core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding": _embedding,
    "k3_plugins.transformer.kda.layer:KimiDeltaAttention": _kda,
    "k3_plugins.transformer.gated_mla.layer:GatedMLASelfAttention": _latent_attention,
    "k3_plugins.transformer.moe.experts:GroupedExperts": _stacked_experts,
    "k3_plugins.transformer.moe.latent_moe.projection:LatentProjection": _single_weight,
    "k3_plugins.vision.moonvit.block:MoonViTBlock": _vision_block,
    "k3_plugins.vision.moonvit.encoder:Projector": _projector,
    "k3_plugins.vision.moonvit.encoder:PatchEmbedding": _embedding,
}
