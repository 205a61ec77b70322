"""The router of a mixture-of-experts layer, for ``MoESubmodules.router``."""

from __future__ import annotations

from functools import partial

from k3_plugins.transformer.moe.quantile_balancing.config import QuantileBalancingConfig
from k3_plugins.transformer.moe.quantile_balancing.router import QuantileBalancingRouter


def router_spec(settings: QuantileBalancingConfig) -> partial:
    """A builder in the form that Megatron's ``MoELayer`` calls."""
    return partial(QuantileBalancingRouter, qb_config=settings)
