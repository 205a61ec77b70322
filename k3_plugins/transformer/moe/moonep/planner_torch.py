"""The MoonEP plan on the device, without a host read.

The same decisions as `planner`, as tensor operations of fixed shape and number: ``R - 1`` steps, all variants at once.
Every branch is computed and the right one is selected, so the host never looks at a value. Failures that depend on
values (negative counts, the guarantee) are device-side assertions.

Letters: V variants, R ranks, E experts, m home experts per rank.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from k3_plugins.transformer.moe.moonep.planner import Plan, Variant, check_counts, variants_for


class DevicePlan(NamedTuple):
    """A plan as device tensors; the fields are those of `planner.Plan`.

    Attributes:
        counts: int64 ``[R, E]``.
        assignment: int64 ``[E, R]``.
        slots: int64 ``[R, m]``, ascending expert ids, -1 where unused.
    """

    counts: Tensor
    assignment: Tensor
    slots: Tensor

    def to_host(self) -> Plan:
        """Copy to the host (synchronises with the device): for reports and tests, never inside a layer."""
        return Plan(*(tensor.cpu().numpy() for tensor in self))


def plan(counts: Tensor) -> DevicePlan:
    """`planner.plan` for an integer tensor ``[R, E]`` on any device, bit for bit the same plan.

    Raises:
        PlanError: wrong shape.
    """
    ranks, num_experts, m = check_counts(counts.shape)
    counts = counts.to(torch.int64)
    torch._assert_async((counts >= 0).all(), "MoonEP: counts must not be negative")
    loads = counts.sum(0)
    total = loads.sum()
    index = torch.arange(ranks, device=counts.device)
    target = total // ranks + (index < total % ranks)
    spare = loads.view(ranks, m).sum(1) - target
    widest = (-spare).amax()
    by_size = loads.sort(descending=True).values.cumsum(0)
    bound = torch.where(widest > 0, (by_size < widest).sum() + 1, 0)
    variants = variants_for(num_experts, ranks)
    moved = _Filler(loads, spare, bound, variants).run()  # [V, R, E]

    per_rank = (moved > 0).sum(2)
    worst, extra = per_rank.amax(1), per_rank.sum(1)
    order = torch.arange(len(variants), device=counts.device)
    stops = (worst <= bound).long()
    reached = stops.cumsum(0) - stops  # variants before this one that reach the bound; they end the search among draws
    rules = sum(not variant.salt for variant in variants)
    reached = reached.masked_fill(order < rules, 0)
    score = ((worst * (ranks * num_experts + 1) + extra) * len(variants) + order).masked_fill(
        reached > 0, torch.iinfo(torch.int64).max
    )
    best = score.argmin().view(1)
    torch._assert_async((worst[best] <= m).all(), "MoonEP: a rank would need more redundant experts than slots")
    moved = moved.index_select(0, best)[0]
    experts = torch.arange(num_experts, device=counts.device)
    ids = torch.where(moved > 0, experts, num_experts).sort(1).values[:, :m]
    slots = torch.where(ids < num_experts, ids, -1)
    home = (experts // m)[:, None] == index
    assignment = torch.where(home, (loads - moved.sum(0))[:, None], moved.T)
    return DevicePlan(counts, assignment, slots)


@functools.cache
def _constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """``[n, 1]`` int64, built once and by fills: no copy from the host."""
    column = torch.zeros(len(values), 1, dtype=torch.int64, device=device)
    for i, value in enumerate(values):
        if value:
            column[i].fill_(value)
    return column


class _Filler:
    """All variants side by side. Experts are keys ``size * E + expert`` as in `planner`; key 0 marks an absent one."""

    def __init__(self, loads: Tensor, spare: Tensor, bound: Tensor, variants: tuple[Variant, ...]) -> None:
        count, self.E, self.R = len(variants), loads.numel(), spare.numel()
        self.m = self.E // self.R
        device = loads.device
        self.V = count
        self.variants = variants
        self.experts = torch.arange(self.E, device=device)
        self.ranks = torch.arange(self.R, device=device)
        self.keys = (loads * self.E + self.experts).repeat(count, 1)
        self.start = self.keys.clone()
        self.spare = spare.repeat(count, 1)
        self.open = torch.ones(count, self.R, dtype=torch.bool, device=device)
        level = self._flags([v.level for v in variants])
        self.P = (bound + level).clamp(max=self.m)
        self.moved = torch.zeros(count, self.R, self.E, dtype=torch.int64, device=device)

    def _flags(self, values: list) -> Tensor:
        """A per-variant constant ``[V, 1]``."""
        return _constant(tuple(int(value) for value in values), self.keys.device)

    def _flag(self, field: str) -> Tensor | None:
        """Variants with a property, ``[V, 1]`` bool; None if there are none."""
        values = [getattr(v, field) for v in self.variants]
        return self._flags(values).bool() if any(values) else None

    def run(self) -> Tensor:
        """Tokens that leave home, ``[V, R, E]`` by receiving rank and expert."""
        rules = ("no_dip", "forced", "from_all", "largest", "top", "joint", "whole", "drawn")
        flags = {name: self._flag(name) for name in rules}
        self.salt = self._flags([v.salt for v in self.variants])
        smallest_gap = self._flag("smallest_gap")
        never = torch.iinfo(torch.int64).min
        for step in range(1, self.R):
            urgent = -self.spare
            if flags["drawn"] is not None:
                urgent = torch.where(flags["drawn"], urgent * (_mixed(self.salt, step, self.ranks) % 8 + 1), urgent)
            order = urgent * self.R + self.ranks
            if smallest_gap is not None:
                order = torch.where(smallest_gap, -order, order)
            rank = torch.where(self.spare < 0, order, never).argmax(1, keepdim=True)
            gap = (-self.spare.gather(1, rank)).clamp(min=0)  # 0: this variant is done
            self.open &= (self.ranks != rank) | (gap == 0)
            amounts = self._choose(gap, rank, step, **flags)
            self.keys -= amounts * self.E
            self.spare -= amounts.view(self.V, self.R, self.m).sum(2)
            self.spare.scatter_add_(1, rank, gap)
            self.moved.scatter_add_(1, rank[:, :, None].expand(-1, 1, self.E), amounts[:, None])
        return self.moved

    def _choose(
        self,
        gap: Tensor,
        rank: Tensor,
        step: int,
        no_dip: Tensor | None,
        forced: Tensor | None,
        from_all: Tensor | None,
        largest: Tensor | None,
        top: Tensor | None,
        joint: Tensor | None,
        whole: Tensor | None,
        drawn: Tensor | None,
    ) -> Tensor:
        """Tokens of every expert that fill ``gap`` [V, 1] of ``rank``; ``[V, E]``, all zero where the gap is."""
        E = self.E
        donors = self.spare > 0
        if from_all is not None:
            donors = torch.where(from_all, self.open, donors)
        offered = donors.repeat_interleave(self.m, 1) & (self.keys >= E)
        pool = torch.where(offered, self.keys, 0).sort(1).values
        absent = E - offered.sum(1, keepdim=True)
        sizes = pool // E
        below = _running(sizes)  # [V, E + 1], tokens in the first i entries
        held = (below[:, -1:] - below).flip(1)[:, 1:]  # [V, E], tokens in the largest i + 1
        fewest = (held < gap).sum(1, keepdim=True) + 1

        chosen = self._window(pool, sizes, below, absent, fewest, gap)
        if top is not None:
            chosen = torch.where(top & (fewest > 1), self._top(pool, held, fewest, gap), chosen)
        if no_dip is not None:
            spread, possible = self._spread(fewest, gap)
            chosen = torch.where(no_dip & (fewest > 1) & possible, spread, chosen)
        if joint is not None:
            share, possible = self._joint(pool, held, absent, fewest, gap, rank)
            chosen = torch.where(joint & (fewest > 1) & possible, share, chosen)
        chosen = torch.where(fewest == 1, self._single(offered, gap, step, largest), chosen)
        if forced is not None:
            reach = held.gather(1, (self.P - 1).clamp(min=0)) >= gap
            use = forced & (self.P > 1) & (self.P <= E - absent) & reach
            window = self._window(pool, sizes, below, absent, self.P.clamp(min=1), gap, smallest_first=True)
            chosen = torch.where(use, window, chosen)
        if whole is not None:
            pieces, possible = self._whole(pool, sizes, below, absent, gap)
            chosen = torch.where(whole & possible, pieces, chosen)
        if drawn is not None:
            pieces, possible = self._drawn(pool, sizes, absent, fewest, gap, step)
            chosen = torch.where(drawn & possible, pieces, chosen)
        if no_dip is not None:
            dip, possible = self._smallest_dip(gap)
            chosen = torch.where(no_dip & possible, dip, chosen)
            caps, possible = self._no_dip_window(gap)
            chosen = torch.where(no_dip & possible, caps, chosen)
        return torch.where(gap > 0, chosen, 0)

    def _window(
        self,
        pool: Tensor,
        sizes: Tensor,
        below: Tensor,
        absent: Tensor,
        p: Tensor,
        gap: Tensor,
        smallest_first: bool = False,
    ) -> Tensor:
        """The first ``p`` [V, 1] consecutive entries of the ascending ``pool`` that hold ``gap``."""
        E = self.E
        place = self.experts
        end = (place + p).clamp(max=E)
        enough = (below.gather(1, end) - below[:, :-1] >= gap) | (place + p >= E)
        start = torch.maximum((~enough).sum(1, keepdim=True), absent).minimum((E - p).clamp(min=0))
        inside = (place >= start) & (place < start + p)
        if smallest_first:
            left = gap - (below[:, :-1] - below.gather(1, start))
        else:
            left = gap - (below.gather(1, (start + p).clamp(max=E)) - below[:, 1:])
        amount = torch.minimum(left.clamp(min=0), sizes)
        return self._by_expert(pool, torch.where(inside, amount, 0))

    def _by_expert(self, pool: Tensor, amount: Tensor) -> Tensor:
        # Absent entries share key 0, so they add their zero to expert 0.
        return torch.zeros_like(pool).scatter_add_(1, pool % self.E, amount)

    def _top(self, pool: Tensor, held: Tensor, fewest: Tensor, gap: Tensor) -> Tensor:
        """All but one of the ``fewest`` largest, and the smallest of the others that completes them."""
        E = self.E
        need = gap - held.gather(1, (fewest - 2).clamp(min=0))
        place = self.experts
        is_top = place > E - fewest
        last = (place <= E - fewest) & (pool >= need * E) & (pool >= E)
        first = last & (last.long().cumsum(1) == 1)
        return self._by_expert(pool, torch.where(is_top, pool // E, 0) + torch.where(first, need, 0))

    def _whole(
        self, pool: Tensor, sizes: Tensor, below: Tensor, absent: Tensor, gap: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The ``P - 1`` largest experts that do not fill the gap alone, and the smallest that completes them."""
        E, place = self.E, self.experts
        end = (pool < gap * E).sum(1, keepdim=True)
        first = end - (self.P - 1)
        taken = (place >= first) & (place < end)
        rest = gap - (below.gather(1, end) - below.gather(1, first.clamp(min=0)))
        last = (pool >= rest * E) & (pool >= E) & ~taken
        last &= last.long().cumsum(1) == 1
        possible = (self.P > 1) & (first >= absent) & (rest > 0) & last.any(1, keepdim=True)
        return self._by_expert(pool, torch.where(taken, sizes, 0) + torch.where(last, rest, 0)), possible

    def _drawn(
        self, pool: Tensor, sizes: Tensor, absent: Tensor, fewest: Tensor, gap: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Pieces by lot, all but the last used up, and whether they fill the gap exactly."""
        E, place = self.E, self.experts
        lot = _mixed(self.salt, step, torch.full_like(place[:1], E))
        more = (self.P - fewest).clamp(min=0)
        pieces = fewest + (lot >> 3) % (more + 1)
        end = (pool < gap * E).sum(1, keepdim=True)
        first = torch.maximum(end - (pieces - 1 + (lot >> 8) % 8), absent)
        lots = (_mixed(self.salt, step, place) * E + place).gather(1, pool % E)
        window = (place >= first) & (place < end)
        turn = torch.where(window, lots, -1).argsort(1, descending=True).argsort(1)
        taken = window & (turn < pieces - 1)
        rest = gap - torch.where(taken, sizes, 0).sum(1, keepdim=True)
        fits = ~taken & (pool >= rest * E) & (pool >= E)
        order = torch.where(lot % 2 == 1, E - place, lots)
        last = torch.where(fits, order, -1).argmax(1, keepdim=True)
        possible = (end - first >= pieces - 1) & (rest > 0) & fits.any(1, keepdim=True)
        return self._by_expert(pool, torch.where(taken, sizes, 0) + torch.where(place == last, rest, 0)), possible

    def _joint(
        self, pool: Tensor, held: Tensor, absent: Tensor, p: Tensor, gap: Tensor, rank: Tensor
    ) -> tuple[Tensor, Tensor]:
        """This rank's share when the largest experts are shared out in ``p`` rounds, and whether it fills the gap."""
        E, R = self.E, self.R
        enough = torch.where(p > 1, held.gather(1, (p - 2).clamp(min=0)), 0)
        member = -self.spare > enough
        group = member.sum(1, keepdim=True)
        need = -self.spare
        blur = torch.where(self.salt > 0, gap // p // 2 ** (self.salt % 4) + 1, 1)
        left, amount = gap, torch.zeros_like(pool)
        for turn in range(self.m):
            value = need + _mixed(self.salt, turn, self.ranks) % blur
            order = torch.where(member, value * R + self.ranks, torch.iinfo(torch.int64).min)
            ahead = order.argsort(1, descending=True).argsort(1)
            place = (E - 1 - turn * group - ahead).clamp(min=0)
            size = torch.where(turn < p, pool.gather(1, place) // E, 0)
            need = need - torch.where(member, size, 0)
            mine = torch.minimum(size.gather(1, rank), left)
            amount.scatter_add_(1, place.gather(1, rank), mine)
            left = left - mine
        possible = (group > 1) & (group * p <= E - absent) & (left == 0)
        return self._by_expert(pool, amount), possible

    def _single(self, offered: Tensor, gap: Tensor, step: int, largest: Tensor | None) -> Tensor:
        """One expert that holds the whole gap."""
        never = torch.iinfo(torch.int64).max
        fits = offered & (self.keys >= gap * self.E)
        smallest = torch.where(fits, self.keys, never).argmin(1, keepdim=True)
        exact = self.keys.gather(1, smallest) // self.E == gap
        pick = smallest
        if largest is not None:
            oldest = torch.where(fits, self.start, -1).argmax(1, keepdim=True)
            pick = torch.where(largest & ~exact, oldest, smallest)
        lot = torch.where(fits, _mixed(self.salt, step, self.experts) * self.E + self.experts, -1)
        pick = torch.where((self.salt > 0) & ~exact, lot.argmax(1, keepdim=True), pick)
        return (self.experts == pick) * gap

    def _spread(self, p: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
        """``p`` experts of at least ``gap / p`` from as many donors as possible, and whether there are so many."""
        V, R, m, E = self.V, self.R, self.m, self.E
        own = self.keys.view(V, R, m)
        place = own.argsort(2, descending=True).argsort(2)
        donor_order = torch.where(self.spare > 0, -self.spare * R - self.ranks, 1).argsort(1).argsort(1)
        found = (self.spare > 0)[:, :, None] & (own >= (gap + p - 1).div(p, rounding_mode="floor")[:, :, None] * E)
        order = torch.where(found, place * R + donor_order[:, :, None], m * R).view(V, E)
        rank_in_order = order.argsort(1).argsort(1)
        chosen = found.view(V, E) & (rank_in_order < p)
        keys = torch.where(chosen, self.keys, 0).sort(1, descending=True).values
        sizes = keys // E
        amount = torch.minimum((gap - (sizes.cumsum(1) - sizes)).clamp(min=0), sizes)
        return self._by_expert(keys, amount), found.view(V, E).sum(1, keepdim=True) >= p

    def _smallest_dip(self, gap: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest expert that holds the gap, of the donor with most to spare, and whether there is one."""
        fits = (self.keys >= gap * self.E).view(self.V, self.R, self.m) & (self.spare > 0)[:, :, None]
        able = fits.any(2)
        donor = torch.where(able, self.spare * self.R + self.ranks, -1).argmax(1, keepdim=True)
        here = (self.experts // self.m == donor) & fits.view(self.V, self.E)
        pick = torch.where(here, self.keys, torch.iinfo(torch.int64).max).argmin(1, keepdim=True)
        return (self.experts == pick) * gap, able.any(1, keepdim=True)

    def _no_dip_window(self, gap: Tensor) -> tuple[Tensor, Tensor]:
        """At most ``P`` pieces that leave every donor at or above its target, and whether they exist."""
        V, R, m, E = self.V, self.R, self.m, self.E
        own = self.keys.view(V, R, m).sort(2, descending=True).values
        size = own // E
        before = size.cumsum(2) - size
        cap = torch.minimum((self.spare[:, :, None] - before).clamp(min=0), size)
        pool = torch.where(cap > 0, cap * E + own % E, 0).view(V, E).sort(1).values
        sizes = pool // E
        below = _running(sizes)
        held = (below[:, -1:] - below).flip(1)[:, 1:]
        fewest = (held < gap).sum(1, keepdim=True) + 1
        absent = (pool < E).sum(1, keepdim=True)
        # The single cap of gap tokens or more, or as many as P of them.
        possible = (fewest <= self.P.clamp(min=1)) & (fewest <= E)
        return self._window(pool, sizes, below, absent, fewest.clamp(max=E), gap), possible


def _mixed(salt: Tensor, step: int, item: Tensor) -> Tensor:
    """`planner_core.mixed` for salts ``[V, 1]`` and items ``[n]``: ``[V, n]``."""
    value = (salt * 7919 + step * 104729 + item * 1299709) % 2147483648
    for _ in range(2):
        value = (value ^ (value >> 15)) * 1103515245 % 2147483648
    return value ^ (value >> 13)


def _running(sizes: Tensor) -> Tensor:
    """``[V, E + 1]``: sums of the first 0, 1, ..., E entries."""
    return torch.nn.functional.pad(sizes.cumsum(1), (1, 0))
