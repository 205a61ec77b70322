"""Flags of the ``per-head-muon`` feature, beside Megatron's own ``--muon-*``. Imports neither torch nor megatron."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PerHeadMuonConfig:
    """Muon for matrices, head by head, and AdamW for everything else, in one optimizer."""

    muon_per_head: bool = True
    """Orthogonalise every head of the attention projections by itself. Without it a projection's queries (keys, values,
    gates) are one matrix; fused projections are still split into these parts."""

    muon_heavy_ball: bool = False
    """Orthogonalise the momentum itself instead of the Nesterov combination of gradient and momentum."""

    muon_adamw_lr: float | None = None
    """Peak learning rate of the parameters that AdamW updates (embeddings, output layer, vectors); --lr by default."""

    muon_adamw_min_lr: float | None = None
    """Final learning rate of the parameters that AdamW updates; by default --min-lr times --muon-adamw-lr / --lr."""

    muon_owner: Literal["balanced", "largest-piece"] = "balanced"
    """Which of the ranks that hold a piece of a matrix orthogonalises it: the one with the least work so far (unless
    the busiest rank has no less work by that), or the one with the largest piece, which moves the fewest elements."""

    muon_batch_elements: int = 2**26
    """Matrices of equal shape are orthogonalised together, up to this many elements at a time (at least one matrix).
    Bounds the extra memory of a step; the batch size changes results by rounding only."""

    muon_adamw_checkpoint: Literal["refuse", "convert"] = "refuse"
    """What to do with a checkpoint of Megatron's AdamW: refuse its optimizer state, or take its first moments as the
    momentum of the matrices (both are running means of the gradient) and drop their second moments."""
