"""Flags of the ``quantile-balancing`` feature. This module imports neither torch nor megatron."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class QuantileBalancingConfig:
    """Load balance through router biases, the quantiles of score margins over the global batch."""

    moe_qb_bins: Literal["centred", "uniform"] = field(default="centred", metadata={"changes_parameters": False})
    """Placement of the 1000 histogram bins: log-spaced around each expert's current bias, or uniform over the range
    that a margin can take (too coarse where sigmoid scores saturate)."""

    moe_qb_ema: float = field(default=0.0, metadata={"changes_parameters": False})
    """Share of the old bias kept in each update, 0 <= x < 1; 0 takes the new quantile as it is."""
