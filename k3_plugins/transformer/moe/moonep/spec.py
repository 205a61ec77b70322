"""Specs of MoonEP.

    moe_module_spec(config, MoonEPConfig())         a plain mixture-of-experts layer with SwiGLU experts
    layer_options(LatentMoELayer, MoonEPConfig())   what another feature's spec needs to become balanced
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from k3_plugins.transformer.moe.experts import GroupedExperts
from k3_plugins.transformer.moe.moonep.config import MoonEPConfig
from k3_plugins.transformer.moe.moonep.layer import balanced
from k3_plugins.transformer.moe.ops.activation import SWIGLU


def layer_options(layer: type[MoELayer], settings: MoonEPConfig) -> dict[str, Any]:
    """Keyword arguments ``layer`` and ``moonep_config`` for a spec function that builds ``layer``."""
    made = balanced(layer)  # type: ignore[arg-type]  # mypy takes a class that it cannot see for unhashable
    return {"layer": made, "moonep_config": settings}


def moe_module_spec(
    config: TransformerConfig, settings: MoonEPConfig, *, router: Callable[..., Any] = TopKRouter
) -> partial:
    """A builder for ``TransformerLayerSubmodules.mlp``: SwiGLU experts at full width, Megatron's shared experts.

    Args:
        config: not read; specs of all features have this form.
        settings: the feature's flags.
        router: another feature's router.
    """
    del config
    backend = LocalSpecProvider()
    linears = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
    return partial(
        balanced(MoELayer),
        submodules=MoESubmodules(
            experts=partial(GroupedExperts, activation=SWIGLU),
            shared_experts=partial(SharedExpertMLP, submodules=linears),
            router=router,
        ),
        moonep_config=settings,
    )
