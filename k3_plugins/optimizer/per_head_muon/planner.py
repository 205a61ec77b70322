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
        rule: ``largest-piece``: the holder of most elements. ``balanced``: the holder with the least Newton-Schulz
            work so far; where the busiest rank gets no more work by it, the holder of most elements instead.

    Returns:
        every matrix once: first those that need not move, large ones before small ones. Matrices that tensor ranks
        hold together come last, so that the work on the others is distributed alike on every tensor rank: copies of a
        parameter then stay equal bit for bit.
    """
    if rule not in OWNER_RULES:
        raise ValueError(f"there is no owner rule {rule!r}; the rules are {', '.join(OWNER_RULES)}")
    distinct = {id(matrix): matrix for per_rank in matrices for matrix in per_rank}
    held = [_Held(matrix, tuple(_pieces(matrix, bounds, data_ranks))) for matrix in distinct.values()]
    held.sort(key=_Held.order)
    nearest = [item.largest_holder() for item in held]
    owners = nearest if rule == "largest-piece" and bounds is not None else _by_work(held)
    if rule == "balanced" and bounds is not None:
        # A rank's work is mostly that of matrices which lie whole on it, so that often many choices are equally good.
        near = _by_work(held, limit=_busiest(held, owners))
        owners = min(owners, near, nearest, key=lambda choice: (_busiest(held, choice), _travelling(held, choice)))
    result = []
    for item, owner in zip(held, owners, strict=True):
        sources = item.pieces
        if bounds is None:
            sources = tuple(piece for piece in sources if piece.holder.data_rank == owner.data_rank)
        result.append(Assignment(item.matrix, owner, sources, item.pieces))
    return result


class _Held:
    """A matrix and who holds it."""

    def __init__(self, matrix: Matrix, pieces: tuple[Piece, ...]) -> None:
        self.matrix = matrix
        self.pieces = pieces
        self.elements: dict[Place, int] = {}
        """By holder."""
        for piece in pieces:
            self.elements[piece.holder] = self.elements.get(piece.holder, 0) + piece.size

    def order(self) -> tuple:
        matrix, first = self.matrix, self.matrix.parts[0]
        cut = len(self.elements) > 1
        return matrix.joined, cut, -matrix.cost, matrix.parameter, first.intervals, first.tensor_rank

    def largest_holder(self) -> Place:
        return min(self.elements, key=lambda place: (-self.elements[place], place))


def _by_work(held: Sequence[_Held], limit: int | None = None) -> list[Place]:
    """The holder with the least work so far; with a limit, the largest holder whose work stays within it."""
    loads: dict[Place, int] = {}
    owners = []
    for item in held:
        within = [p for p in item.elements if limit is not None and loads.get(p, 0) + item.matrix.cost <= limit]
        if within:
            owner = min(within, key=lambda place: (-item.elements[place], place))
        else:
            owner = min(item.elements, key=lambda place: (loads.get(place, 0), -item.elements[place], place))
        loads[owner] = loads.get(owner, 0) + item.matrix.cost
        owners.append(owner)
    return owners


def _busiest(held: Sequence[_Held], owners: Sequence[Place]) -> int:
    loads: dict[Place, int] = {}
    for item, owner in zip(held, owners, strict=True):
        loads[owner] = loads.get(owner, 0) + item.matrix.cost
    return max(loads.values(), default=0)


def _travelling(held: Sequence[_Held], owners: Sequence[Place]) -> int:
    return sum(item.matrix.size - item.elements[owner] for item, owner in zip(held, owners, strict=True))


def least_busiest(assignments: Sequence[Assignment]) -> int:
    """Newton-Schulz work that the busiest rank has at least, whoever of the holders owns the matrices that are cut."""
    fixed: dict[Place, int] = {}
    for assignment in assignments:
        holders = {piece.holder for piece in assignment.targets}
        if len(holders) == 1:
            (holder,) = holders
            fixed[holder] = fixed.get(holder, 0) + assignment.matrix.cost
    return max([*fixed.values(), *(assignment.matrix.cost for assignment in assignments)], default=0)


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
