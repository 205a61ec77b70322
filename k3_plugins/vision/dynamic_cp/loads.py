"""What the ranks were given to encode: for the witness, and for the metrics of Megatron's writers."""

from __future__ import annotations

from dataclasses import dataclass

from k3_plugins.training.metrics import logs, written_anywhere
from k3_plugins.vision.dynamic_cp.balance import Assignment

AFTER = "k3/vit-load-max-over-mean"
BEFORE = "k3/vit-load-max-over-mean-unsplit"


@dataclass
class Loads:
    """Sums over batches, in the units of ``cost``. The ranks of a group work batch by batch together: the sum of the
    largest loads is what the step waits for."""

    batches: int = 0
    clips: int = 0
    split: int = 0
    """Clips that several ranks encoded."""
    largest: float = 0.0
    mean: float = 0.0
    unsplit: float = 0.0
    """The largest loads had no clip been split."""

    def add(self, assignment: Assignment) -> None:
        """Count one batch."""
        self.batches += 1
        self.clips += len(assignment.owners)
        self.split += sum(owner.size > 1 for owner in assignment.owners)
        self.largest += assignment.makespan
        self.mean += assignment.mean
        self.unsplit += assignment.unsplit_makespan


SO_FAR = Loads()
"""Since the start."""
_logged = Loads()


def measure() -> dict[str, float] | None:
    """Largest over mean load since the last call, over all ranks; collective."""
    global _logged
    if not written_anywhere():
        return None
    import torch

    # Ranks that encode the same batches count them alike, which leaves the ratios as they are.
    sums = torch.tensor(
        [SO_FAR.largest - _logged.largest, SO_FAR.unsplit - _logged.unsplit, SO_FAR.mean - _logged.mean],
        dtype=torch.float64,
        device=torch.cuda.current_device(),
    )
    torch.distributed.all_reduce(sums)
    _logged = Loads(**vars(SO_FAR))
    largest, unsplit, mean = sums.tolist()
    return {AFTER: largest / mean, BEFORE: unsplit / mean} if mean else None


wrap_training_log = logs(measure, on_every_rank=True)
