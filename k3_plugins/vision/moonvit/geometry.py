"""From pixels to patches and to token counts: the sizes of packed images and videos, and every refusal of a bad one.

Letters: t frames, h x w patches of a frame, P edge of a patch in pixels, N patches of the whole batch.

A clip is an image (t = 1) or a video; its patches lie frame by frame, row by row. 2 x 2 patches of all frames together
become one token of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from k3_plugins.vision.moonvit.config import MoonViTConfig

MERGE = 2
"""Edge of the square of patches that becomes one token."""


class ImageError(ValueError):
    """An image or video that cannot be encoded; the message names the sample and what to do."""


class Clip(NamedTuple):
    """The grid of one image or video, in patches."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        """Patches of all frames."""
        return self.t * self.h * self.w

    @property
    def tokens(self) -> int:
        """Tokens that the language model sees."""
        return self.h // MERGE * (self.w // MERGE)


class Run(NamedTuple):
    """Patches of neighbouring frames at the same places: places ``first`` to ``last - 1`` of frames ``begin`` to
    ``end - 1``. A place is the number of a patch within its frame."""

    begin: int
    end: int
    first: int
    last: int

    @property
    def patches(self) -> int:
        """Number of patches."""
        return (self.end - self.begin) * (self.last - self.first)


class Piece(NamedTuple):
    """Patches ``start`` to ``stop - 1`` of a clip: what one rank holds of it."""

    clip: Clip
    start: int
    stop: int

    @property
    def patches(self) -> int:
        """Number of patches."""
        return self.stop - self.start

    def runs(self) -> list[Run]:
        """The piece in order: the rest of a frame, whole frames, the beginning of a frame, as far as there are any."""
        size = self.clip.h * self.clip.w
        (begin, first), (end, last) = divmod(self.start, size), divmod(self.stop, size)
        if begin == end:
            return [Run(begin, begin + 1, first, last)] if first < last else []
        runs = []
        if first:
            runs.append(Run(begin, begin + 1, first, size))
            begin += 1
        if begin < end:
            runs.append(Run(begin, end, 0, size))
        if last:
            runs.append(Run(end, end + 1, 0, last))
        return runs


def whole(clip: Clip) -> Piece:
    """All of a clip."""
    return Piece(clip, 0, clip.patches)


def check_clip(clip: Clip, config: MoonViTConfig, key: str) -> None:
    """Refuse grids that the encoder cannot take.

    Args:
        key: the sample's name, for the message.

    Raises:
        ImageError: a zero or odd size, too many patches in a frame, too many frames.
    """
    if min(clip) < 1:
        raise ImageError(f"{key}: the grid of {clip.t} frames of {clip.h} x {clip.w} patches is empty")
    if clip.h % MERGE or clip.w % MERGE:
        raise ImageError(
            f"{key}: a grid of {clip.h} x {clip.w} patches has an odd edge; pad the image to a multiple of"
            f" {MERGE * config.moonvit_patch_size} pixels"
        )
    if clip.h * clip.w > config.moonvit_max_patches:
        raise ImageError(
            f"{key}: {clip.h} x {clip.w} patches are {clip.h * clip.w}, over --moonvit-max-patches"
            f" {config.moonvit_max_patches}; shrink the image or raise the limit"
        )
    if clip.t > config.moonvit_max_frames:
        raise ImageError(
            f"{key}: {clip.t} frames are over --moonvit-max-frames {config.moonvit_max_frames}; cut the video into"
            " clips or raise the limit"
        )


def clip_of(frames: int, height: int, width: int, config: MoonViTConfig, key: str = "image") -> Clip:
    """The grid of an image or video, its edges rounded up to whole tokens.

    Args:
        frames, height, width: 1 and the pixels for an image.

    Raises:
        ImageError: as :func:`check_clip`, in pixels where that says more.
    """
    if frames < 1 or height < 1 or width < 1:
        raise ImageError(f"{key}: {frames} frames of {height} x {width} pixels: there is nothing to encode")
    edge = MERGE * config.moonvit_patch_size
    clip = Clip(frames, MERGE * -(-height // edge), MERGE * -(-width // edge))
    if clip.h * clip.w > config.moonvit_max_patches:
        raise ImageError(
            f"{key}: {height} x {width} pixels make {clip.h} x {clip.w} patches, over --moonvit-max-patches"
            f" {config.moonvit_max_patches}; shrink the image or raise the limit"
        )
    check_clip(clip, config, key)
    return clip


def patchify(pixels: Tensor, config: MoonViTConfig, key: str = "image") -> tuple[Tensor, Clip]:
    """Cut an image or video into patches.

    Args:
        pixels: ``[3, H, W]`` or ``[t, 3, H, W]``; uint8, or floating in [-1, 1]. Bytes are mapped to [-1, 1]. Edges
            that are no multiple of two patches are padded with zeros (mid-grey) on the right and at the bottom.
        key: the sample's name, for messages.

    Returns:
        ``[t*h*w, 3*P*P]`` fp32 (or the floating dtype given), channels first within a patch, and the grid.

    Raises:
        ImageError: another shape or dtype, values that are not finite, or a size that :func:`clip_of` refuses.
    """
    if pixels.ndim == 3:
        pixels = pixels[None]
    if pixels.ndim != 4 or pixels.shape[1] != 3:
        raise ImageError(
            f"{key}: pixels have shape {list(pixels.shape)}; [3, H, W] or [frames, 3, H, W] is needed (convert grey and"
            " transparent images to RGB)"
        )
    t, _, height, width = pixels.shape
    clip = clip_of(t, height, width, config, key)
    if pixels.dtype == torch.uint8:
        pixels = pixels.float() / 127.5 - 1.0
    elif not pixels.is_floating_point():
        raise ImageError(f"{key}: pixels are {pixels.dtype}; bytes, or floating numbers in [-1, 1], are needed")
    elif not torch.isfinite(pixels).all():
        raise ImageError(f"{key}: some pixels are not finite")
    size = config.moonvit_patch_size
    pixels = torch.nn.functional.pad(pixels, (0, clip.w * size - width, 0, clip.h * size - height))
    patches = pixels.reshape(t, 3, clip.h, size, clip.w, size).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(clip.patches, 3 * size * size), clip


def check_batch(patches: Tensor, clips: Sequence[Clip], config: MoonViTConfig) -> None:
    """Refuse a packed batch whose patches and grids do not belong together.

    Raises:
        ImageError: naming both counts.
    """
    for number, clip in enumerate(clips):
        check_clip(clip, config, f"clip {number} of the batch")
    needed = sum(clip.patches for clip in clips)
    width = 3 * config.moonvit_patch_size**2
    if patches.ndim != 2 or patches.shape != (needed, width):
        raise ImageError(
            f"{len(clips)} clips need patches of shape {[needed, width]}, and they have {list(patches.shape)}"
        )
