"""The optimizers of this process, for the witness and the metrics. Imports neither torch nor megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3_plugins.optimizer.per_head_muon.optimizer import PerHeadMuon

OPTIMIZERS: list[PerHeadMuon] = []
"""In the order of Megatron's chain: dense parameters, routed experts."""
