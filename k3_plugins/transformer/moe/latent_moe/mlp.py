"""Megatron's feed-forward network and shared experts with a gated activation of our own.

``MLP`` calls ``submodules.activation_func`` on the undivided output of its first linear layer when
``config.use_te_activation_func`` is set: the seam for an activation that treats gate and up differently.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn

from k3_plugins.transformer.moe.ops.activation import GatedActivation


class ActivationModule(nn.Module):
    """A `GatedActivation` as the module that Megatron's specs ask for."""

    def __init__(self, activation: GatedActivation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """``[..., 2 f]`` to ``[..., f]``."""
        return self.activation(x)


def _prepare(
    config: TransformerConfig, submodules: MLPSubmodules, activation: GatedActivation
) -> tuple[TransformerConfig, MLPSubmodules]:
    """A config copy that makes MLP call the submodule, and submodules that hold the activation."""
    if not config.gated_linear_unit:
        raise ValueError("SiTU is a gated activation; pass --swiglu (it doubles the first layer's width).")
    config = copy.copy(config)
    config.use_te_activation_func = True

    def build(config: TransformerConfig) -> ActivationModule:
        del config
        return ActivationModule(activation)

    return config, dataclasses.replace(submodules, activation_func=build)


class GatedMLP(MLP):
    """``MLP`` with a `GatedActivation`; give it as ``activation=``."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *args: Any,
        activation: GatedActivation,
        **kwargs: Any,
    ) -> None:
        config, submodules = _prepare(config, submodules, activation)
        super().__init__(config, submodules, *args, **kwargs)


class GatedSharedExperts(SharedExpertMLP):
    """``SharedExpertMLP`` (full width) with a `GatedActivation`; give it as ``activation=``."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *args: Any,
        activation: GatedActivation,
        **kwargs: Any,
    ) -> None:
        config, submodules = _prepare(config, submodules, activation)
        super().__init__(config, submodules, *args, **kwargs)
