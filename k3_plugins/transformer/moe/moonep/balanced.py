"""Routed experts with perfectly balanced expert parallelism, in two autograd functions with a gap between them.

    flight = Flight(exchange, ...);  flight.depart(experts)      counts and weights travel: project the input meanwhile
    token = flight.send(z, probs)                                rows travel: compute the shared experts meanwhile
    output = flight.finish(token)                                compute, send back, add up each token's k results

The backward pass has the same gap: `finish`'s node starts to send the output's gradient (and, with
``memory_efficient``, the input a second time), `send`'s node waits for it and computes. Autograd runs what was created
later first, so the shared experts' backward pass falls between the two.

The saved plan is used again, never a new one. Slots hold no weights between the passes (all layers share the memory),
so they are fetched again; their gradients go back to their experts' homes. With ``memory_efficient`` only the inputs
are kept for the backward pass; without, the received rows and the hidden layer are.

Under quantization-aware training (`rounding`) rows and weights are rounded before they leave, so that a slot holds the
values that its expert has at home, and a row is rounded once for its k experts.

Letters: T tokens on this rank, k choices, l width, m home experts and slots, f expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3_plugins.memory import annotate
from k3_plugins.transformer.moe.moonep.exchange import Exchange, Report, Trip
from k3_plugins.transformer.moe.ops import grouped_mlp, segment_gemm
from k3_plugins.transformer.moe.ops.activation import GatedActivation
from k3_plugins.transformer.moe.ops.rounding import EXACT, Rounding


class Flight:
    """One forward pass of one layer, and its backward pass.

    Args:
        exchange: over the expert-parallel group.
        w1: ``[m, 2 f, l]``, this rank's home experts.
        w2: ``[m, l, f]``.
        activation: the experts' gated activation.
        memory_efficient: keep only the inputs for the backward pass.
        rounding: of the GEMMs' operands.
    """

    trip: Trip
    """from `depart` to `finish`"""
    inputs: tuple[Tensor, Tensor]
    """rows and routing weights, from `send` to `finish`"""
    ticket: Any
    """of `Trip.send`, from `send` to `finish`"""

    def __init__(
        self,
        exchange: Exchange,
        w1: Tensor,
        w2: Tensor,
        activation: GatedActivation,
        memory_efficient: bool,
        rounding: Rounding = EXACT,
    ) -> None:
        self.exchange = exchange
        self.w1, self.w2 = w1, w2
        self.activation = activation
        self.memory_efficient = memory_efficient
        self.rounding = rounding
        self.report: Report | None = None
        self.back: tuple[Any, ...] = ()  # from finish's backward node to send's

    @torch.no_grad()
    def depart(self, experts: Tensor, num_experts: int) -> None:
        """Counts and weights set out. ``experts`` int64 ``[T, k]``: distinct within a token, -1 for nowhere."""
        self.trip = self.exchange.depart(experts, num_experts)
        self.trip.fetch(*self.weights())

    def weights(self) -> tuple[Tensor, Tensor]:
        """What the home experts multiply with, and what travels to slots."""
        return self.rounding.weight1(self.w1.detach()), self.rounding.weight2(self.w2.detach())

    def send(self, z: Tensor, probs: Tensor) -> Tensor:
        """Rows set out.

        Args:
            z: ``[T, l]``; T must be the same on all ranks (a rank with fewer tokens pads, with choices of -1).
            probs: ``[T, k]``, fp32 or fp64.

        Returns:
            A scalar that ties the two autograd nodes together.
        """
        return _Send.apply(z, probs, self.w1, self.w2, self)

    def finish(self, token: Tensor) -> Tensor:
        """``sum_i p_i E_i(z)`` over each token's choices, ``[T, l]`` in z's dtype."""
        return _Finish.apply(token, self)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, probs: Tensor, w1: Tensor, w2: Tensor, flight: Flight) -> Tensor:
        z = flight.rounding.input1(z.detach())
        flight.inputs = z, probs.detach()
        flight.ticket = flight.trip.send(z, probs)
        ctx.flight = flight
        return z.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        flight = ctx.flight
        trip, gradient, again, kept = flight.back
        flight.back = ()
        dy, _ = trip.arrive(gradient)
        all1, all2 = trip.fetched()
        if kept:
            x, p, h = kept
        else:
            x, p = trip.arrive(again)
            h = segment_gemm.multiply(x, all1, trip.ends)
        g = grouped_mlp.backward(dy, x, h, p, all1, all2, trip.ends, flight.activation, flight.rounding)
        dz, dprobs = trip.home(g.x, g.probs)
        dw1, dw2 = trip.give_back(g.w1, g.w2)
        return dz, dprobs, dw1.to(flight.w1.dtype), dw2.to(flight.w2.dtype), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight) -> Tensor:
        trip = flight.trip
        x, p = trip.arrive(flight.ticket)
        assert p is not None  # sent with the rows
        all1, all2 = trip.fetched()
        y, h = grouped_mlp.forward(x, p, all1, all2, trip.ends, flight.activation, flight.rounding)
        annotate(h, name="act")
        output, _ = trip.home(y)
        flight.report = trip.report(x.shape[0])

        kept = flight.inputs if flight.memory_efficient else (x, p, h)
        ctx.save_for_backward(*kept, *trip.state)
        ctx.shape, ctx.plan, ctx.flight = flight.inputs[1].shape, trip.plan, flight
        del flight.inputs, flight.ticket, flight.trip
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        flight, saved = ctx.flight, ctx.saved_tensors
        count = 2 if flight.memory_efficient else 3
        kept, state = saved[:count], saved[count:]
        trip = flight.exchange.resume(state, ctx.shape, ctx.plan)
        gradient = trip.send(grad.contiguous())
        trip.fetch(*flight.weights())
        if flight.memory_efficient:
            flight.back = trip, gradient, trip.send(*kept), ()
        else:
            flight.back = trip, gradient, None, kept
        return grad.new_zeros(()), None
