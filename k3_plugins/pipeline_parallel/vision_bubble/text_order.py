"""The order in which Megatron's schedules run text work on each rank.

``forward_backward_pipelining_with_interleaving`` visits (micro-batch, chunk) pairs in groups of p micro-batches: a
group passes chunk 0, then chunk 1, and so on; backwards visit chunks from the last one. A rank first runs its warm-up
forwards, then alternates forward and backward, then runs the remaining backwards. ``..._without_interleaving`` is the
same with one chunk and a shorter warm-up. A test compares both with Megatron's own functions.
"""

from __future__ import annotations

from typing import NamedTuple


class TextOp(NamedTuple):
    """A forward or a backward of one micro-batch through one chunk of a rank."""

    is_forward: bool
    chunk: int
    microbatch: int
    index: int  # type: ignore[assignment]  # instead of tuple.index, which nobody calls
    """The how manieth forward, or backward, of the rank this is (Megatron's virtual micro-batch id)."""


def visits(p: int, v: int, m: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of each virtual micro-batch id, for forwards; backwards mirror the chunk."""
    group = p if v > 1 else m
    return [
        (microbatch, chunk)
        for start in range(0, m, group)
        for chunk in range(v)
        for microbatch in range(start, min(start + group, m))
    ]


def warm_up(p: int, v: int, m: int, rank: int) -> int:
    """Number of forwards before the first backward's partner forward."""
    forwards = (p - rank - 1) * 2 + (v - 1) * p if v > 1 else p - rank - 1
    return min(forwards, m * v)


def text_order(p: int, v: int, m: int, rank: int) -> list[TextOp]:
    """All text work of one rank in Megatron's order."""
    table = visits(p, v, m)
    first = warm_up(p, v, m, rank)
    forwards = [TextOp(True, chunk, microbatch, k) for k, (microbatch, chunk) in enumerate(table)]
    backwards = [TextOp(False, v - 1 - chunk, microbatch, k) for k, (microbatch, chunk) in enumerate(table)]
    order = forwards[:first]
    for k in range(first, len(table)):
        order += [forwards[k], backwards[k - first]]
    return order + backwards[len(table) - first :]
