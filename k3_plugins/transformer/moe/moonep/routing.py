"""From a plan to addresses: where every (token, choice) pair is computed. Device tensors, fixed shapes, no host read.

Expert e's tokens form one queue, ordered by (source rank, position on the source). The plan cuts the queue into
consecutive runs, one per computing rank; on each rank the runs lie one after the other, home experts first, then the
slots. So every pair has a destination rank and a row there, and rows are sorted by expert without a second permutation.

Letters: R ranks, E experts, m home experts and slots per rank, T tokens on this rank, k choices per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from k3_plugins.transformer.moe.moonep.planner_torch import DevicePlan


class Addresses(NamedTuple):
    """Where this rank's pairs go, and what this rank computes.

    Attributes:
        rank: int64 ``[T, k]``, computing rank of each pair; R where the pair goes nowhere.
        row: int64 ``[T, k]``, its row there.
        ends: int32 ``[2 m]``, cumulative ends of this rank's segments: home experts, then slots.
        slots: int64 ``[R, m]``, every rank's redundant experts, -1 where unused.
    """

    rank: Tensor
    row: Tensor
    ends: Tensor
    slots: Tensor


def address(plan: DevicePlan, experts: Tensor, me: int) -> Addresses:
    """Addresses of the pairs of rank ``me``.

    Args:
        plan: the layer's plan; ``plan.counts[me]`` must be the counts of ``experts``.
        experts: int64 ``[T, k]``, chosen experts, -1 for a choice that goes nowhere.
    """
    x, slots = plan.assignment, plan.slots
    num_experts, ranks = x.shape
    m = num_experts // ranks
    device = x.device
    index = torch.arange(num_experts, device=device)
    rank_ids = torch.arange(ranks, device=device)

    # Segment sizes on every rank: home experts, then slots (an unused slot is an empty segment).
    home = x[index, index // m].view(ranks, m)
    used = slots >= 0
    slot_expert = slots.clamp(min=0)
    in_slot = torch.where(used, x[slot_expert, rank_ids[:, None]], 0)
    ends = torch.cat((home, in_slot), dim=1).cumsum(1)
    starts = ends - torch.cat((home, in_slot), dim=1)

    # first[e, r]: row of expert e's first token on rank r.
    first = torch.zeros(num_experts, ranks, dtype=torch.int64, device=device)
    first[index, index // m] = starts[:, :m].reshape(-1)
    # Unused slots point at expert 0: add nothing there.
    first.view(-1).scatter_add_(
        0, (slot_expert * ranks + rank_ids[:, None]).view(-1), torch.where(used, starts[:, m:], 0).reshape(-1)
    )

    until = x.cumsum(1)  # [E, R], end of each rank's run in the expert's queue
    valid = experts >= 0
    e = experts.clamp(min=0)
    position = _position(experts, num_experts) + _before(plan.counts, me)[e]
    rank = (until[e] <= position[..., None]).sum(-1).clamp(max=ranks - 1)
    begin = (until - x)[e, rank]
    row = first[e, rank] + position - begin
    return Addresses(torch.where(valid, rank, ranks), torch.where(valid, row, 0), ends[me].to(torch.int32), slots)


def _position(experts: Tensor, num_experts: int) -> Tensor:
    """``[T, k]``: how many earlier tokens of this rank chose the same expert (a token's choices are distinct)."""
    chosen = torch.zeros(experts.shape[0], num_experts + 1, dtype=torch.int32, device=experts.device)
    chosen.scatter_(1, torch.where(experts >= 0, experts, num_experts), 1)
    earlier = chosen.cumsum(0, dtype=torch.int32) - chosen
    return earlier.gather(1, experts.clamp(min=0)).to(torch.int64)


def _before(counts: Tensor, me: int) -> Tensor:
    """``[E]``: tokens of each expert on the ranks before this one."""
    return counts[:me].sum(0)


def count(experts: Tensor, num_experts: int) -> Tensor:
    """int64 ``[E]``: this rank's tokens per expert; -1 counts nowhere."""
    ones = torch.ones_like(experts).view(-1)
    bins = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    return bins.scatter_add_(0, torch.where(experts >= 0, experts, num_experts).view(-1), ones)[:num_experts]
