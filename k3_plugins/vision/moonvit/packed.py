"""How the rows of a tensor of patches belong to images and videos, for all that looks across patches.

Here every clip is whole, one behind the other. ``k3_plugins.vision.dynamic_cp`` has the same with clips that are split
over ranks.

Letters: N patches, M tokens of all clips, t frames, s patches of a frame, d width, n heads, k head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from k3_plugins.vision.moonvit.geometry import MERGE, Clip, Piece, whole


class Packed:
    """Whole clips, one behind the other.

    Args:
        clips: their grids.
    """

    def __init__(self, clips: Sequence[Clip]) -> None:
        self.pieces: list[Piece] = [whole(clip) for clip in clips]

    @property
    def patches(self) -> int:
        """N."""
        return sum(piece.patches for piece in self.pieces)

    @cached_property
    def video_rows(self) -> Tensor | None:
        """The rows that take part in temporal attention, int64; None: the step is left out."""
        return rows_of_videos(self.pieces) if any(piece.clip.t > 1 for piece in self.pieces) else None

    def attend_space(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention within each frame, ``[N, n, k]`` to ``[N, n*k]``."""
        return attend_whole(q, k, v, [piece.clip for piece in self.pieces], across_time=False)

    def attend_time(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention across the frames of each place; the rows are those of ``video_rows``."""
        return attend_whole(q, k, v, [piece.clip for piece in self.pieces if piece.clip.t > 1], across_time=True)

    def merge(self, x: Tensor) -> Tensor:
        """Mean over the frames of each clip (at least fp32), then 2 x 2 pixel shuffle: ``[N, d]`` to ``[M, 4, d]``."""
        parts = x.split([piece.patches for piece in self.pieces])
        return torch.cat([merge_whole(part, piece.clip) for part, piece in zip(parts, self.pieces, strict=True)])


def rows_of_videos(pieces: Sequence[Piece]) -> Tensor:
    """Indices of the patches that belong to clips of several frames."""
    flags = [torch.full((piece.patches,), piece.clip.t > 1) for piece in pieces]
    return torch.nonzero(torch.cat([torch.empty(0, dtype=torch.bool), *flags]))[:, 0]


def attend_whole(q: Tensor, k: Tensor, v: Tensor, clips: Sequence[Clip], *, across_time: bool) -> Tensor:
    """Attention clip by clip, ``[N, n, k]`` to ``[N, n*k]``."""
    # [t*s, n, k]: frames are the batch of spatial attention, places that of temporal attention.
    apart, together = (
        ("(t s) n k -> s n t k", "s n t k -> (t s) (n k)")
        if across_time
        else ("(t s) n k -> t n s k", "t n s k -> (t s) (n k)")
    )
    parts, start = [], 0
    for clip in clips:
        rows = slice(start, start + clip.patches)
        start += clip.patches
        queries, keys, values = (rearrange(part[rows], apart, t=clip.t) for part in (q, k, v))
        attended = scaled_dot_product_attention(queries, keys, values)
        parts.append(rearrange(attended, together, t=clip.t))
    return torch.cat(parts)


def merge_whole(x: Tensor, clip: Clip) -> Tensor:
    """Mean over frames and pixel shuffle of one clip: ``[t*s, d]`` to ``[s/4, 4, d]``."""
    frames = rearrange(x, "(t h y w x) d -> t (h w) (y x) d", t=clip.t, h=clip.h // MERGE, y=MERGE, x=MERGE)
    return frames.mean(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
