"""Routed experts with perfectly balanced expert parallelism: dispatch, compute and combine as one autograd function.

Forward: count, plan, prefetch redundant experts into slots, send the rows to their places, compute, send them back, add
up each token's k results in fp32. Backward: the saved plan is used again; slots hold no weights between the passes (all
layers share the memory), so they are fetched again; the slots' gradients go back to their experts' homes. With
``memory_efficient`` only the inputs are kept and the rows are sent a second time in the backward pass; without, the
received rows and the hidden layer are kept.

Letters: T tokens on this rank, k choices, l width, m home experts and slots, C = T k rows, f expert width, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3_plugins.transformer.moe.moonep import planner_torch, routing
from k3_plugins.transformer.moe.moonep.transport import AllToAll, Route
from k3_plugins.transformer.moe.ops import grouped_mlp, segment_gemm
from k3_plugins.transformer.moe.ops.activation import GatedActivation


@dataclass
class Report:
    """What the last forward pass did, as device tensors: to be read outside the layer.

    Attributes:
        rows: scalar, rows that this rank computed.
        slots: scalar, redundant experts on this rank.
        buffer_rows: rows of the receive buffer (a Python number: it is static).
        slots_anywhere: scalar, redundant experts on all ranks.
    """

    rows: Tensor
    slots: Tensor
    buffer_rows: int
    slots_anywhere: Tensor


def balanced_experts(
    z: Tensor,
    probs: Tensor,
    experts: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: GatedActivation,
    transport: AllToAll,
    memory_efficient: bool,
) -> tuple[Tensor, Report]:
    """``sum_i p_i E_i(z)`` over each token's choices.

    Args:
        z: ``[T, l]``; T must be the same on all ranks (a rank with fewer tokens pads, with choices of -1).
        probs: ``[T, k]``, fp32 or fp64.
        experts: int64 ``[T, k]``, global expert ids, distinct within a token, -1 for nowhere.
        w1: ``[m, 2 f, l]``, this rank's home experts.
        w2: ``[m, l, f]``.
        activation: the experts' gated activation.
        transport: over the expert-parallel group.
        memory_efficient: keep only the inputs for the backward pass.

    Returns:
        ``[T, l]`` in z's dtype, and the report.
    """
    report: list[Report] = []
    output = _BalancedExperts.apply(z, probs, experts, w1, w2, activation, transport, memory_efficient, report)
    return output, report[0]


class _BalancedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        z: Tensor,
        probs: Tensor,
        experts: Tensor,
        w1: Tensor,
        w2: Tensor,
        activation: GatedActivation,
        transport: AllToAll,
        memory_efficient: bool,
        report: list[Report],
    ) -> Tensor:
        num_experts = w1.shape[0] * transport.ranks
        mine = torch.cat((routing.count(experts, num_experts), experts.new_full((1,), experts.shape[0])))
        everyone = transport.gather(mine)
        torch._assert_async(
            (everyone[:, -1] == experts.shape[0]).all(),
            "MoonEP: ranks hold different numbers of tokens; pad the shorter ones with padding tokens",
        )
        plan = planner_torch.plan(everyone[:, :-1])
        where = routing.address(plan, experts, transport.me)
        route = transport.route(where.rank.view(-1), where.row.view(-1))
        x, p = _send(z, probs, route, transport)
        all1, all2 = _with_slots(w1, w2, where.slots, transport)
        y, h = grouped_mlp.forward(x, p, all1, all2, where.ends, activation)
        output = _sum_choices(transport.combine(y, route), experts.shape, z.dtype)

        kept = () if memory_efficient else (x, p, h)
        ctx.save_for_backward(z, probs, w1, w2, where.ends, where.slots, *route[:3], *kept)
        ctx.sizes, ctx.activation, ctx.transport = route.sizes, activation, transport
        used = where.slots >= 0
        report.append(Report(where.ends[-1], used[transport.me].sum(), x.shape[0], used.sum()))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, probs, w1, w2, ends, slots, out, relay, row, *kept = ctx.saved_tensors
        transport, act = ctx.transport, ctx.activation
        route = Route(out, relay, row, ctx.sizes)
        k = probs.shape[1]
        dy = transport.dispatch(_repeat(grad, k), route)
        all1, all2 = _with_slots(w1, w2, slots, transport)
        if kept:
            x, p, h = kept
        else:
            x, p = _send(z, probs, route, transport)
            h = segment_gemm.multiply(x, all1, ends)
        g = grouped_mlp.backward(dy, x, h, p, all1, all2, ends, act)
        dz = _sum_choices(transport.combine(g.x, route), probs.shape, z.dtype)
        dprobs = transport.combine(g.probs[:, None], route).view_as(probs)

        m = w1.shape[0]
        wide = torch.promote_types(w1.dtype, torch.float32)
        staged = torch.cat((g.w1[m:].reshape(m, -1), g.w2[m:].reshape(m, -1)), dim=1).to(wide)
        came_back = transport.give_back(staged, slots)
        dw1 = (g.w1[:m].to(wide) + came_back[:, : w1[0].numel()].view_as(w1)).to(w1.dtype)
        dw2 = (g.w2[:m].to(wide) + came_back[:, w1[0].numel() :].view_as(w2)).to(w2.dtype)
        return dz, dprobs, None, dw1, dw2, None, None, None, None


def _repeat(rows: Tensor, k: int) -> Tensor:
    """``[T, l]`` to ``[T k, l]``: a token's row for each of its choices."""
    return rows[:, None].expand(-1, k, -1).reshape(-1, rows.shape[1])


def _send(z: Tensor, probs: Tensor, route: Route, transport: AllToAll) -> tuple[Tensor, Tensor]:
    """The rows that this rank computes, ``[C, l]``, and their routing weights ``[C]``."""
    x = transport.dispatch(_repeat(z, probs.shape[1]), route)
    return x, transport.dispatch(probs.reshape(-1, 1), route)[:, 0]


def _with_slots(w1: Tensor, w2: Tensor, slots: Tensor, transport: AllToAll) -> tuple[Tensor, Tensor]:
    """Home experts and the fetched redundant ones: ``[2 m, 2 f, l]`` and ``[2 m, l, f]``."""
    m = w1.shape[0]
    fetched = transport.fetch(torch.cat((w1.reshape(m, -1), w2.reshape(m, -1)), dim=1), slots)
    first = w1[0].numel()
    return torch.cat((w1, fetched[:, :first].view_as(w1))), torch.cat((w2, fetched[:, first:].view_as(w2)))


def _sum_choices(rows: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """``[T k, l]`` to ``[T, l]``: each token's results in the order of its choices, at least in fp32."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.view(*shape, -1).to(wide).sum(1).to(dtype)
