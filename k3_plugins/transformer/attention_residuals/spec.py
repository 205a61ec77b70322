"""Specs in, specs out: the same model with Attention Residuals in every layer."""

import dataclasses

from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from k3_plugins.transformer.attention_residuals.config import AttentionResidualsConfig
from k3_plugins.transformer.attention_residuals.layer import attention_residual_layer
from k3_plugins.transformer.attention_residuals.mtp import attention_residual_mtp_layer

type BlockSpec = TransformerBlockSubmodules | ModuleSpec


def wrap_layer_spec(spec: ModuleSpec, config: AttentionResidualsConfig) -> ModuleSpec:
    """The spec of one transformer layer, any TransformerLayer class. Wrapping twice changes nothing."""
    return dataclasses.replace(
        spec,
        module=attention_residual_layer(spec.module),
        params={**spec.params, "attention_residuals": config},
    )


def wrap_block_spec(spec: BlockSpec, config: AttentionResidualsConfig) -> BlockSpec:
    """What a GPTModel takes as `transformer_layer_spec`: a layer, or the submodules of a block (or a spec of one)."""
    if isinstance(spec, TransformerBlockSubmodules):
        return dataclasses.replace(spec, layer_specs=[wrap_layer_spec(layer, config) for layer in spec.layer_specs])
    if isinstance(spec.submodules, TransformerBlockSubmodules):
        return dataclasses.replace(spec, submodules=wrap_block_spec(spec.submodules, config))
    return wrap_layer_spec(spec, config)


def wrap_mtp_spec(
    spec: MultiTokenPredictionBlockSubmodules | ModuleSpec | None, config: AttentionResidualsConfig
) -> MultiTokenPredictionBlockSubmodules | ModuleSpec | None:
    """What a GPTModel takes as `mtp_block_spec`."""
    if spec is None:
        return None
    if isinstance(spec, ModuleSpec):
        return dataclasses.replace(spec, submodules=wrap_mtp_spec(spec.submodules, config))

    def wrap_depth(depth: ModuleSpec) -> ModuleSpec:
        submodules: MultiTokenPredictionLayerSubmodules = depth.submodules
        inner = wrap_layer_spec(submodules.mtp_model_layer, config)
        return dataclasses.replace(
            depth,
            module=attention_residual_mtp_layer(depth.module),
            submodules=dataclasses.replace(submodules, mtp_model_layer=inner),
            params={**depth.params, "attention_residuals": config},
        )

    return dataclasses.replace(spec, layer_specs=[wrap_depth(depth) for depth in spec.layer_specs])
