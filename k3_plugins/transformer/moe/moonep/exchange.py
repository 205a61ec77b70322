"""The way of one micro-batch's rows and weights through an expert-parallel group: the contract, and one implementation.

    trip = exchange.depart(experts)              counts are under way
    trip.fetch(w1, w2)                           redundant experts' weights are under way
    ticket = trip.send(z, probs)                 rows are under way
    x, p = trip.arrive(ticket)                   the rows that this rank computes, sorted by expert (`trip.ends`)
    all1, all2 = trip.fetched()                  home experts and slots
    output, _ = trip.home(y)                     rows go back and are added up by token
    ctx.save_for_backward(*trip.state)
    trip = exchange.resume(state, shape)         in the backward pass: the saved plan, never a new one
    trip.send(grad); trip.fetch(w1, w2); ...     gradients of the output take the same way as the input did
    dz, dprobs = trip.home(dx, dp)
    dw1, dw2 = trip.give_back(g1, g2)            slots' gradients are added to their experts' homes

What is under way may be computed over. `CollectiveExchange` is built from torch.distributed collectives (`transport`);
`package.PackageExchange` hands the whole way to the public ``moonep`` package.

Letters: T tokens on this rank, k choices, l width, E experts, R ranks, m home experts and slots per rank, C rows that a
rank computes at most, f expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from k3_plugins.transformer.moe.moonep import planner_torch, routing
from k3_plugins.transformer.moe.moonep.transport import AllToAll, Pending, Route


@dataclass
class Report:
    """What a forward pass did, as device tensors: to be read outside the layer.

    Attributes:
        rows: scalar, rows that this rank computed.
        share: scalar, this rank's fair share of all ranks' rows: what ``rows`` must be.
        slots: scalar, redundant experts on this rank.
        slots_anywhere: scalar, redundant experts on all ranks.
        sent: choices on this rank, T k (a Python number: it is static).
        buffer_rows: rows of the receive buffer (static as well).
    """

    rows: Tensor
    share: Tensor
    slots: Tensor
    slots_anywhere: Tensor
    sent: int
    buffer_rows: int


class Trip(Protocol):
    """See the module docstring."""

    ends: Tensor
    """int32 ``[2 m]``, cumulative ends of this rank's segments: home experts, then slots. Known after `send`."""

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What the backward pass needs, for ``save_for_backward``. Known after `send`."""

    @property
    def plan(self) -> Any:
        """What `Exchange.resume` needs besides tensors and the shape. Known after `send`."""

    def fetch(self, w1: Tensor, w2: Tensor) -> None:
        """Start to fetch redundant experts: ``[m, 2 f, l]`` and ``[m, l, f]`` are this rank's home experts."""

    def send(self, z: Tensor, probs: Tensor | None = None) -> Any:
        """Start to send ``[T, l]``, a row for each choice, and routing weights ``[T, k]``."""

    def arrive(self, ticket: Any) -> tuple[Tensor, Tensor | None]:
        """``[C, l]`` and ``[C]``."""

    def fetched(self) -> tuple[Tensor, Tensor]:
        """Home experts and slots, ``[2 m, 2 f, l]`` and ``[2 m, l, f]``; an unused slot holds anything finite."""

    def home(self, y: Tensor, p: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """``[C, l]`` to ``[T, l]``, summed over a token's choices in at least fp32; ``[C]`` to ``[T, k]``."""

    def give_back(self, g1: Tensor, g2: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients ``[2 m, 2 f, l]`` and ``[2 m, l, f]`` to those of the home experts, every rank's share added."""

    def report(self, buffer_rows: int) -> Report:
        """What this rank did."""


class Exchange(Protocol):
    """Makes trips over one expert-parallel group."""

    def depart(self, experts: Tensor, num_experts: int) -> Trip:
        """Begin: ``experts`` int64 ``[T, k]``, distinct within a token, -1 for nowhere."""

    def resume(self, state: tuple[Tensor, ...], shape: torch.Size, plan: Any) -> Trip:
        """The trip of a forward pass, from `Trip.state`, ``[T, k]`` and `Trip.plan`."""


class CollectiveExchange:
    """The exchange by torch.distributed collectives: gloo, NCCL.

    Args:
        transport: over the expert-parallel group.
    """

    def __init__(self, transport: AllToAll) -> None:
        self.transport = transport

    def depart(self, experts: Tensor, num_experts: int) -> CollectiveTrip:
        """See `Exchange`.

        All ranks must hold the same number of tokens (a device assertion says so): a rank with fewer pads.
        """
        mine = torch.cat((routing.count(experts, num_experts), experts.new_full((1,), experts.shape[0])))
        trip = CollectiveTrip(self.transport, experts.shape)
        trip.begin(experts, self.transport.start_gather(mine))
        return trip

    def resume(self, state: tuple[Tensor, ...], shape: torch.Size, plan: Any) -> CollectiveTrip:
        """See `Exchange`."""
        trip = CollectiveTrip(self.transport, shape)
        trip.restore(state, plan)
        return trip


class CollectiveTrip:
    """See `Trip`. Known after `send`: ``ends``, ``state`` and ``plan`` (the route's sizes)."""

    ends: Tensor
    slots: Tensor
    total: Tensor
    """rows of all ranks; known to the trip of a forward pass alone"""

    def __init__(self, transport: AllToAll, shape: torch.Size) -> None:
        self.transport = transport
        self.shape = shape
        self._route: Route | None = None

    def begin(self, experts: Tensor, counts: Pending) -> None:
        """Remember the choices until the counts are here."""
        self.experts, self.counts = experts, counts

    def restore(self, state: tuple[Tensor, ...], sizes: tuple[int, int, int]) -> None:
        """Continue with a saved plan."""
        self.ends, self.slots, out, relay, row = state
        self._route = Route(out, relay, row, sizes)

    @property
    def route(self) -> Route:
        """The way of this rank's rows.

        Raises:
            RuntimeError: before `send`.
        """
        if self._route is None:
            raise RuntimeError("MoonEP: the way of the rows is not known before they are sent")
        return self._route

    @property
    def state(self) -> tuple[Tensor, ...]:
        """See `Trip`."""
        return (self.ends, self.slots, *self.route[:3])

    @property
    def plan(self) -> tuple[int, int, int]:
        """What `CollectiveExchange.resume` needs besides tensors."""
        return self.route.sizes

    def fetch(self, w1: Tensor, w2: Tensor) -> None:
        """See `Trip`."""
        m = w1.shape[0]
        self.weights = (w1, w2)
        self.offered = self.transport.offer(torch.cat((w1.reshape(m, -1), w2.reshape(m, -1)), dim=1))

    def send(self, z: Tensor, probs: Tensor | None = None) -> tuple[Pending, Pending | None]:
        """See `Trip`."""
        if self._route is None:
            self._find_route()
        k = self.shape[1]
        rows = z[:, None].expand(-1, k, -1).reshape(-1, z.shape[1])
        under_way = self.transport.send(rows, self.route)
        return under_way, None if probs is None else self.transport.send(probs.reshape(-1, 1), self.route)

    def _find_route(self) -> None:
        everyone = self.counts.wait().view(self.transport.ranks, -1)
        torch._assert_async(
            (everyone[:, -1] == self.shape[0]).all(),
            "MoonEP: ranks hold different numbers of tokens; pad the shorter ones with padding tokens",
        )
        counts = everyone[:, :-1]
        self.total = counts.sum()
        where = routing.address(planner_torch.plan(counts), self.experts, self.transport.me)
        self.ends, self.slots = where.ends, where.slots
        self._route = self.transport.route(where.rank.view(-1), where.row.view(-1))
        del self.experts, self.counts

    def arrive(self, ticket: tuple[Pending, Pending | None]) -> tuple[Tensor, Tensor | None]:
        """See `Trip`."""
        rows, probs = ticket
        x = self.transport.arrive(rows, self.route)
        return x, None if probs is None else self.transport.arrive(probs, self.route)[:, 0]

    def fetched(self) -> tuple[Tensor, Tensor]:
        """See `Trip`."""
        w1, w2 = self.weights
        first, second = w1[0].numel(), w2[0].numel()
        slots = self.transport.fetch(self.offered, self.slots, first + second)
        del self.offered, self.weights
        return torch.cat((w1, slots[:, :first].view_as(w1))), torch.cat((w2, slots[:, first:].view_as(w2)))

    def home(self, y: Tensor, p: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `Trip`; a token's results are added in the order of its choices."""
        rows = self.transport.combine(y, self.route).view(*self.shape, -1)
        wide = torch.promote_types(y.dtype, torch.float32)
        output = rows.to(wide).sum(1).to(y.dtype)
        return output, None if p is None else self.transport.combine(p[:, None], self.route).view(self.shape)

    def give_back(self, g1: Tensor, g2: Tensor) -> tuple[Tensor, Tensor]:
        """See `Trip`."""
        m = g1.shape[0] // 2
        wide = torch.promote_types(g1.dtype, torch.float32)
        staged = torch.cat((g1[m:].reshape(m, -1), g2[m:].reshape(m, -1)), dim=1).to(wide)
        back = self.transport.give_back(staged, self.slots)
        first = g1[0].numel()
        dw1 = (g1[:m].to(wide) + back[:, :first].view_as(g1[:m])).to(g1.dtype)
        dw2 = (g2[:m].to(wide) + back[:, first:].view_as(g2[:m])).to(g2.dtype)
        return dw1, dw2

    def report(self, buffer_rows: int) -> Report:
        """See `Trip`."""
        used, me, ranks = self.slots >= 0, self.transport.me, self.transport.ranks
        share = self.total // ranks + (me < self.total % ranks)
        return Report(self.ends[-1], share, used[me].sum(), used.sum(), self.shape.numel(), buffer_rows)
