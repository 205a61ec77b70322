"""The short convolution of KDA: depthwise, causal, without bias, followed by SiLU.

Shapes: B batch, T tokens, D channels, W kernel width, N packed sequences.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu


def short_conv(x: Tensor, weight: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """silu(y), y_t = sum_i weight[:, i] * x_{t - (W-1) + i}, in at least fp32 inside; the result has x's dtype.

    Args:
        x: ``[B, T, D]``.
        weight: ``[D, W]``; the last tap multiplies the current token (``nn.Conv1d``'s order).
        cu_seqlens: ``[N+1]`` int boundaries of packed sequences (B = 1). The convolution sees zeros before each
            boundary; rows past the last boundary give zeros and get zero gradients.

    Returns:
        ``[B, T, D]``.
    """
    width = weight.shape[1]
    compute = torch.promote_types(x.dtype, torch.float32)
    # distance from each token to the start of its sequence, -1 for padding rows
    age = None
    if cu_seqlens is not None:
        position = torch.arange(x.shape[1], device=x.device)
        start = cu_seqlens[torch.searchsorted(cu_seqlens, position, right=True) - 1]
        age = torch.where(position < cu_seqlens[-1], position - start, -1)
    inputs, taps = x.to(compute), weight.to(compute)
    out = torch.zeros_like(inputs)
    for lag in range(min(width, x.shape[1])):
        shifted = pad(inputs[:, : x.shape[1] - lag], (0, 0, lag, 0))
        if age is not None:
            shifted = shifted.masked_fill((age < lag)[:, None], 0.0)
        out = out + shifted * taps[:, width - 1 - lag]
    return silu(out).to(x.dtype)
