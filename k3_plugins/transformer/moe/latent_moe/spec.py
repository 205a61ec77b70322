"""Specs of LatentMoE: what to put into a transformer layer's ``mlp`` slot.

    moe_module_spec(config, LatentMoEConfig())      a mixture-of-experts layer
    dense_mlp_spec(config, LatentMoEConfig())       a dense feed-forward network with the same activation
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter

from k3_plugins.transformer.linear_backend import linear_backend
from k3_plugins.transformer.moe.experts import GroupedExperts
from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig
from k3_plugins.transformer.moe.latent_moe.layer import LatentMoELayer
from k3_plugins.transformer.moe.latent_moe.mlp import ActivationModule, GatedMLP, GatedSharedExperts
from k3_plugins.transformer.moe.ops.activation import SWIGLU, GatedActivation


def activation_of(settings: LatentMoEConfig) -> GatedActivation:
    """The activation that ``--k3-activation`` names."""
    if settings.k3_activation == "swiglu":
        return SWIGLU
    return GatedActivation(settings.k3_situ_beta_gate, settings.k3_situ_beta_up)


def moe_module_spec(
    config: TransformerConfig,
    settings: LatentMoEConfig,
    *,
    router: Callable[..., Any] = TopKRouter,
    layer: type[LatentMoELayer] = LatentMoELayer,
    **layer_options: Any,
) -> partial:
    """A builder for ``TransformerLayerSubmodules.mlp``.

    Args:
        config: sizes; ``moe_latent_size`` None gives experts of the hidden width, without projections.
        settings: the feature's flags.
        router: another feature's router.
        layer: a subclass that changes how tokens are dispatched.
        **layer_options: passed to ``layer``.
    """
    activation = activation_of(settings)
    return partial(
        layer,
        submodules=MoESubmodules(
            experts=_experts(config, activation),
            shared_experts=partial(GatedSharedExperts, submodules=_linears(config), activation=activation),
            router=router,
        ),
        latent_config=settings,
        **layer_options,
    )


def dense_mlp_spec(config: TransformerConfig, settings: LatentMoEConfig) -> partial:
    """A dense feed-forward network with the feature's activation, for ``TransformerLayerSubmodules.mlp``."""
    return partial(_dense_mlp, submodules=_linears(config), activation=activation_of(settings))


def _dense_mlp(
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection,
    is_mtp_layer: bool = False,
    name: str | None = None,
    *,
    submodules: MLPSubmodules,
    activation: GatedActivation,
) -> GatedMLP:
    del is_mtp_layer
    return GatedMLP(
        config,
        submodules,
        ffn_hidden_size=config.ffn_hidden_size,
        tp_group=pg_collection.tp,
        name=name,
        activation=activation,
    )


def _experts(config: TransformerConfig, activation: GatedActivation) -> Callable[..., Any]:
    """Transformer Engine's grouped experts where that is the implementation, else stacked weights."""
    if config.transformer_impl != "transformer_engine":
        return partial(GroupedExperts, activation=activation, width=config.moe_latent_size)
    grouped = linear_backend(config).grouped_mlp_modules(True)

    def build(count: int, config: TransformerConfig, **options: Any) -> Any:
        # The same seam as in `mlp`: the submodule's activation sees gate and up together.
        config = copy.copy(config)
        config.use_te_activation_func = True
        submodules = dataclasses.replace(
            grouped.keywords["submodules"], activation_func=lambda config: ActivationModule(activation)
        )
        return grouped.func(count, config, submodules=submodules, **options)

    return build


def _linears(config: TransformerConfig) -> MLPSubmodules:
    backend = linear_backend(config)
    return MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
