"""Who orthogonalises which matrix, and which elements travel for it. Pure planning, no torch.

The distributed optimizer cuts a bucket evenly over the data-parallel ranks, without regard to matrices. Every matrix
gets one owner among the ranks that hold a piece of it; the holders send it their pieces (gather) and receive the
update of the same elements (return). A matrix that lies whole on one rank moves nothing. Elements received in all:
``2 sum(n - own piece)``.

Plain data parallelism is the case in which every data rank holds everything: the gather moves nothing (along the data
ranks), and the owner sends the update to all.

A rank is a `Place` (t, d): its tensor-parallel and its data-parallel rank.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from k3_plugins.optimizer.per_head_muon.splits import Matrix


class Place(NamedTuple):
    """A rank of the optimizer's grid."""

    tensor_rank: int
    data_rank: int


class Piece(NamedTuple):
    """A contiguous run of a matrix's elements on one rank."""

    holder: Place
    start: int
    """First element in the matrix's storage."""
    stop: int
    element: int
    """First element in the holder's (whole, local, flat) parameter."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Assignment:
    """A matrix, its owner, and the elements that take part."""

    matrix: Matrix
    owner: Place
    sources: tuple[Piece, ...]
    """They cover the matrix once."""
    targets: tuple[Piece, ...]
    """All elements that must learn the update; equal to ``sources`` unless data ranks hold copies."""

    @property
    def local(self) -> bool:
        """True if nothing travels."""
        return all(piece.holder == self.owner for piece in (*self.sources, *self.targets))


Bounds = Sequence[Mapping[str, Sequence[int]]]
"""For every tensor rank and parameter the D + 1 flat bounds: data rank d holds [bounds[d], bounds[d + 1])."""

OWNER_RULES = ("balanced", "largest-piece")


def assign(
    matrices: Sequence[Sequence[Matrix]], bounds: Bounds | None, data_ranks: int, rule: str = "balanced"
) -> list[Assignment]:
    """Choose an owner for every matrix; the same answer on every rank.

    Args:
        matrices: for every tensor rank the matrices it takes part in (see `splits.matrices`).
        bounds: who holds what; None if every data rank holds everything.
        data_ranks: D.
        rule: ``balanced``: the holder with the least Newton-Schulz work so far; matrices that need not move come
            first, then large ones. ``largest-piece``: the holder of most elements.

    Returns:
        every matrix once. Matrices that tensor ranks hold together come last, so that the work on the others is
        distributed alike on every tensor rank: copies of a parameter then stay equal bit for bit.
    """
    if rule not in OWNER_RULES:
        raise ValueError(f"there is no owner rule {rule!r}; the rules are {', '.join(OWNER_RULES)}")
    distinct = {id(matrix): matrix for per_rank in matrices for matrix in per_rank}
    loads: dict[Place, int] = {}
    pieces = {key: tuple(_pieces(matrix, bounds, data_ranks)) for key, matrix in distinct.items()}

    def order(item: tuple[int, Matrix]) -> tuple:
        key, matrix = item
        fixed = len({piece.holder for piece in pieces[key]}) == 1
        first = matrix.parts[0]
        return matrix.joined, not fixed, -matrix.cost, matrix.parameter, first.intervals, first.tensor_rank

    result = []
    for key, matrix in sorted(distinct.items(), key=order):
        targets = pieces[key]
        held: dict[Place, int] = {}
        for piece in targets:
            held[piece.holder] = held.get(piece.holder, 0) + piece.size
        if rule == "balanced" or bounds is None:
            owner = min(held, key=lambda place: (loads.get(place, 0), -held[place], place))
        else:
            owner = min(held, key=lambda place: (-held[place], place))
        loads[owner] = loads.get(owner, 0) + matrix.cost
        sources = targets
        if bounds is None:
            sources = tuple(piece for piece in targets if piece.holder.data_rank == owner.data_rank)
        result.append(Assignment(matrix, owner, sources, targets))
    return result


def _pieces(matrix: Matrix, bounds: Bounds | None, data_ranks: int) -> Iterator[Piece]:
    for part in matrix.parts:
        position = part.offset
        for start, stop in part.intervals:
            if bounds is None:
                for d in range(data_ranks):
                    yield Piece(Place(part.tensor_rank, d), position, position + stop - start, start)
                position += stop - start
                continue
            cuts = bounds[part.tensor_rank][matrix.parameter]
            d = bisect.bisect_right(cuts, start) - 1
            cursor = start
            while cursor < stop:
                while cuts[d + 1] <= cursor:
                    d += 1
                end = min(stop, cuts[d + 1])
                yield Piece(Place(part.tensor_rank, d), position, position + end - cursor, cursor)
                position += end - cursor
                cursor = end


def even_bounds(start: int, stop: int, low: int, high: int, ranks: int) -> list[int]:
    """Bounds of a parameter at [start, stop) of a bucket at [low, high) that is cut evenly over ``ranks``."""
    shard = (high - low) // ranks
    return [min(max(low + d * shard, start), stop) - start for d in range(ranks)] + [stop - start]


Message = list[tuple[Assignment, Piece]]


@dataclass(frozen=True)
class RankPlan:
    """One rank's share of the work on one chunk."""

    local: list[Assignment]
    """Matrices that it owns and for which nothing travels."""
    owned: list[Assignment]
    """Matrices that it owns and for which something travels."""
    gather_sends: dict[Place, Message]
    """By peer; both sides list the pieces in the same order, one message carries them all."""
    gather_receives: dict[Place, Message]
    return_sends: dict[Place, Message]
    return_receives: dict[Place, Message]
    elements_received: int = field(default=0)

    @property
    def largest_in_flight(self) -> int:
        """Elements of the exchanges of this chunk that are on this rank at one time: messages and owned matrices."""
        gather = sum(map(message_size, (*self.gather_sends.values(), *self.gather_receives.values())))
        back = sum(map(message_size, (*self.return_sends.values(), *self.return_receives.values())))
        return gather + back


def message_size(message: Message) -> int:
    """Elements of a message."""
    return sum(piece.size for _, piece in message)


def view(assignments: Sequence[Assignment], here: Place) -> RankPlan:
    """What one rank has to do for one chunk, in the common order."""
    plan = RankPlan([], [], {}, {}, {}, {})
    received = 0
    for assignment in assignments:
        mine = assignment.owner == here
        if mine:
            (plan.local if assignment.local else plan.owned).append(assignment)
        for pieces, to_owner, from_owner in (
            (assignment.sources, plan.gather_sends, plan.gather_receives),
            (assignment.targets, plan.return_receives, plan.return_sends),
        ):
            for piece in pieces:
                if piece.holder == assignment.owner:
                    continue
                if mine:
                    from_owner.setdefault(piece.holder, []).append((assignment, piece))
                elif piece.holder == here:
                    to_owner.setdefault(assignment.owner, []).append((assignment, piece))
    for messages in (plan.gather_receives, plan.return_receives):
        received += sum(map(message_size, messages.values()))
    return RankPlan(**{**plan.__dict__, "elements_received": received})
