"""Layer specs of a Kimi-K3-style GPT: what ``--spec k3_plugins.models.kimi_k3.layer_specs gpt`` names.

The one place that composes the features into layers. Every layer is

    input_layernorm -> KDA or full attention -> pre_mlp_layernorm -> dense MLP or mixture of experts

with a norm and an attention core of our own: Megatron's local spec refuses sequence and context parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from k3_plugins.activation import current
from k3_plugins.models.kimi_k3.config import expert_pattern
from k3_plugins.transformer.core_attention import CausalCoreAttention
from k3_plugins.transformer.gated_mla.config import GatedMLAConfig
from k3_plugins.transformer.gated_mla.layer import GatedMLASelfAttention
from k3_plugins.transformer.kda.config import KDAConfig
from k3_plugins.transformer.kda.layer import KimiDeltaAttention
from k3_plugins.transformer.kda.pattern import resolve_pattern
from k3_plugins.transformer.linear_backend import linear_backend
from k3_plugins.transformer.moe.router import PaddedTopKRouter
from k3_plugins.transformer.norm import RMSNorm

if TYPE_CHECKING:
    from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig
    from k3_plugins.transformer.moe.moonep.config import MoonEPConfig
    from k3_plugins.transformer.moe.quantile_balancing.config import QuantileBalancingConfig


CAUSAL = {"attn_mask_type": AttnMaskType.causal}
"""Multi-token prediction asks the spec of its layer for the mask."""


def gpt(config: object, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers that this pipeline (and virtual pipeline) stage builds.

    Under the plug-in's doors the active features decide. In a launcher of your own, without them, KDA takes the layers
    that ``linear_attention_freq`` marks (3 in 4 by default) and the others are gated MLA when the config is an MLA
    config, plain attention otherwise; use ``functools.partial(block_spec, ...)`` for other feature settings.

    Args:
        config: Megatron's ``GPTModelConfig``, or a bare ``TransformerConfig``.
        vp_stage: virtual pipeline stage.
    """
    transformer: TransformerConfig = getattr(config, "transformer", config)
    return block_spec(transformer, vp_stage, **_active_features(transformer))


def mtp(config: object, vp_stage: int | None = None) -> MultiTokenPredictionBlockSubmodules | None:
    """The depths of multi-token prediction that this stage builds, each with a layer like the model's last one.

    In K3 that is full attention and a mixture of experts. None on stages without depths.

    Args:
        config: Megatron's ``GPTModelConfig``, or a bare ``TransformerConfig``.
        vp_stage: virtual pipeline stage.
    """
    transformer: TransformerConfig = getattr(config, "transformer", config)
    if not transformer.mtp_num_layers or get_mtp_num_layers_to_build(transformer, vp_stage=vp_stage) == 0:
        return None
    depth = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            layer_norm=RMSNorm,
            eh_proj=linear_backend(transformer).column_parallel_linear(),
            mtp_model_layer=_layer_specs(transformer, [transformer.num_layers - 1], **_active_features(transformer))[0],
        ),
    )
    depths = 1 if transformer.mtp_use_repeated_layer else transformer.mtp_num_layers
    return MultiTokenPredictionBlockSubmodules(layer_specs=[depth] * depths)


def _active_features(config: TransformerConfig) -> dict[str, Any]:
    """The keyword arguments of ``block_spec`` for this process: what is active, or K3's attention without a door."""
    activation = current()
    if activation is None:
        return {"kda": KDAConfig(), "mla": GatedMLAConfig() if config.multi_latent_attention else None}
    return {
        "kda": activation.configs.get("kda"),
        "mla": activation.configs.get("gated-mla"),
        "moe": MoEFeatures(
            latent_moe=activation.configs.get("latent-moe"),
            quantile_balancing=activation.configs.get("quantile-balancing"),
            moonep=activation.configs.get("moonep"),
        ),
    }


@dataclass(frozen=True)
class MoEFeatures:
    """Settings of the feed-forward features; None leaves Megatron's own layer, router or dispatcher."""

    latent_moe: LatentMoEConfig | None = None
    quantile_balancing: QuantileBalancingConfig | None = None
    moonep: MoonEPConfig | None = None


def block_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    kda: KDAConfig | None,
    mla: GatedMLAConfig | None,
    moe: MoEFeatures | None = None,
) -> TransformerBlockSubmodules:
    """``gpt`` with the feature settings spelled out; None turns a feature off.

    Raises:
        ValueError: gated MLA without an MLA config, or the reverse; a layer pattern that does not fit the depth.
    """
    if (mla is not None) != config.multi_latent_attention:
        raise ValueError(
            "gated-mla and --multi-latent-attention must be used together: full-attention layers take their sizes from "
            "Megatron's MLA config. Add gated-mla to --k3-plugins, or drop --multi-latent-attention."
        )
    layers = _layer_specs(config, _local_layers(config, vp_stage), kda=kda, mla=mla, moe=moe)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer_specs(
    config: TransformerConfig,
    numbers: Sequence[int],
    *,
    kda: KDAConfig | None,
    mla: GatedMLAConfig | None,
    moe: MoEFeatures | None = None,
) -> list[ModuleSpec]:
    """The specs of the layers with these 0-based numbers in the whole model."""
    attention = [0] * config.num_layers
    if kda is not None:
        attention = resolve_pattern(
            config.linear_attention_freq, config.num_layers, kda.kda_last_layer_full_attention
        )
    experts = _moe_pattern(config)
    moe = moe or MoEFeatures()
    mlp = {0: _dense, 1: _moe}
    return [_layer_spec(config, kda if attention[i] else None, mla, mlp[experts[i]](config, moe)) for i in numbers]


def _layer_spec(
    config: TransformerConfig, kda: KDAConfig | None, mla: GatedMLAConfig | None, mlp: Callable[..., Any]
) -> ModuleSpec:
    if kda is not None:
        attention = ModuleSpec(module=KimiDeltaAttention, params={"kda_config": kda, **CAUSAL})
    elif mla is not None:
        attention = ModuleSpec(module=GatedMLASelfAttention, params={"mla_config": mla, **CAUSAL})
    else:
        attention = ModuleSpec(
            module=SelfAttention,
            params={**CAUSAL},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=CausalCoreAttention,
                linear_proj=RowParallelLinear,
                q_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
                k_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
            ),
        )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _dense(config: TransformerConfig, features: MoEFeatures) -> Callable[..., Any]:
    """A dense feed-forward network for the layer's ``mlp`` slot."""
    if features.latent_moe is not None:
        from k3_plugins.transformer.moe.latent_moe.spec import dense_mlp_spec

        return dense_mlp_spec(config, features.latent_moe)
    backend = linear_backend(config)
    return partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear()),
    )


def _moe(config: TransformerConfig, features: MoEFeatures) -> Callable[..., Any]:
    """A mixture of experts for the layer's ``mlp`` slot; modules of features that are off are not imported."""
    router: Callable[..., Any] = PaddedTopKRouter
    if features.quantile_balancing is not None:
        from k3_plugins.transformer.moe.quantile_balancing.spec import router_spec

        router = router_spec(features.quantile_balancing)
    if features.latent_moe is not None:
        from k3_plugins.transformer.moe.latent_moe.layer import LatentMoELayer
        from k3_plugins.transformer.moe.latent_moe.spec import moe_module_spec

        options = {}
        if features.moonep is not None:
            from k3_plugins.transformer.moe.moonep.spec import layer_options

            options = layer_options(LatentMoELayer, features.moonep)
        return moe_module_spec(config, features.latent_moe, router=router, **options)
    if features.moonep is not None:
        from k3_plugins.transformer.moe.moonep.spec import moe_module_spec as balanced_module_spec

        return balanced_module_spec(config, features.moonep, router=router)
    spec = get_moe_module_spec_for_backend(
        backend=linear_backend(config), num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    submodules = dataclasses.replace(spec.keywords["submodules"], router=router)
    return partial(spec.func, **{**spec.keywords, "submodules": submodules})


def _moe_pattern(config: TransformerConfig) -> list[int]:
    """1 for a mixture-of-experts layer, 0 for a dense one, layer by layer (Megatron's ``--moe-layer-freq``)."""
    if config.num_moe_experts is None:
        return expert_pattern(config.num_layers, first_dense=config.num_layers)
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [1 if i % frequency == 0 else 0 for i in range(config.num_layers)]
    if len(frequency) != config.num_layers or set(frequency) - {0, 1}:
        raise ValueError(
            f"--moe-layer-freq {frequency} does not fit --num-layers {config.num_layers}; give one 0 or 1 per layer."
        )
    return list(frequency)


def _local_layers(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    """0-based numbers of the layers on this stage."""
    if config.pipeline_model_parallel_layout is not None:
        return config.pipeline_model_parallel_layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    offset = get_transformer_layer_offset(config, vp_stage)
    return list(range(offset, offset + get_num_layers_to_build(config, vp_stage=vp_stage)))
