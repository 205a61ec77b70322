"""Blocks kept on a rank between its virtual stages, and the gradients that come back for them.

An entry is put by the chunk that first gets hold of a block (by message or by computing it), read by later chunks of
the same rank, and collected in the backward of the chunk that put it, which runs after the readers' backwards. A
reader gets a fresh leaf: the graphs of two chunks never touch, as Megatron runs their backwards separately.

Letters: s sequence (of this rank under sequence parallelism), b micro-batch, d hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Entry:
    value: Tensor | None
    readers: int
    differentiable: bool
    gradient: Tensor | None = None

    def deposit(self, leaf: Tensor) -> None:
        """Post-accumulate hook of a reader's leaf: take its gradient."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None, "the hook runs once it has been accumulated"
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


class BlockCache:
    """Entries by (micro-batch, block id)."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> list[tuple[int, int]]:
        """(micro-batch, block id) of every entry that is still there."""
        return sorted(self._entries)

    def put(self, microbatch: int, block: int, value: Tensor, readers: int) -> None:
        """Keep `value` [s, b, d] for this many later chunks."""
        key = microbatch, block
        if key in self._entries:
            raise RuntimeError(f"attention residuals: block {block} of micro-batch {microbatch} is cached twice")
        differentiable = torch.is_grad_enabled() and value.requires_grad
        self._entries[key] = _Entry(value.detach(), readers, differentiable)

    def read(self, microbatch: int, block: int) -> Tensor:
        """A leaf that shares the block's memory; its gradient is deposited on the entry.

        Raises:
            RuntimeError: if the block is not there (any more).
        """
        entry = self._entries.get((microbatch, block))
        if entry is None or entry.value is None:
            raise RuntimeError(
                f"attention residuals: block {block} of micro-batch {microbatch} is not on this rank; was the schedule"
                " of this step abandoned half-way?"
            )
        leaf = entry.value.detach()
        if entry.differentiable:
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(entry.deposit)
        entry.readers -= 1
        if entry.readers == 0:
            entry.value = None
            if not entry.differentiable:
                del self._entries[microbatch, block]
        return leaf

    def collect(self, microbatch: int, block: int) -> Tensor | None:
        """End an entry and return the sum of its deposits (None without any, or for a block that was not kept)."""
        entry = self._entries.pop((microbatch, block), None)
        return None if entry is None else entry.gradient
