"""Who computes what: the token plan of perfectly balanced expert parallelism (MoonEP), as pure integer planning.

Letters: ``R`` ranks of the expert-parallel group, ``E`` experts, ``m = E / R`` home experts per rank (rank ``r`` is
home to experts ``r*m .. r*m + m - 1``), ``n[E]`` tokens routed to each expert, ``C`` tokens each rank must compute.

The plan is an integer matrix ``x[E, R]`` with row sums ``n`` and column sums ``C``. An expert with tokens on a rank
that is not its home is *redundant* there, and its weights must be sent; ``D_r`` is the set of redundant experts of
rank ``r``. Minimised, in this order: ``max_r |D_r|``, then ``sum_r |D_r|``.

Why ``|D_r| <= m`` always holds. Call a rank finished once it has exactly its target. Unfinished ranks hold only tokens
of their own home experts, and their loads sum to their targets. While some unfinished rank lacks ``d`` tokens another
one, q, has more than its target, and the at most ``m`` home experts of q hold at least ``d`` tokens: the
fewest pieces that fill the gap are never more than ``m``, the gap is filled once, and one more rank is finished.
So ``m`` slots per rank always suffice and planning cannot fail; a larger number is a bug and raises.

The fixed-charge transportation problem behind it is NP-hard, so a short list of greedy variants is tried in a fixed
order; if none reaches the lower bound on the maximum, drawn ones follow until one does. The best is taken. Variants
fill one gap after the other; they differ in which gap is next and which pieces fill it (`VARIANTS`). `planner_core`
holds the loops, `planner_torch` makes the same decisions with device tensors; the two agree bit for bit.
`planner_reference` holds the exact solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np


class PlanError(RuntimeError):
    """The counts cannot be planned (bad shape or sign), or a plan broke its own guarantee (a bug)."""


class Variant(NamedTuple):
    """One greedy rule: which pieces fill the gap ``d`` of the rank at hand.

    Attributes:
        level: pieces per rank that the rule aims at, as an offset from the lower bound ``L`` on the maximum:
            ``P = L + level``.
        no_dip: first look for at most ``P`` pieces that leave every donor at or above its target.
        forced: use ``P`` pieces even where fewer would do, smallest first (uses up crumbs, saves large experts).
        from_all: take from every unfinished rank, not only from ranks above their target.
        largest: a single piece comes from an exact fit, else from the expert that was largest at the start;
            otherwise from the smallest expert that suffices.
        top: several pieces are all but one of the largest experts and the smallest that completes them; otherwise
            the smallest run of experts neighbouring in size.
        smallest_gap: fill the smallest gap first, not the largest.
        joint: where several ranks need equally many pieces, first share the largest experts out evenly among them.
        whole: use ``P`` pieces even where fewer would do: the largest experts that do not fill the gap alone, all they
            hold, and the smallest expert that completes them.
        drawn: everything is drawn: which gap is next (large ones more often), how many pieces up to ``P`` fill it,
            which of the largest experts that do not fill it alone are used up, and which one completes them. Where
            the draw does not fill the gap, the other rules do.
        salt: not 0: a single piece comes from an expert that is drawn among those that suffice, and joint sharing blurs
            the needs. Draws are integer arithmetic on the salt, the same everywhere.
    """

    level: int
    no_dip: bool = False
    forced: bool = False
    from_all: bool = False
    largest: bool = False
    top: bool = False
    smallest_gap: bool = False
    joint: bool = False
    whole: bool = False
    drawn: bool = False
    salt: int = 0


DRAWN = 384
"""Variants in which everything is drawn: on the instances that the others miss, 1 to 25 in 100 of them succeed."""

VARIANTS: tuple[Variant, ...] = (
    Variant(0, no_dip=True),
    Variant(0, largest=True),
    Variant(1, forced=True),
    Variant(0, from_all=True),
    Variant(1, no_dip=True),
    Variant(0, from_all=True, top=True),
    Variant(0),
    Variant(0, largest=True, joint=True),
    Variant(0, from_all=True, largest=True, top=True, joint=True),
    Variant(1, forced=True, largest=True, top=True, smallest_gap=True, joint=True),
    Variant(0, top=True, smallest_gap=True),
    Variant(1, from_all=True, largest=True, top=True, smallest_gap=True, joint=True, whole=True),
    Variant(0, no_dip=True, forced=True, from_all=True, largest=True, top=True, joint=True),
    Variant(1, from_all=True, top=True, smallest_gap=True, joint=True, whole=True),
    Variant(1, largest=True, top=True, smallest_gap=True, joint=True, whole=True),
    Variant(0, no_dip=True, forced=True, from_all=True, largest=True, top=True),
    Variant(0, from_all=True, smallest_gap=True, joint=True),
    Variant(1, from_all=True, largest=True, smallest_gap=True, joint=True, whole=True),
    # One huge expert makes the bound small, while several empty ranks must share what is left.
    Variant(2, forced=True),
    Variant(3, forced=True),
    # What remains are packings that no rule of thumb finds: several gaps in one expert, or the largest experts in
    # groups of nearly equal sums. A draw finds one in some per cent of the cases.
    Variant(1, forced=True, from_all=True, joint=True),
    *(Variant(0, joint=True, salt=salt) for salt in range(1, 65)),
    *(Variant(0, joint=True, from_all=True, salt=salt) for salt in range(65, 97)),
    # What those miss: the largest experts packed without any slack, and one large expert split between several ranks.
    *(Variant(salt % 2, from_all=salt % 4 > 1, top=True, drawn=True, salt=salt) for salt in range(97, 97 + DRAWN)),
)
# Above this many cells (E * R) only the first variant is tried: the others rarely win there, and time matters.
LARGE_CELLS = 4096


def variants_for(num_experts: int, ranks: int) -> tuple[Variant, ...]:
    """The variants tried at a size, in order; shared by the numpy and the torch planner."""
    return VARIANTS[:1] if num_experts * ranks > LARGE_CELLS else VARIANTS


@dataclass(frozen=True)
class Plan:
    """A plan on the host.

    Attributes:
        counts: int64 ``[R, E]``, tokens of each source rank for each expert (the input).
        assignment: int64 ``[E, R]``, tokens of each expert that each rank computes.
        slots: int64 ``[R, m]``, the redundant experts of each rank in ascending order, -1 where a slot is unused.
    """

    counts: np.ndarray
    assignment: np.ndarray
    slots: np.ndarray

    @cached_property
    def redundant(self) -> tuple[tuple[int, ...], ...]:
        """``D_r`` for each rank: the experts it computes without being their home."""
        return tuple(tuple(int(e) for e in row if e >= 0) for row in self.slots)

    @property
    def max_redundant(self) -> int:
        """``max_r |D_r|``."""
        return int((self.slots >= 0).sum(1).max())

    @property
    def total_redundant(self) -> int:
        """``sum_r |D_r|``."""
        return int((self.slots >= 0).sum())


def targets(total: int, ranks: int) -> list[int]:
    """Tokens each rank computes: equal, and where ``ranks`` does not divide ``total`` the first ranks get one more."""
    base, extra = divmod(total, ranks)
    return [base + (r < extra) for r in range(ranks)]


def check_counts(shape: Sequence[int]) -> tuple[int, int, int]:
    """``(R, E, m)`` of a ``[R, E]`` shape, or a `PlanError` that says what is wrong with it."""
    if len(shape) != 2:
        raise PlanError(f"counts must have shape [ranks, experts], got {tuple(shape)}")
    ranks, num_experts = shape
    if ranks < 1 or num_experts < 1 or num_experts % ranks:
        raise PlanError(f"{num_experts} experts cannot be spread evenly over {ranks} ranks")
    return ranks, num_experts, num_experts // ranks


def plan(counts: np.ndarray) -> Plan:
    """Balance the tokens of one layer over the ranks of its expert-parallel group.

    Args:
        counts: integer ``[R, E]``, tokens on source rank r routed to expert e. Padding tokens are not counted.

    Returns:
        The same `Plan` for the same counts on every machine: integer arithmetic and fixed tie-breaks only.

    Raises:
        PlanError: wrong shape, negative or fractional counts, or (a bug) more than ``m`` redundant experts on a rank.
    """
    counts = np.asarray(counts)
    if not np.issubdtype(counts.dtype, np.integer):
        raise PlanError(f"counts must be integers, got {counts.dtype}")
    ranks, num_experts, m = check_counts(counts.shape)
    from k3_plugins.transformer.moe.moonep import planner_core

    counts = np.ascontiguousarray(counts, dtype=np.int64)
    tokens = counts.sum(dtype=np.float64)
    if tokens * num_experts >= 2**62:
        raise PlanError(f"{tokens:.3g} tokens for {num_experts} experts are more than 64-bit keys can hold")
    loads = np.zeros(num_experts, dtype=np.int64)
    least = planner_core.totals(counts, loads)
    if least < 0:
        raise PlanError(f"counts must not be negative, got {least}")
    spare = loads.reshape(ranks, m).sum(1) - np.array(targets(int(loads.sum()), ranks))
    bound = planner_core.lower_bound(loads, spare)
    best: tuple[tuple[int, int], np.ndarray] | None = None
    variants = variants_for(num_experts, ranks)
    rules = sum(not variant.salt for variant in variants)
    for position, variant in enumerate(variants):
        moves = np.empty((max((ranks - 1) * m, 1), 3), dtype=np.int64)
        score = planner_core.fill(loads, spare.copy(), bound, *variant, moves)
        if best is None or score < best[0]:
            best = (score, moves)
        if best[0][0] <= bound and (variant.salt or position + 1 == rules):
            break
    assert best is not None  # every size has a variant
    (worst, total), moves = best
    if worst > m:
        raise PlanError(f"a rank would need {worst} redundant experts, more than the {m} slots that always suffice")
    x = np.zeros((num_experts, ranks), dtype=np.int64)
    slots = np.full((ranks, m), -1, dtype=np.int64)
    planner_core.assemble(loads, moves[:total], x, slots)
    return Plan(counts, x, slots)
