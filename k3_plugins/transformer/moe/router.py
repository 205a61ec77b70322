"""Megatron's router, whose expert-bias rule counts tokens and not padding.

Megatron 0.19.2 combines the routing map ``[T, E]`` with the mask ``[T]`` as they are, which fails unless T = E.

Letters: T tokens, E experts.
"""

from __future__ import annotations

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class PaddedTopKRouter(TopKRouter):
    """``TopKRouter`` that takes a padding mask together with ``--moe-router-enable-expert-bias``."""

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the choices of ``routing_map [T, E]`` but for those of padding (``padding_mask [T]``, True there)."""
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        super()._apply_expert_bias(routing_map)
