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
order and the first that reaches the lower bound on the maximum ends the search; otherwise the best is taken. All
variants fill the largest gap first; they differ in which pieces fill it (`VARIANTS`). `planner_torch` makes the same
decisions with device tensors; the two agree bit for bit. `planner_reference` holds the exact solver.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
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
    """

    level: int
    no_dip: bool = False
    forced: bool = False
    from_all: bool = False
    largest: bool = False
    top: bool = False


VARIANTS: tuple[Variant, ...] = (
    Variant(0, no_dip=True),
    Variant(0, largest=True),
    Variant(1, forced=True),
    Variant(0, from_all=True),
    Variant(1, no_dip=True),
    Variant(0, from_all=True, top=True),
    Variant(0),
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
    if counts.min() < 0:
        raise PlanError(f"counts must not be negative, got {int(counts.min())}")
    counts = counts.astype(np.int64, copy=False)
    loads = counts.sum(0)
    target = targets(int(loads.sum()), ranks)
    bound = _lower_bound(loads, target, ranks)
    best = None
    for variant in variants_for(num_experts, ranks):
        moved = _Filler(loads, target, ranks, bound, variant).run()
        per_rank = Counter(rank for rank, _ in moved)
        score = (max(per_rank.values(), default=0), len(moved))
        if best is None or score < best[0]:
            best = (score, moved)
        if best[0][0] <= bound:
            break
    (worst, _), moved = best
    if worst > m:
        raise PlanError(f"a rank would need {worst} redundant experts, more than the {m} slots that always suffice")
    return _assemble(counts, loads, moved)


def _lower_bound(loads: np.ndarray, target: list[int], ranks: int) -> int:
    """No plan has a smaller maximum: the largest gap needs this many pieces even of the largest experts."""
    gap = int((np.asarray(target) - loads.reshape(ranks, -1).sum(1)).max())
    return 0 if gap <= 0 else int(np.searchsorted(np.cumsum(np.sort(loads)[::-1]), gap)) + 1


def _assemble(counts: np.ndarray, loads: np.ndarray, moved: dict[tuple[int, int], int]) -> Plan:
    """The plan in which ``moved[rank, expert]`` tokens leave the expert's home and the others stay."""
    ranks, num_experts = counts.shape
    m = num_experts // ranks
    x = np.zeros((num_experts, ranks), dtype=np.int64)
    slots = np.full((ranks, m), -1, dtype=np.int64)
    home_load = loads.copy()
    if moved:
        pairs = sorted(moved)
        rank, expert = np.array(pairs).T
        amount = np.array([moved[pair] for pair in pairs])
        x[expert, rank] = amount
        np.subtract.at(home_load, expert, amount)
        slots[rank, np.arange(len(pairs)) - np.searchsorted(rank, rank)] = expert
    experts = np.arange(num_experts)
    x[experts, experts // m] = home_load
    return Plan(counts, x, slots)


class _Filler:
    """One run of one variant. Experts are carried as keys ``size * E + expert``, so that ordering by size has one
    tie-break everywhere."""

    def __init__(self, loads: np.ndarray, target: list[int], ranks: int, bound: int, variant: Variant) -> None:
        self.variant = variant
        self.E = E = len(loads)
        self.m = m = E // ranks
        self.P = min(bound + variant.level, m)
        self.keys = loads * E + np.arange(E)
        self.start = self.keys.copy() if variant.largest else None
        self.experts = np.sort(self.keys.reshape(ranks, m), axis=1).tolist()  # ascending, per home rank
        spare = loads.reshape(ranks, m).sum(1).tolist()
        self.spare = [have - want for have, want in zip(spare, target, strict=True)]
        self.gaps = sorted((-s, r) for r, s in enumerate(self.spare) if s < 0)
        self.donors = sorted((s, r) for r, s in enumerate(self.spare) if s > 0)
        self.open = np.ones(ranks, dtype=bool)  # unfinished ranks
        self.caps: list[int] = []  # keys of what each donor can give without a dip
        self.rank_caps: list[list[int]] = [[] for _ in range(ranks)]
        if variant.no_dip:
            for r in range(ranks):
                self._recap(r)
        self.moved: dict[tuple[int, int], int] = {}

    def run(self) -> dict[tuple[int, int], int]:
        """Tokens that leave home, by ``(rank, expert)``."""
        while self.gaps:
            gap, rank = self.gaps.pop()
            self.open[rank] = False
            for amount, key in self._choose(gap, rank):
                self._move(key % self.E, rank, amount)
            self.spare[rank] = 0
        return self.moved

    def _choose(self, gap: int, rank: int) -> list[tuple[int, int]]:
        """Pieces ``(tokens, key)`` that fill ``gap`` exactly."""
        E, v = self.E, self.variant
        if v.no_dip:
            window = self._no_dip_window(gap)
            if window:
                return _split(window[::-1], gap, E)
            key = self._smallest_dip(gap)
            if key >= 0:
                return [(gap, key)]
        donors = self.open if v.from_all else np.array([s > 0 for s in self.spare])
        pool = np.sort(self.keys.reshape(-1, self.m)[donors].ravel())
        pool = pool[int(np.searchsorted(pool, E)) :]  # without experts that have no token left
        sizes = pool // E
        largest_first = np.cumsum(sizes[::-1])
        fewest = int(np.searchsorted(largest_first, gap)) + 1
        if v.forced and 1 < self.P <= len(pool) and largest_first[self.P - 1] >= gap:
            return _split(_smallest_window(pool, sizes, self.P, gap), gap, E)
        if fewest == 1:
            return [(gap, self._single(gap, pool))]
        if v.no_dip:
            spread = self._spread(gap, fewest)
            if spread:
                return _split(spread, gap, E)
        if v.top:
            need = gap - int(largest_first[fewest - 2])
            rest = pool[: len(pool) - fewest + 1]
            last = rest[int(np.searchsorted(rest, need * E))]
            return _split([*pool[: len(pool) - fewest : -1].tolist(), int(last)], gap, E)
        return _split(_smallest_window(pool, sizes, fewest, gap)[::-1], gap, E)

    def _no_dip_window(self, gap: int) -> list[int]:
        """The smallest at most ``P`` consecutive caps that hold ``gap``; empty if there are none."""
        E, caps = self.E, self.caps
        i = bisect_left(caps, gap * E)
        if i < len(caps):
            return [caps[i]]
        sizes = [k // E for k in caps]
        for p in range(2, min(self.P, len(caps)) + 1):
            i = len(caps) - p
            held = sum(sizes[i:])
            if held < gap:
                continue
            while i > 0 and held - sizes[i + p - 1] + sizes[i - 1] >= gap:
                i -= 1
                held += sizes[i] - sizes[i + p]
            return caps[i : i + p]
        return []

    def _smallest_dip(self, gap: int) -> int:
        """The smallest expert that fills ``gap`` alone, of the donor with most to spare; -1 if there is none."""
        need = gap * self.E
        for _, q in reversed(self.donors):
            own = self.experts[q]
            if own[-1] >= need:
                return own[bisect_left(own, need)]
        return -1

    def _spread(self, gap: int, p: int) -> list[int]:
        """``p`` experts that each hold at least ``gap / p``, from as many donors as possible, largest first."""
        least = -(-gap // p) * self.E
        found = []
        for spare, q in self.donors:
            for place, key in enumerate(reversed(self.experts[q])):
                if key < least:
                    break
                found.append((place, -spare, -q, key))
        if len(found) < p:
            return []
        return sorted((key for *_, key in sorted(found)[:p]), reverse=True)

    def _single(self, gap: int, pool: np.ndarray) -> int:
        """One expert that fills ``gap`` although its donor may dip."""
        fits = pool[int(np.searchsorted(pool, gap * self.E)) :]
        if self.variant.largest and fits[0] // self.E != gap:
            return int(fits[np.argmax(self.start[fits % self.E])])
        return int(fits[0])

    def _move(self, expert: int, rank: int, amount: int) -> None:
        q = expert // self.m
        self.moved[rank, expert] = amount
        key = int(self.keys[expert])
        self.keys[expert] = key - amount * self.E
        before = self.spare[q]
        self.spare[q] = after = before - amount
        if before < 0:
            self.gaps.remove((-before, q))
        if after < 0:
            insort(self.gaps, (-after, q))
        if self.variant.no_dip:
            own = self.experts[q]
            del own[bisect_left(own, key)]
            insort(own, key - amount * self.E)
            if before > 0:
                del self.donors[bisect_left(self.donors, (before, q))]
            if after > 0:
                insort(self.donors, (after, q))
            self._recap(q)

    def _recap(self, q: int) -> None:
        """Split what rank ``q`` can spare over its experts, largest first."""
        E, caps = self.E, self.caps
        for cap in self.rank_caps[q]:
            del caps[bisect_left(caps, cap)]
        fresh, spare = [], self.spare[q]
        for key in reversed(self.experts[q]):
            if spare <= 0 or key < E:
                break
            size, e = divmod(key, E)
            cap = min(size, spare) * E + e
            fresh.append(cap)
            insort(caps, cap)
            spare -= size
        self.rank_caps[q] = fresh


def _smallest_window(pool: np.ndarray, sizes: np.ndarray, p: int, gap: int) -> list[int]:
    """The first ``p`` consecutive keys of the ascending ``pool`` that hold ``gap`` together."""
    total = np.concatenate(([0], np.cumsum(sizes)))
    start = int(np.searchsorted(total[p:] - total[:-p], gap))
    return pool[start : start + p].tolist()


def _split(keys: list[int], gap: int, num_experts: int) -> list[tuple[int, int]]:
    """Use the keys in order, the last one only as far as needed."""
    pieces = []
    for key in keys:
        amount = min(key // num_experts, gap)
        if amount <= 0:
            break
        pieces.append((amount, key))
        gap -= amount
    return pieces
