"""KDA's decay gate: logits to log decay, with gradients that stay finite when the gate saturates.

    bounded (K3):            g = lower_bound * sigmoid(exp(A_log) * z)     in (lower_bound, 0)
    unbounded (Kimi Linear): g = -exp(A_log) * softplus(z)

Shapes: B batch, T tokens, HV heads, K key dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# exp(A_log) must stay finite: inf * 0 is NaN. Beyond these exponents every gate is saturated anyway.
_MAX_A_LOG = {torch.float32: 80.0, torch.float64: 700.0}
# Above this softplus(z) = z to fp64 rounding; PyTorch's default of 20 is 1e-10 off.
_SOFTPLUS_LINEAR = 40.0


class _KDAGate(torch.autograd.Function):
    """Saves the logits alone; plain autograd would keep three tensors of their size."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, A_log: Tensor, lower_bound: float | None) -> Tensor:
        ctx.save_for_backward(z, A_log)
        ctx.lower_bound = lower_bound
        dtype = torch.float64 if z.dtype == torch.float64 else torch.float32
        rate = A_log.to(dtype).clamp(max=_MAX_A_LOG[dtype]).exp().unsqueeze(-1)
        z = z.to(dtype)
        if lower_bound is None:
            return F.softplus(z, threshold=_SOFTPLUS_LINEAR).mul_(-rate)
        return (z * rate).sigmoid_().mul_(lower_bound)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor, Tensor, None]:
        z_in, A_log = ctx.saved_tensors
        dtype = dg.dtype
        rate = A_log.to(dtype).clamp(max=_MAX_A_LOG[dtype]).exp().unsqueeze(-1)
        z = z_in.to(dtype)
        if ctx.lower_bound is None:
            dz = (dg * z.sigmoid()).mul_(-rate)
            dA = (dg * F.softplus(z, threshold=_SOFTPLUS_LINEAR)).mul_(-rate)
        else:
            x = z * rate
            # sigmoid(x) * sigmoid(-x), not s * (1 - s): the latter loses the small factor to cancellation.
            dx = x.sigmoid().mul_(x.neg().sigmoid_()).mul_(dg).mul_(ctx.lower_bound)
            dz = dx * rate
            dA = dz * z
        dA = dA.sum(dim=(*range(dA.dim() - 2), -1))
        return dz.to(z_in.dtype), dA.to(A_log.dtype), None


def kda_gate(z: Tensor, A_log: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay of KDA.

    Args:
        z: [B, T, HV, K] logits with dt_bias already added.
        A_log: [HV] log rate per head.
        lower_bound: a negative number for the bounded gate (K3: -5.0), None for the softplus gate.
    Returns:
        g [B, T, HV, K] in fp32, in fp64 for fp64 logits. Values and gradients are finite for any finite input.
    Raises:
        ValueError: A_log does not match z's heads, or lower_bound is not negative.
    """
    if A_log.dim() != 1 or z.dim() < 2 or A_log.shape[0] != z.shape[-2]:
        raise ValueError(
            f"kda_gate: A_log must be [HV] for logits [..., HV, K], got {tuple(A_log.shape)} for {tuple(z.shape)}"
        )
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"kda_gate: lower_bound must be negative (or None for softplus), got {lower_bound}")
    return _KDAGate.apply(z, A_log, lower_bound)
