"""Which pipeline rank lends how much memory to which, so that all have the same peak; stdlib only.

Early ranks hold more micro-batches than late ones: 2 (P - r - 1) + (V - 1) P + 1 of them in interleaved 1F1B. A rank
above the common level keeps what fits below it and sends the rest to lenders:

    at the end of a layer's forward pass: its activations stay if the rank is then not above its level, else they go to
    the first lender with room; when its backward pass is due they come back

While a rank has pieces back for their backward pass, it holds the layer in use and the next one besides what it kept,
so a borrower's own level is lower by that.

The decision needs no clock, only the order of passes, and the simulation here and the training take the same ones.
The level is the lowest at which the lenders' room suffices, found by bisection.

Letters: P pipeline ranks, r a rank. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3_plugins.memory.remote.schedule import Schedule


@dataclass(frozen=True)
class ChunkCost:
    """What one micro-batch leaves on a rank in the forward pass of one model chunk."""

    pieces: tuple[int, ...]
    """Bytes that may be lent out, layer by layer."""
    fixed: int = 0
    """Bytes that stay."""


@dataclass(frozen=True)
class Loan:
    """Memory that one rank keeps for another during the whole run."""

    borrower: int
    lender: int
    nbytes: int


@dataclass(frozen=True)
class Peaks:
    """Of one rank in a simulated step."""

    own: int
    """Most bytes of its own activations on the rank at a time."""
    lent_out: int
    """Most bytes of its activations elsewhere at a time."""


@dataclass(frozen=True)
class Plan:
    """The result."""

    levels: tuple[int, ...]
    """By rank: it sends away what would lift it above this."""
    unlevelled: tuple[int, ...]
    """Peak of each rank without loans."""
    levelled: tuple[int, ...]
    """Peak of each rank with them: its own activations, what came back, and the most it holds for others."""
    loans: tuple[Loan, ...] = ()
    peaks: tuple[Peaks, ...] = field(default=(), repr=False)

    def of_borrower(self, rank: int) -> tuple[Loan, ...]:
        """The loans that a rank may use, in the order in which it fills them."""
        return tuple(loan for loan in self.loans if loan.borrower == rank)

    def of_lender(self, rank: int) -> tuple[Loan, ...]:
        """What a rank keeps free for others."""
        return tuple(loan for loan in self.loans if loan.lender == rank)


def simulate(
    schedule: Schedule,
    rank: int,
    costs: Sequence[ChunkCost],
    level: int | None = None,
    room: Sequence[int] | None = None,
) -> tuple[Peaks, list[int]]:
    """Run one rank's passes.

    Args:
        costs: by model chunk.
        level: bytes above which pieces are sent away; None keeps everything.
        room: bytes that each lender offers; None for one lender without limit.

    Returns:
        The peaks, and the most bytes that were at each lender.

    Raises:
        ValueError: if a piece finds no room.
    """
    own = own_peak = 0
    away = [0] * (1 if room is None else len(room))
    away_peaks, out_peak = list(away), 0
    places: dict[tuple[int, int], list[tuple[int | None, int]]] = {}
    for step in schedule.passes(rank):
        cost, key = costs[step.chunk], (step.micro_batch, step.chunk)
        if step.kind == "backward":
            own -= cost.fixed
            for lender, size in places.pop(key):
                if lender is None:
                    own -= size
                else:
                    away[lender] -= size
            continue
        own += cost.fixed
        kept: list[tuple[int | None, int]] = []
        for size in cost.pieces:
            lender = None
            if level is not None and own + size > level:
                lender = _first_with_room(away, room, size)
            if lender is None:
                own += size
            else:
                away[lender] += size
                away_peaks[lender] = max(away_peaks[lender], away[lender])
            kept.append((lender, size))
        places[key] = kept
        own_peak, out_peak = max(own_peak, own), max(out_peak, sum(away))
    return Peaks(own_peak, out_peak), away_peaks


def _first_with_room(away: Sequence[int], room: Sequence[int] | None, size: int) -> int:
    if room is None:
        return 0
    for lender, limit in enumerate(room):
        if away[lender] + size <= limit:
            return lender
    raise ValueError(f"a piece of {size} bytes finds no room at {len(room)} lenders")


def make_plan(
    schedule: Schedule, costs: Sequence[Sequence[ChunkCost]], *, fetched: int = 2, tolerance: float = 0.005
) -> Plan:
    """The lowest level that the lenders' room allows.

    Args:
        costs: by rank and model chunk.
        fetched: pieces that a borrower has back at a time.
        tolerance: of the level, relative.

    Raises:
        ValueError: if there are not as many costs as ranks and chunks.
    """
    if len(costs) != schedule.ranks or any(len(chunks) != schedule.chunks for chunks in costs):
        raise ValueError(f"{schedule.ranks} ranks with {schedule.chunks} chunks each need as many costs")
    unlevelled = tuple(simulate(schedule, rank, costs[rank])[0].own for rank in range(schedule.ranks))
    high, low = max(unlevelled), sum(unlevelled) // schedule.ranks
    best = _with_level(schedule, costs, unlevelled, high, fetched)
    assert best is not None, "at the highest peak nobody needs a loan"
    while high - low > max(1, tolerance * high):
        middle = (low + high) // 2
        plan = _with_level(schedule, costs, unlevelled, middle, fetched)
        if plan is None:
            low = middle
        else:
            best, high = plan, middle
    return best


def _with_level(
    schedule: Schedule,
    costs: Sequence[Sequence[ChunkCost]],
    unlevelled: Sequence[int],
    level: int,
    fetched: int,
) -> Plan | None:
    """The plan for one level, or None if the room does not suffice."""
    free = {rank: level - peak for rank, peak in enumerate(unlevelled) if peak < level}
    loans: list[Loan] = []
    peaks = [Peaks(peak, 0) for peak in unlevelled]
    own_levels = [level] * schedule.ranks
    needs = []
    for rank, peak in enumerate(unlevelled):
        if peak > level:
            own_levels[rank] = level - fetched * _largest(costs[rank])
            peaks[rank] = simulate(schedule, rank, costs[rank], own_levels[rank])[0]
            if peaks[rank].own > own_levels[rank]:  # what must stay is above the level already
                return None
            needs.append((peaks[rank].lent_out, rank))
    for need, rank in sorted(needs, reverse=True):
        largest = _largest(costs[rank])
        own_loans: list[Loan] = []
        for lender in sorted(free, key=lambda other: -free[other]):
            missing = need - sum(loan.nbytes for loan in own_loans)
            # whole pieces only, and one more where a loan ends in the middle of one
            size = min(free[lender] // largest, -(-missing // largest)) * largest
            if missing > 0 and size > 0:
                own_loans.append(Loan(rank, lender, size))
        try:
            _, used = simulate(schedule, rank, costs[rank], own_levels[rank], [loan.nbytes for loan in own_loans])
        except ValueError:
            return None
        own_loans = [Loan(rank, loan.lender, most) for loan, most in zip(own_loans, used, strict=True) if most]
        for loan in own_loans:
            free[loan.lender] -= loan.nbytes
        loans += own_loans
    held = [sum(loan.nbytes for loan in loans if loan.lender == rank) for rank in range(schedule.ranks)]
    levelled = tuple(peak.own + other + level - own for peak, other, own in zip(peaks, held, own_levels, strict=True))
    return Plan(tuple(own_levels), tuple(unlevelled), levelled, tuple(loans), tuple(peaks))


def _largest(costs: Sequence[ChunkCost]) -> int:
    return max((size for cost in costs for size in cost.pieces), default=1)
