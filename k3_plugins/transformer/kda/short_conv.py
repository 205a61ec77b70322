"""KDA's short convolution: depthwise, causal, no bias, with SiLU, over whole, packed or split sequences.

    y_t = act( sum_{s=0}^{W-1} w[:, W-1-s] * x_{t-s} ),    x before the start of a sequence is zero

Computed in fp32 (fp64 for fp64) and rounded once. The backward recomputes the sum, so only x and w are saved, and
works through blocks of rows, so the temporaries are small.

Shapes: B batch, T rows, D channels, W kernel size, R <= W - 1 halo rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3_plugins.transformer.kda.ops.inputs import sequence_bounds

# Elements that are worked on at once on a CPU: a few fp32 temporaries of this size fit in the cache.
_BLOCK_ELEMENTS = 1 << 18

_ACTIVATIONS = ("silu", None)


class _Boundaries:
    """Rows whose convolution window reaches over the start of their packed sequence.

    The sequence at row 0 is not among them: what lies before it is the halo.
    """

    def __init__(self, bounds: tuple[tuple[int, int], ...] | None, kernel: int) -> None:
        # rows[d]: the d-th rows of sequences, for which the shifts s > d must see zeros.
        inner = [] if bounds is None else [(a, b) for a, b in bounds if b > a > 0]
        self.rows = [[a + d for a, b in inner if a + d < b] for d in range(kernel - 1)]

    def cut(self, product: Tensor, shift: int, first_row: int) -> Tensor:
        """Zero the rows of `product` [B, n, D] (for rows first_row...) that this shift may not reach; in place."""
        end = first_row + product.shape[1]
        rows = [r - first_row for depth in self.rows[:shift] for r in depth if first_row <= r < end]
        if rows:
            product.index_fill_(1, torch.tensor(rows, device=product.device), 0)
        return product


def _preactivation(window: Tensor, weight: Tensor, cut: _Boundaries, first_row: int) -> Tensor:
    """[B, n, D] from window [B, W - 1 + n, D], whose first W - 1 rows precede row `first_row`."""
    width = weight.shape[1]
    n = window.shape[1] - width + 1
    y = window[:, width - 1 :] * weight[:, width - 1]
    for s in range(1, width):
        y += cut.cut(window[:, width - 1 - s : width - 1 - s + n] * weight[:, width - 1 - s], s, first_row)
    return y


def _blocks(x: Tensor) -> list[tuple[int, int]]:
    rows = x.shape[1]
    if x.device.type == "cpu":
        rows = max(1, min(rows, _BLOCK_ELEMENTS // max(1, x.shape[0] * x.shape[2])))
    return [(t, min(t + rows, x.shape[1])) for t in range(0, x.shape[1], rows)] if rows else []


def _window(x: Tensor, halo: Tensor | None, block: tuple[int, int], width: int, dtype: torch.dtype) -> Tensor:
    """Rows [t0 - (W - 1), t1) of x in `dtype`; those before row 0 come from the halo, or are zero."""
    t0, t1 = block
    inside = x[:, max(0, t0 - width + 1) : t1].to(dtype)
    missing = width - 1 + t1 - t0 - inside.shape[1]
    if not missing:
        return inside
    front = x.new_zeros(x.shape[0], missing, x.shape[2], dtype=dtype)
    if halo is not None:
        rows = min(halo.shape[1], missing)  # the front ends at row -1, as the halo does
        front[:, missing - rows :] = halo[:, halo.shape[1] - rows :]
    return torch.cat((front, inside), dim=1)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, halo: Tensor | None, cut: _Boundaries, activation: str | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, halo)
        ctx.cut, ctx.activation = cut, activation
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        w = weight.to(dtype)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for t0, t1 in _blocks(x):
            piece = _preactivation(_window(x, halo, (t0, t1), w.shape[1], dtype), w, cut, t0)
            y[:, t0:t1] = F.silu(piece, inplace=True) if activation == "silu" else piece
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, halo = ctx.saved_tensors
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        w, width = weight.to(dtype), weight.shape[1]
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dw = torch.zeros_like(w)
        carry = w.new_zeros(x.shape[0], width - 1, x.shape[2])  # from later rows to the W - 1 rows before them
        for t0, t1 in reversed(_blocks(x)):
            window = _window(x, halo, (t0, t1), width, dtype)
            d = dy[:, t0:t1].to(dtype)
            if ctx.activation == "silu":
                d = torch.ops.aten.silu_backward(d, _preactivation(window, w, ctx.cut, t0))
            n = t1 - t0
            d_window = torch.zeros_like(window)
            d_window[:, n:] += carry
            for s in range(width):
                at = slice(width - 1 - s, width - 1 - s + n)
                d_seen = ctx.cut.cut(d.clone(), s, t0) if s else d
                d_window[:, at].addcmul_(d_seen, w[:, width - 1 - s])
                dw[:, width - 1 - s] += (d_seen * window[:, at]).sum((0, 1))
            dx[:, t0:t1] = d_window[:, width - 1 :]
            carry = d_window[:, : width - 1]
        d_halo = None
        if halo is not None:
            d_halo = carry[:, width - 1 - halo.shape[1] :].to(halo.dtype)
        return dx, dw.to(weight.dtype), d_halo, None, None


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    initial_rows: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor:
    """Causal depthwise convolution with activation.

    Args:
        x: [B, T, D].
        weight: [D, W]; column W - 1 multiplies the current row (nn.Conv1d's order).
        cu_seqlens: [N + 1] cumulative lengths of packed sequences (B must be 1), of any length. No window reaches
            over a boundary; rows after the last boundary give zero output and zero gradient and are not read.
        initial_rows: [B, R, D], R <= W - 1, the rows right before x in the (first) sequence; zeros if None.
        activation: "silu" or None.
    Returns:
        [B, T, D] in x's dtype.
    Raises:
        ValueError: shapes or names that do not fit, naming the argument.
    """
    if x.dim() != 3:
        raise ValueError(f"short_conv: x must be [B, T, D], got {tuple(x.shape)}")
    b, total, channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(f"short_conv: weight must be [D={channels}, W], got {tuple(weight.shape)}")
    width = weight.shape[1]
    if activation not in _ACTIVATIONS:
        raise ValueError(f"short_conv: activation must be 'silu' or None, got {activation!r}")
    if initial_rows is not None:
        rows = initial_rows.shape[1] if initial_rows.dim() == 3 else -1
        if not 0 <= rows < width or (initial_rows.shape[0], initial_rows.shape[2]) != (b, channels):
            raise ValueError(
                f"short_conv: initial_rows must be [{b}, at most {width - 1}, {channels}], "
                f"got {tuple(initial_rows.shape)}"
            )
    bounds = None
    used = total
    if cu_seqlens is not None:
        if b != 1:
            raise ValueError(f"short_conv: packed sequences (cu_seqlens) need a batch of 1, got {b}")
        bounds = sequence_bounds(cu_seqlens, total)
        used = bounds[-1][1]
    y = _ShortConv.apply(x[:, :used], weight, initial_rows, _Boundaries(bounds, width), activation)
    return y if used == total else F.pad(y, (0, 0, 0, total - used))


def short_conv_step(
    x: Tensor, weight: Tensor, rows: Tensor | None, *, activation: str | None = "silu"
) -> tuple[Tensor, Tensor]:
    """One row of the convolution, for generation.

    Args:
        x: [B, D]. weight: [D, W].
        rows: [B, W - 1, D], the rows before x as the previous step returned them; None at the start of a sequence.
    Returns:
        (y [B, D] in x's dtype, the rows for the next step [B, W - 1, D] in x's dtype).
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"short_conv: activation must be 'silu' or None, got {activation!r}")
    if rows is None:
        rows = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[1])
    window = torch.cat((rows.to(x.dtype), x.unsqueeze(1)), dim=1)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.einsum("bwd,dw->bd", window.to(dtype), weight.to(dtype))
    y = F.silu(y) if activation == "silu" else y
    return y.to(x.dtype), window[:, 1:]
