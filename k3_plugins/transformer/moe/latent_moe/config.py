"""Flags of the ``latent-moe`` feature; the latent width is Megatron's own --moe-latent-size.

This module imports neither torch nor megatron.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LatentMoEConfig:
    """Routed experts in latent space, and the activation of every feed-forward network."""

    k3_activation: Literal["situ", "swiglu"] = "situ"
    """Gated activation of routed experts, shared experts and dense feed-forward layers. situ is bounded:
    b1 tanh(g / b1) sigmoid(g) b2 tanh(u / b2)."""

    k3_situ_beta_gate: float = 4.0
    """b1, the bound of SiTU's gate branch."""

    k3_situ_beta_up: float = 25.0
    """b2, the bound of SiTU's up branch."""

    moe_latent_projection: Literal["duplicated", "sharded"] = "duplicated"
    """Whether each tensor-parallel rank keeps the whole latent projections, or a slice of them that is gathered for
    each use. The results are the same; sharded saves memory and costs an all-gather."""

    moe_latent_norm: bool = True
    """RMSNorm on the combined expert output before the up-projection (K3)."""

    moe_latent_norm_eps: float = 1e-5
    """Epsilon of that RMSNorm."""
