"""Moving rows and weights with equal-split all-to-alls only: every size is known on the host in advance.

Every exchange is two all-to-alls in a row. The first one is started and returns at once (`Pending`), so that the caller
can compute while it is under way; the second one follows when its data is asked for.

Rows travel in two hops. A direct all-to-all would need the number of rows of every (source, destination) pair on the
host, a wait for the device in every layer. Instead each source deals its rows, sorted by destination, round-robin to
relay ranks (equal shares by construction), and each relay passes them on; a relay holds for one destination at most
``ceil(C / R) + R`` rows, because each source's run for it is dealt out evenly. The price is that rows travel twice; in
return no link is hotter than another, however skewed the routing is.

Weights: the experts of all ranks are cut into R shards and exchanged so that rank k holds shard k of EVERY expert; then
rank k sends each rank its shard of the experts in that rank's slots. A hot expert that every rank needs costs its home
no more than any other. Volume per rank and direction: 2 m expert sizes, whatever the plan. Gradients take the same way
back and are added up at the shard holder.

Letters: R ranks, E experts, m slots and home experts per rank, n pairs on this rank, C rows that a rank computes at
most, w columns of a row, W parameters of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Route(NamedTuple):
    """The way of this rank's rows, found once per layer and micro-batch; both directions use it.

    Attributes:
        out: int64 ``[n]``, place of each pair in the first hop's send buffer; its length where it goes nowhere.
        relay: int64 ``[R a]``, place of each row received as a relay in the second hop's send buffer; its length for
            padding.
        row: int64 ``[R b]``, row of each finally received entry in the computing buffer; C for padding.
        sizes: ``(a, b, C)``: entries per rank of the first and the second hop, and rows of the computing buffer.
    """

    out: Tensor
    relay: Tensor
    row: Tensor
    sizes: tuple[int, int, int]


class Pending:
    """A collective under way.

    Args:
        sent: what it reads, kept alive until then.
        received: what it writes.
        work: torch.distributed's handle; None if there was nothing to exchange.
    """

    def __init__(self, sent: Tensor, received: Tensor, work: dist.Work | None) -> None:
        self._sent: Tensor | None = sent
        self._received = received
        self._work = work

    def wait(self) -> Tensor:
        """What was received. On a GPU the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        self._work = self._sent = None
        return self._received


class AllToAll:
    """The exchange over one process group.

    Args:
        group: the expert-parallel group.
        overlap: whether a started collective may still be under way when the call returns.
    """

    def __init__(self, group: dist.ProcessGroup, overlap: bool = True) -> None:
        self.group = group
        self.overlap = overlap
        self.ranks = group.size()
        self.me = group.rank()

    def _start(self, collective: Callable[..., dist.Work], received: Tensor, sent: Tensor) -> Pending:
        pending = Pending(sent, received, collective(received, sent, group=self.group, async_op=True))
        if not self.overlap:
            pending.wait()
        return pending

    def start_swap(self, blocks: Tensor) -> Pending:
        """``[R, ...]``: block r goes to rank r; the blocks from all ranks when it is done."""
        if self.ranks == 1:
            return Pending(blocks, blocks, None)
        blocks = blocks.contiguous()
        return self._start(dist.all_to_all_single, torch.empty_like(blocks), blocks)

    def swap(self, blocks: Tensor) -> Tensor:
        """`start_swap`, done."""
        return self.start_swap(blocks).wait()

    def start_gather(self, row: Tensor) -> Pending:
        """``[w]`` of every rank, as ``[R w]`` when it is done."""
        return self._start(dist.all_gather_into_tensor, row.new_empty(self.ranks * row.numel()), row.contiguous())

    # -- rows -----------------------------------------------------------------------------------------------------

    def route(self, rank: Tensor, row: Tensor) -> Route:
        """Find the way of pairs with these addresses (``rank`` = R: nowhere).

        Args:
            rank: int64 ``[n]``.
            row: int64 ``[n]``.
        """
        ranks, pairs = self.ranks, rank.numel()
        share = -(-pairs // ranks)
        onward = min(share + ranks, share * ranks)
        rows = pairs
        valid = rank < ranks
        # Sorted by destination and dealt round-robin: entry i of the order goes to relay i mod R, place i div R.
        order = (rank * (rows + 1) + row).argsort().argsort()
        out = torch.where(valid, order % ranks * share + order // ranks, ranks * share)
        code = torch.where(valid, rank * (rows + 1) + row, -1)
        arrived = self.swap(_scatter(code, out, ranks * share, fill=-1).view(ranks, share)).view(-1)

        here = arrived >= 0
        goal = torch.where(here, arrived // (rows + 1), ranks)
        taken = (goal[:, None] == torch.arange(ranks + 1, device=goal.device)).to(torch.int64)
        place = (taken.cumsum(0) - taken).gather(1, goal[:, None])[:, 0]
        torch._assert_async(((place < onward) | ~here).all(), "MoonEP: a relay received more rows than it can pass on")
        relay = torch.where(here, goal * onward + place, ranks * onward)
        sent = _scatter(arrived % (rows + 1), relay, ranks * onward, fill=rows).view(ranks, onward)
        return Route(out, relay, self.swap(sent).view(-1), (share, onward, rows))

    def send(self, values: Tensor, route: Route) -> Pending:
        """Start to send ``[n, w]`` rows of pairs: the hop to the relays."""
        share = route.sizes[0]
        return self.start_swap(_scatter(values, route.out, self.ranks * share).view(self.ranks, share, -1))

    def arrive(self, under_way: Pending, route: Route) -> Tensor:
        """The ``[C, w]`` rows that this rank computes; unused rows are zero."""
        _, onward, rows = route.sizes
        first = under_way.wait()
        width = first.shape[2]
        second = self.swap(
            _scatter(first.view(-1, width), route.relay, self.ranks * onward).view(self.ranks, onward, width)
        )
        return _scatter(second.view(-1, width), route.row, rows)

    def combine(self, values: Tensor, route: Route) -> Tensor:
        """The way back: ``[C, w]`` computed rows to ``[n, w]``, in the order of the pairs; zero for pairs not sent."""
        share, onward, _ = route.sizes
        width = values.shape[1]
        second = self.swap(_gather(values, route.row).view(self.ranks, onward, width))
        first = self.swap(_gather(second.view(-1, width), route.relay).view(self.ranks, share, width))
        return _gather(first.view(-1, width), route.out)

    # -- weights --------------------------------------------------------------------------------------------------

    def offer(self, weights: Tensor) -> Pending:
        """Start to spread ``[m, W]``, this rank's home experts, over the shard holders: no plan is needed yet."""
        return self.start_swap(self._cut(weights))

    def fetch(self, offered: Pending, slots: Tensor, size: int) -> Tensor:
        """The experts in this rank's slots.

        Args:
            offered: from `offer`.
            slots: int64 ``[R, m]``; -1 for an unused slot, which receives some expert's weights.
            size: W.

        Returns:
            ``[m, W]``.
        """
        shards = offered.wait()  # [R, m, W / R]: shard `me` of every rank's experts
        bank = shards.reshape(-1, shards.shape[2])
        wanted = bank[slots.clamp(min=0).view(-1)].view_as(shards)
        return self._join(self.swap(wanted), size)

    def give_back(self, gradients: Tensor, slots: Tensor) -> Tensor:
        """Sum over all ranks of their slots' gradients, for this rank's home experts.

        Args:
            gradients: ``[m, W]``, of this rank's slots; unused slots count as zero.
            slots: int64 ``[R, m]``.
        """
        m, size = gradients.shape
        mine = torch.where(slots[self.me, :, None] >= 0, gradients, 0)
        shards = self.swap(self._cut(mine))  # [R, m, W / R]: shard `me` of every rank's slot gradients
        bank = shards.new_zeros(self.ranks * m, shards.shape[2])
        for r in range(self.ranks):  # in rank order: the sum has one order everywhere; a rank's slots are distinct
            # Unused slots all point at expert 0 and carry zeros.
            bank.index_add_(0, slots[r].clamp(min=0), shards[r])
        return self._join(self.swap(bank.view(self.ranks, m, -1)), size)

    def _cut(self, matrix: Tensor) -> Tensor:
        """``[m, W]`` to ``[R, m, ceil(W / R)]``: shard k for rank k."""
        m, size = matrix.shape
        shard = -(-size // self.ranks)
        padded = torch.nn.functional.pad(matrix, (0, shard * self.ranks - size))
        return padded.view(m, self.ranks, shard).transpose(0, 1).contiguous()

    def _join(self, shards: Tensor, size: int) -> Tensor:
        """``[R, m, ceil(W / R)]`` to ``[m, W]``."""
        return shards.transpose(0, 1).reshape(shards.shape[1], -1)[:, :size].contiguous()


def _scatter(values: Tensor, places: Tensor, length: int, fill: float = 0) -> Tensor:
    """``[length, ...]`` with ``values[i]`` at ``places[i]``; a place equal to ``length`` is dropped."""
    result = values.new_full((length + 1, *values.shape[1:]), fill)
    result[places] = values
    return result[:length]


def _gather(values: Tensor, places: Tensor) -> Tensor:
    """``values[places[i]]``; zero where the place equals the length."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, 1))
    return padded[places]
