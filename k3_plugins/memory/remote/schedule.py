"""The order of Megatron's forward and backward passes on a pipeline rank; stdlib only.

1F1B with or without virtual stages: some forward passes to warm up, then one forward and one backward in turn, then the
remaining backward passes. With V chunks a rank takes the micro-batches in groups of g: g of them through its first
chunk, the same g through its second, and so on; backward passes take the chunks in reverse.

Letters: P pipeline ranks, V model chunks of a rank, M micro-batches, g micro-batches of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Pass:
    """One forward or backward pass of a micro-batch through a model chunk."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class Schedule:
    """What a pipeline runs in one step.

    Raises:
        ValueError: for sizes below 1.
    """

    ranks: int
    micro_batches: int
    chunks: int = 1
    group: int | None = None
    """g; P if not given. It matters with more than one chunk only."""

    def __post_init__(self) -> None:
        for name in ("ranks", "micro_batches", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"a pipeline needs {name} >= 1, not {getattr(self, name)}")
        if self.group is not None and self.group < 1:
            raise ValueError(f"a group needs at least one micro-batch, not {self.group}")

    def warm_up(self, rank: int) -> int:
        """Forward passes of `rank` before its first backward pass, but for the one right before it."""
        if self.chunks == 1:
            count = self.ranks - rank - 1
        else:
            count = 2 * (self.ranks - rank - 1) + (self.chunks - 1) * (self.group or self.ranks)
        return min(count, self.micro_batches * self.chunks)

    def in_flight(self, rank: int) -> int:
        """Most micro-batch-chunks of `rank` that wait for their backward pass at a time."""
        return min(self.warm_up(rank) + 1, self.micro_batches * self.chunks)

    def passes(self, rank: int) -> list[Pass]:
        """Everything `rank` runs in a step, in order."""
        table = self._table()
        forward = [Pass("forward", micro_batch, chunk) for micro_batch, chunk in table]
        backward = [Pass("backward", micro_batch, self.chunks - 1 - chunk) for micro_batch, chunk in table]
        warm_up = self.warm_up(rank)
        steady = len(table) - warm_up
        order = forward[:warm_up]
        for number in range(steady):
            order += [forward[warm_up + number], backward[number]]
        return order + backward[steady:]

    def _table(self) -> list[tuple[int, int]]:
        size = self.micro_batches if self.chunks == 1 else self.group or self.ranks
        table = []
        for first in range(0, self.micro_batches, size):
            members = range(first, min(first + size, self.micro_batches))
            table += [(micro_batch, chunk) for chunk in range(self.chunks) for micro_batch in members]
        return table
