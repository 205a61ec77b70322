"""Gated activations for feed-forward networks: SiTU-GLU (K3) and SwiGLU, each one autograd function.

    SiTU-GLU(g, u) = b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2)        |.| <= b1 b2, b1 = 4, b2 = 25
    SwiGLU(g, u)   = g sigmoid(g) * u                                   the limit b1, b2 -> infinity

Only the input is saved; everything else is recomputed in the backward pass. An optional weight per row (the routing
probability) is multiplied in, so that the product needs no saved copy either.

Letters: n rows, f width of one half; the input is ``[..., 2 f]``, gate half first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class GatedActivation:
    """Which gated activation, and its bounds. ``None`` for a bound is infinity: with both None this is SwiGLU."""

    beta_gate: float | None = 4.0
    beta_up: float | None = 25.0

    def __post_init__(self) -> None:
        for name in ("beta_gate", "beta_up"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} {value} must be positive")

    def __call__(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """``[..., 2 f]`` to ``[..., f]`` in the input's dtype, computed in at least fp32.

        Args:
            x: gate and up halves side by side.
            scale: ``[...]``, multiplied into each row (fp32 or fp64).
        """
        return _GatedActivation.apply(x, scale, self)

    def value(self, x: Tensor) -> Tensor:
        """The unscaled activation in at least fp32, without autograd."""
        gate, up = _halves(x)
        return _soft_bound(gate, self.beta_gate) * gate.sigmoid() * _soft_bound(up, self.beta_up)

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """``dL/dx [..., 2 f]`` in x's dtype, for ``grad = dL/d value(x)`` in at least fp32."""
        gate, up = _halves(x)
        sig = gate.sigmoid()
        bounded, up_bounded = _soft_bound(gate, self.beta_gate), _soft_bound(up, self.beta_up)
        by_gate = sig * (_slope(bounded, self.beta_gate) + bounded * (1 - sig)) * up_bounded
        by_up = bounded * sig * _slope(up_bounded, self.beta_up)
        return torch.cat((grad * by_gate, grad * by_up), dim=-1).to(x.dtype)


SITU = GatedActivation()
SWIGLU = GatedActivation(beta_gate=None, beta_up=None)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return gate, up


def _soft_bound(x: Tensor, beta: float | None) -> Tensor:
    return x if beta is None else beta * torch.tanh(x / beta)


def _slope(bounded: Tensor, beta: float | None) -> Tensor | float:
    """Derivative of the soft bound, from its value: 1 - tanh^2."""
    return 1.0 if beta is None else 1.0 - (bounded / beta) ** 2


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, kind: GatedActivation) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.kind = kind
        y = kind.value(x)
        return (y if scale is None else y * scale[..., None]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, scale = ctx.saved_tensors
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        dscale = None
        if scale is not None:
            if ctx.needs_input_grad[1]:
                dscale = (grad * ctx.kind.value(x)).sum(-1).to(scale.dtype)
            grad = grad * scale[..., None]
        return ctx.kind.backward(x, grad), dscale, None
