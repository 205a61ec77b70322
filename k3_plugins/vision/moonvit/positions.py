"""Positions of patches: the interpolated table, the temporal sinusoids, the rotation angles.

Letters: t frames, h x w patches of a frame, N patches of all pieces of clips, d width, k head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3_plugins.vision.moonvit.geometry import Piece

BASE = 10000.0


def table_positions(table: Tensor, pieces: Sequence[Piece], mode: str = "bilinear") -> Tensor:
    """The learned table, resampled to the grid of every clip (half-pixel centres), and the temporal term.

    Frames of a video get sinusoids of the frame number; an image, or a video of one frame, gets none.

    Args:
        table: ``[g, g, d]``.
        mode: ``bilinear`` or ``bicubic``.

    Returns:
        ``[N, d]`` in at least fp32.
    """
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    channels = table.permute(2, 0, 1)[None]
    grids: dict[tuple[int, int], Tensor] = {}
    parts = [table.flatten(0, 1)[:0]]  # without patches the table still has a gradient
    for piece in pieces:
        clip = piece.clip
        size = (clip.h, clip.w)
        if size not in grids:
            grid = channels
            if size != tuple(table.shape[:2]):
                grid = torch.nn.functional.interpolate(channels, size=size, mode=mode, align_corners=False)
            grids[size] = grid[0].permute(1, 2, 0).reshape(clip.h * clip.w, -1)
        times = frame_positions(clip.t, table.shape[-1], table.dtype, table.device)[:, None]
        for run in piece.runs():
            positions = grids[size][None, run.first : run.last]
            if clip.t > 1:
                positions = positions + times[run.begin : run.end]
            parts.append(positions.reshape(run.patches, -1))
    return torch.cat(parts)


def frame_positions(t: int, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[t, d]`` sines, then cosines, of the frame number times d/2 falling frequencies."""
    frequencies = BASE ** -(torch.arange(0, d, 2, dtype=torch.float64, device=device) / d)
    angles = torch.arange(t, dtype=torch.float64, device=device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(dtype)


def rotation_angles(pieces: Sequence[Piece], k: int, device: torch.device) -> Tensor:
    """Angles by which the pairs of a head turn: pair 2j with the column, pair 2j+1 with the row, at frequency j of k/4.

    Returns:
        ``[N, k/2]`` fp64.
    """
    frequencies = BASE ** -(torch.arange(0, k // 2, 2, dtype=torch.float64, device=device) / (k // 2))
    parts = [torch.empty(0, k // 2, dtype=torch.float64, device=device)]
    for piece in pieces:
        clip = piece.clip
        row = torch.arange(clip.h, dtype=torch.float64, device=device)[:, None, None] * frequencies
        column = torch.arange(clip.w, dtype=torch.float64, device=device)[None, :, None] * frequencies
        shape = (clip.h, clip.w, k // 4)
        angles = torch.stack([column.expand(shape), row.expand(shape)], dim=-1).reshape(clip.h * clip.w, k // 2)
        parts += [angles[run.first : run.last].repeat(run.end - run.begin, 1) for run in piece.runs()]
    return torch.cat(parts)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs (0, 1), (2, 3), ... in at least fp32.

    Args:
        x: ``[N, n, k]``.
        cos, sin: ``[N, k/2]``.

    Returns:
        ``[N, n, k]`` in the dtype of x.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    even, odd = x.to(compute).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None].to(compute), sin[:, None].to(compute)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)
