"""Hands out parts of a stretch of memory, first fit; stdlib only. The borrower of a loan manages it alone."""

from __future__ import annotations

ALIGNMENT = 64


class Region:
    """``[0, nbytes)``.

    Args:
        nbytes: its length.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used = 0
        self.peak = 0
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []  # (start, end), in order
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The start of `nbytes` free bytes, or None if there is no such stretch."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                self._taken[start] = size
                self.used += size
                self.peak = max(self.peak, self.used)
                return start
        return None

    def give_back(self, start: int) -> None:
        """Return what `take` gave."""
        size = self._taken.pop(start)
        self.used -= size
        self._free = _merged(sorted([*self._free, (start, start + size)]))


def _merged(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in stretches:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
