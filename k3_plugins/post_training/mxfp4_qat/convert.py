"""Quantizers into the routed experts of a built model, and nowhere else, by ModelOpt's registry and configuration.

Only the modules that hold routed experts' weights are given to ModelOpt. Its whole-model entry would put (disabled)
quantizers into every linear layer, record a state that its distributed checkpoints refuse under virtual pipelines, and
raise on a pipeline rank without experts. Block scales are computed from the values, so quantizers hold no state: a
checkpoint is the same with and without them, under every layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from modelopt.torch.quantization.conversion import set_quantizer_by_cfg
from modelopt.torch.quantization.nn import QuantModuleRegistry, TensorQuantizer
from torch import nn

from k3_plugins.feature import FeatureError
from k3_plugins.post_training.mxfp4_qat import backends, stacked_experts
from k3_plugins.post_training.mxfp4_qat.config import MXFP4QATConfig
from k3_plugins.post_training.mxfp4_qat.formats import BLOCK
from k3_plugins.transformer.moe.experts import GroupedExperts


def quantizer_config(backend: str) -> list[dict[str, Any]]:
    """ModelOpt's configuration of the experts' quantizers.

    Args:
        backend: a value of ``--mxfp4-qat-backend``.
    """
    block_sizes = {-1: BLOCK, "type": "dynamic", "scale_bits": (8, 0)}
    common = {"block_sizes": block_sizes, "backend": backends.NAMES[backend]}
    return [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": (2, 1), **common}},
        {"quantizer_name": "*input_quantizer", "cfg": {"num_bits": (4, 3), **common}},
    ]


def quantize_routed_experts(model: nn.Module, config: MXFP4QATConfig) -> None:
    """Give every mixture-of-experts layer of a model its quantizers, in place. A model without one is left alone.

    Raises:
        FeatureError: experts of an unknown kind, or a linear layer whose input width 32 does not divide, by name.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MoELayer)]
    if not layers:
        return
    backends.register()
    stacked_experts.register()
    for name, layer in layers:
        place = f"{name}.experts (layer {layer.layer_number})"
        converted = set()
        for part, module, width in _quantizable(layer.experts, place):
            if width % BLOCK:
                raise FeatureError(
                    f"mxfp4-qat: {place}: {part} has {width} input columns on this rank, and {BLOCK} columns share a "
                    "scale. Choose a width that 32 divides (--moe-latent-size or --hidden-size for linear_fc1, "
                    "--moe-ffn-hidden-size over --expert-tensor-parallel-size for linear_fc2)"
                )
            if module in converted:
                continue
            if type(module) not in QuantModuleRegistry:
                raise FeatureError(f"mxfp4-qat: {place}: ModelOpt has no quantizers for a {type(module).__name__}")
            with warnings.catch_warnings():
                # A linear layer whose fused gradient accumulation has to end says so once for each expert.
                warnings.filterwarnings("ignore", message=".*accumulation.* is not supported with ModelOpt.*")
                converted.add(QuantModuleRegistry.convert(module))
        set_quantizer_by_cfg(layer.experts, quantizer_config(config.mxfp4_qat_backend))


def _quantizable(experts: nn.Module, place: str) -> Iterator[tuple[str, nn.Module, int]]:
    """(Name of a linear layer, the module that ModelOpt converts for it, its input width on this rank).

    Raises:
        FeatureError: experts of an unknown kind.
    """
    if isinstance(experts, GroupedExperts):
        yield "linear_fc1", experts, experts.weight1.shape[-1]
        yield "linear_fc2", experts, experts.weight2.shape[-1]
    elif isinstance(experts, SequentialMLP):
        for i, expert in enumerate(experts.local_experts):
            for linear in ("linear_fc1", "linear_fc2"):
                module = getattr(expert, linear)
                yield f"local_experts.{i}.{linear}", module, module.weight.shape[-1]
    elif isinstance(experts, TEGroupedMLP):
        for linear in ("linear_fc1", "linear_fc2"):
            module = getattr(experts, linear)
            yield linear, module, module.weight0.shape[-1]
    else:
        raise FeatureError(f"mxfp4-qat: {place} are of the kind {type(experts).__name__}, which it cannot quantize")


def quantizers(module: nn.Module) -> dict[str, TensorQuantizer]:
    """Name -> enabled quantizer, everywhere in a module."""
    return {
        name: child for name, child in module.named_modules() if isinstance(child, TensorQuantizer) and child.is_enabled
    }
