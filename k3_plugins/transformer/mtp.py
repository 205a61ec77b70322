"""The patch that gives multi-token prediction the K3 layer: Megatron's builder would take its own stock layer.

Imports neither torch nor megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from k3_plugins.patching import Patch, PatchKind


def wrap_mtp_block_spec(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for ``mtp_block_spec``: a model of the K3 layers gets depths of the K3 layers, others Megatron's."""

    @functools.wraps(original)
    def mtp_block_spec(config: Any, transformer_layer_spec: Any, vp_stage: int | None = None) -> Any:
        from k3_plugins.models.kimi_k3 import layer_specs

        if config.transformer_layer_spec is layer_specs.gpt:
            return layer_specs.mtp(config, vp_stage)
        return original(config, transformer_layer_spec, vp_stage=vp_stage)

    return mtp_block_spec


def mtp_patch(feature: str) -> Patch:
    """The patch, for a feature that points ``--spec`` at the K3 layers. Several of them: the body decides once."""
    return Patch(
        id=f"{feature}.mtp",
        target="megatron.training.models.gpt:mtp_block_spec",
        kind=PatchKind.WRAP,
        implementation=wrap_mtp_block_spec,
        feature=feature,
        reason="the builder makes the layer of multi-token prediction from Megatron's own decoder specs, whatever "
        "--spec names, and offers no spec of its own for it",
        remove_when="the builder takes the layer from the model's spec, or a flag names one",
    )
