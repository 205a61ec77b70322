"""The gated feed-forward network of many experts over expert-sorted rows, forward and backward.

    h = x W1[g]^T,   a = act(h),   y = (p a) W2[g]^T                for the rows of segment g

Saved for the backward: ``x``, ``h`` and ``p``. With ``a' = dy W2[g]`` the probability's gradient is ``dp = <a', a>``,
so ``y`` is not saved and the activation is recomputed. Under quantization-aware training (`rounding`) the four operands
``x``, ``W1``, ``p a`` and ``W2`` are rounded before they are multiplied, in the backward pass too; rounded weights are
not kept between the passes but rounded again.

Letters: n rows, g experts, l input and output width, f expert width; ``ends`` int32 ``[g]`` as in `segment_gemm`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3_plugins.memory import annotate
from k3_plugins.transformer.moe.ops import segment_gemm
from k3_plugins.transformer.moe.ops.activation import GatedActivation
from k3_plugins.transformer.moe.ops.rounding import EXACT, Rounding


class MLPGradients(NamedTuple):
    """Gradients of one call: of ``x [n, l]``, ``p [n]``, ``w1 [g, 2 f, l]`` and ``w2 [g, l, f]``."""

    x: Tensor
    probs: Tensor
    w1: Tensor
    w2: Tensor


def forward(
    x: Tensor,
    probs: Tensor,
    w1: Tensor,
    w2: Tensor,
    ends: Tensor,
    act: GatedActivation,
    rounding: Rounding = EXACT,
) -> tuple[Tensor, Tensor]:
    """``y [n, l]`` and ``h [n, 2 f]``. Of the operands only the hidden layer is rounded here: ``x`` and the weights
    come rounded."""
    h = segment_gemm.multiply(x, w1, ends)
    scaled = rounding.input2((act.value(h) * _rows(probs, ends)[:, None]).to(x.dtype))
    return segment_gemm.multiply(scaled, w2, ends), h


def backward(
    grad: Tensor,
    x: Tensor,
    h: Tensor,
    probs: Tensor,
    w1: Tensor,
    w2: Tensor,
    ends: Tensor,
    act: GatedActivation,
    rounding: Rounding = EXACT,
) -> MLPGradients:
    """All gradients for ``grad = dL/dy [n, l]``, of the operands that `forward` had; slack rows give zeros."""
    probs_used = _rows(probs, ends)
    a = act.value(h)
    through = segment_gemm.multiply(grad, w2, ends, transposed=False).to(a.dtype)
    dprobs = (through * a).sum(1).to(probs.dtype)
    dw2 = segment_gemm.outer(grad, rounding.input2((a * probs_used[:, None]).to(x.dtype)), ends)
    dh = act.backward(h, through * probs_used[:, None])
    dw1 = segment_gemm.outer(dh, x, ends)
    dx = segment_gemm.multiply(dh, w1, ends, transposed=False)
    return MLPGradients(dx, dprobs, dw1, dw2)


def grouped_mlp(
    x: Tensor,
    probs: Tensor,
    w1: Tensor,
    w2: Tensor,
    ends: Tensor,
    act: GatedActivation,
    rounding: Rounding = EXACT,
) -> Tensor:
    """``forward`` with autograd.

    Args:
        x: ``[n, l]``, rows sorted by expert.
        probs: ``[n]``, routing weights.
        w1: ``[g, 2 f, l]``, gate rows first.
        w2: ``[g, l, f]``.
        ends: int32 ``[g]``.
        act: the gated activation.
        rounding: of the four operands.

    Returns:
        ``[n, l]``, already weighted by ``probs``.
    """
    return _GroupedMLP.apply(x, probs, w1, w2, ends, act, rounding)


def _rows(probs: Tensor, ends: Tensor) -> Tensor:
    """Probabilities with slack rows set to zero: what a padded buffer holds there is never multiplied."""
    used = torch.arange(probs.shape[0], device=probs.device) < ends[-1]
    return torch.where(used, probs, 0)


def _hidden(x: Tensor, w1: Tensor, ends: Tensor, rounding: Rounding) -> Tensor:
    """``h`` once more, from rows that were rounded before."""
    return segment_gemm.multiply(x, rounding.weight1(w1), ends)


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        w1: Tensor,
        w2: Tensor,
        ends: Tensor,
        act: GatedActivation,
        rounding: Rounding,
    ) -> Tensor:
        x = rounding.input1(x)
        y, h = forward(x, probs, rounding.weight1(w1), rounding.weight2(w2), ends, act, rounding)
        annotate(h, name="act", recompute=(_hidden, x, w1, ends, rounding))
        ctx.save_for_backward(x, h, probs, w1, w2, ends)
        ctx.act, ctx.rounding = act, rounding
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, h, probs, w1, w2, ends = ctx.saved_tensors
        w1, w2 = ctx.rounding.weight1(w1), ctx.rounding.weight2(w2)
        gradients = backward(grad.contiguous(), x, h, probs, w1, w2, ends, ctx.act, ctx.rounding)
        return (*gradients, None, None, None)
