"""A stand-in for the public ``moonep`` package, by gloo on CPU: its interface, its layouts, its traps.

What differs between ranks in the real package by mapped memory is exchanged here by collectives. Segments are padded to
``token_padding`` rows; padding rows of the hidden buffer are zero and those of the routing weights are garbage (NaN),
unused rows and unused slots are NaN, as memory that nobody wrote may be.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

NAN = float("nan")


@dataclass
class MoonEPCommPlan:
    """The fields that callers may read, and what the stand-in needs."""

    experts_to_copy: torch.Tensor
    route: Any
    places: torch.Tensor  # buffer row of each compact row
    zero: torch.Tensor  # bool [NvS], padding rows inside segments
    slots: torch.Tensor


class Event:
    def wait(self, stream):
        """Everything is done already."""


class Buffer:
    """``moonep.Buffer``."""

    def __init__(
        self, S, H, K, E, num_ep_ranks, num_sms=None, token_padding=4, group=None, comm_stream_priority=-1,
        enable_pdl=True, explicitly_destroy=False,
    ):  # fmt: skip
        from k3_plugins.transformer.moe.moonep.transport import AllToAll

        assert E % num_ep_ranks == 0 and num_ep_ranks == group.size()
        self.S, self.H, self.K, self.E, self.epn = S, H, K, E, E // num_ep_ranks
        self.padding, self.group = token_padding, group
        self.NvS = S * K + (token_padding - 1) * 2 * self.epn
        self.transport = AllToAll(group)

    def dispatch(
        self, hidden_sh, route_weights_sk=None, topk_experts_sk=None, tokens_per_expert=None, plan=None,
        async_finish=False, *, inter_rank_sync=True, zero_copy=False, router_weights_zero_copy=False,
    ):  # fmt: skip
        assert hidden_sh.dtype == torch.bfloat16 and hidden_sh.shape == (self.S, self.H)
        ends = None
        if plan is None:
            ends, plan = self._plan(topk_experts_sk, tokens_per_expert)
        rows = hidden_sh[:, None].expand(-1, self.K, -1).reshape(-1, self.H)
        hidden = hidden_sh.new_full((self.NvS, self.H), NAN)
        hidden[plan.zero] = 0
        hidden[plan.places] = self._there(rows, plan)
        weights = None
        if route_weights_sk is not None:
            assert route_weights_sk.dtype == torch.float32 and route_weights_sk.shape == (self.S, self.K)
            weights = route_weights_sk.new_full((self.NvS,), NAN)
            weights[plan.places] = self._there(route_weights_sk.reshape(-1, 1), plan)[:, 0]
        result = hidden, weights, ends, plan
        return (*result, Event()) if async_finish else result

    def _plan(self, topk, counts):
        from k3_plugins.transformer.moe.moonep import planner_torch, routing

        assert topk.dtype == counts.dtype == torch.int32 and topk.shape == (self.S, self.K)
        assert int(counts.sum()) == self.S * self.K
        everyone = self.transport.start_gather(counts.long()).wait().view(-1, self.E)
        where = routing.address(planner_torch.plan(everyone), topk.long(), self.group.rank())
        sizes = torch.diff(where.ends, prepend=torch.zeros(1, dtype=torch.int32)).long()
        padded = -(-sizes // self.padding) * self.padding
        starts = padded.cumsum(0) - padded
        places = torch.cat([torch.arange(a, a + n) for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)])
        zero = torch.arange(self.NvS) < padded.sum()
        zero[places] = False
        route = self.transport.route(where.rank.view(-1), where.row.view(-1))
        return padded.cumsum(0).to(torch.int32), MoonEPCommPlan(where.slots.int(), route, places, zero, where.slots)

    def _there(self, rows, plan):
        return self.transport.arrive(self.transport.send(rows, plan.route), plan.route)

    def combine(
        self, plan=None, hidden_nvsh=None, route_weights_nvs=None, async_finish=False, inter_rank_sync=True, *,
        zero_copy=False, router_weights_zero_copy=False,
    ):  # fmt: skip
        assert hidden_nvsh.dtype == torch.bfloat16 and hidden_nvsh.is_contiguous()
        assert hidden_nvsh.shape == (self.NvS, self.H)
        rows = self.transport.combine(hidden_nvsh[plan.places], plan.route).view(self.S, self.K, -1)
        weights = None
        if route_weights_nvs is not None:
            assert route_weights_nvs.dtype == torch.float32 and route_weights_nvs.shape == (self.NvS,)
            weights = self.transport.combine(route_weights_nvs[plan.places, None], plan.route).view(self.S, self.K)
        return rows.float().sum(1).to(torch.bfloat16), weights, Event() if async_finish else None

    def prefetch_weight(
        self, plan=None, async_finish=False, *, local_gate_weight=None, local_up_weight=None, local_down_weight=None,
        gate_prefetch_buffer=None, up_prefetch_buffer=None, down_prefetch_buffer=None,
    ):  # fmt: skip
        pairs = (
            (local_gate_weight, gate_prefetch_buffer),
            (local_up_weight, up_prefetch_buffer),
            (local_down_weight, down_prefetch_buffer),
        )
        for local, pool in pairs:
            assert local.is_contiguous() and local.dtype == pool.dtype == torch.bfloat16
            assert pool.shape == (self.group.size(), *local.shape)
            bank = [torch.empty_like(local) for _ in range(self.group.size())]
            dist.all_gather(bank, local, group=self.group)
            mine = pool[self.group.rank()]
            mine.fill_(NAN)
            for slot, expert in enumerate(plan.experts_to_copy[self.group.rank()].tolist()):
                if expert >= 0:
                    mine[slot] = bank[expert // self.epn][expert % self.epn]
        return Event() if async_finish else None

    def reduce_grad(
        self, plan=None, async_finish=False, *, local_gate_grad=None, local_up_grad=None, local_down_grad=None,
        gate_reduce_buffer=None, up_reduce_buffer=None, down_reduce_buffer=None,
    ):  # fmt: skip
        pairs = (
            (local_gate_grad, gate_reduce_buffer),
            (local_up_grad, up_reduce_buffer),
            (local_down_grad, down_reduce_buffer),
        )
        for local, pool in pairs:
            assert local.is_contiguous() and local.dtype == pool.dtype == torch.float32
            slots = pool[self.group.rank()].contiguous()
            back = self.transport.give_back(slots.view(self.epn, -1), plan.slots)
            local += back.view_as(local)
            pool[self.group.rank()] = 0
        return Event() if async_finish else None


def pad_dim0_for_alignment(chunk_shape, dtype):
    """Leaves a gap between ranks, as an allocation granularity does."""
    return chunk_shape[0] + 3


def create_nvl_dist_tensor(chunk_shape, dtype, local_rank, world_size, group=None):
    """Only this rank's chunk is ever touched here."""
    return torch.full((world_size * chunk_shape[0], *chunk_shape[1:]), NAN, dtype=dtype)


def install(**changes: Any) -> ModuleType:
    """Put the stand-in where ``import moonep`` finds it; ``changes`` replace attributes of the package."""
    package, buffer = ModuleType("moonep"), ModuleType("moonep.buffer")
    buffer.create_nvl_dist_tensor, buffer.pad_dim0_for_alignment = create_nvl_dist_tensor, pad_dim0_for_alignment
    package.Buffer, package.MoonEPCommPlan, package.buffer = Buffer, MoonEPCommPlan, buffer
    for name, value in changes.items():
        setattr(package, name, value)
    sys.modules |= {"moonep": package, "moonep.buffer": buffer}
    return package
