"""Matrix products of consecutive row segments with one weight matrix each: the GEMMs of stacked experts.

    multiply(x, w, ends)[i]   = x[i] @ w[g]^T          for i in segment g
    outer(y, x, ends)[g]      = sum_{i in segment g} y[i] x[i]^T      (a weight gradient)

Rows after the last segment (slack of a padded buffer) give exact zeros and contribute nothing, whatever they hold.

Letters: n rows, g segments, k input width, o output width; ``ends`` int32 ``[g]``, cumulative segment ends.

Two implementations, chosen by dtype and shape alone: ``grouped`` (torch's grouped GEMM: one call, ``ends`` stays on the
device) and ``loop`` (one GEMM per segment; reads ``ends`` on the host), for fp64 and for widths that the grouped kernel
refuses.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes; the grouped kernel asks for it on every row


def implementation(dtype: torch.dtype, *widths: int) -> str:
    """``grouped`` or ``loop``, for matrices of these widths."""
    aligned = all(width * dtype.itemsize % _ALIGNMENT == 0 for width in widths)
    return "grouped" if dtype in _GROUPED_DTYPES and aligned else "loop"


def multiply(x: Tensor, w: Tensor, ends: Tensor, transposed: bool = True) -> Tensor:
    """Rows of each segment times its matrix.

    Args:
        x: ``[n, k]``.
        w: ``[g, o, k]``, or ``[g, k, o]`` with ``transposed=False`` (the product is ``x @ w[g]``).
        ends: int32 ``[g]``, non-decreasing, at most n.

    Returns:
        ``[n, o]``; zero rows after the last segment.
    """
    weight = w.transpose(1, 2) if transposed else w
    if implementation(x.dtype, *weight.shape[1:]) == "grouped":
        result = torch.nn.functional.grouped_mm(x, weight, offs=ends)
        return _without_slack(result, ends)
    result = x.new_zeros(x.shape[0], weight.shape[2])
    start = 0
    for g, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], weight[g], out=result[start:end])
        start = end
    return result


def outer(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Sum of outer products over each segment: ``[g, o, k]`` from ``y [n, o]`` and ``x [n, k]``."""
    if implementation(x.dtype, y.shape[1], x.shape[1]) == "grouped":
        return torch.nn.functional.grouped_mm(y.t(), x, offs=ends)
    result = x.new_zeros(len(ends), y.shape[1], x.shape[1])
    start = 0
    for g, end in enumerate(ends.tolist()):
        torch.mm(y[start:end].t(), x[start:end], out=result[g])
        start = end
    return result


def _without_slack(rows: Tensor, ends: Tensor) -> Tensor:
    # The grouped kernel leaves rows after the last segment uninitialised; NaN there must not spread.
    used = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
    return torch.where(used[:, None], rows, 0)
