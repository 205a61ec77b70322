"""Patches, grids and refusals."""

import pytest
import torch

from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.geometry import Clip, ImageError, check_batch, clip_of, patchify

CONFIG = MoonViTConfig()


def test_patches_hold_the_pixels_of_their_square():
    config = MoonViTConfig(moonvit_patch_size=3)
    pixels = torch.arange(2 * 3 * 10 * 17).reshape(2, 3, 10, 17).to(torch.float64) / 1e3 - 1
    patches, clip = patchify(pixels, config)
    assert clip == Clip(2, 4, 6) and patches.shape == (48, 27)
    padded = torch.zeros(2, 3, 12, 18, dtype=torch.float64)
    padded[..., :10, :17] = pixels
    for number, patch in enumerate(patches):
        t, rest = divmod(number, 24)
        r, c = divmod(rest, 6)
        square = padded[t, :, 3 * r : 3 * r + 3, 3 * c : 3 * c + 3]
        assert torch.equal(patch.reshape(3, 3, 3), square)


def test_bytes_are_mapped_to_minus_one_to_one():
    patches, _ = patchify(torch.tensor([0, 255], dtype=torch.uint8).repeat(3, 28, 14), CONFIG)
    assert patches.dtype == torch.float32
    assert sorted(patches.unique().tolist()) == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("size", "clip", "tokens"),
    [
        ((1, 1, 1), Clip(1, 2, 2), 1),
        ((1, 28, 28), Clip(1, 2, 2), 1),
        ((1, 29, 28), Clip(1, 4, 2), 2),
        ((1, 3584, 3584), Clip(1, 256, 256), 16384),
        ((8, 224, 336), Clip(8, 16, 24), 96),
    ],
)
def test_sizes(size, clip, tokens):
    assert clip_of(*size, CONFIG) == clip
    assert clip.tokens == tokens


@pytest.mark.parametrize(
    ("pixels", "sentence"),
    [
        (torch.zeros(3, 0, 5), "cat.png: 1 frames of 0 x 5 pixels: there is nothing to encode"),
        (torch.zeros(0, 3, 5, 5), "cat.png: 0 frames of 5 x 5 pixels"),
        (torch.zeros(4, 28, 28), r"cat.png: pixels have shape \[1, 4, 28, 28\].*convert grey and transparent"),
        (torch.zeros(28, 28), r"cat.png: pixels have shape \[28, 28\]"),
        (torch.zeros(3, 28, 28, dtype=torch.int32), "cat.png: pixels are torch.int32"),
        (torch.full((3, 28, 28), float("nan")), "cat.png: some pixels are not finite"),
        (
            torch.zeros(3, 3585, 3584, dtype=torch.uint8),
            "3585 x 3584 pixels make 258 x 256 patches, over --moonvit-max",
        ),
        (torch.zeros(65, 3, 1, 1), "cat.png: 65 frames are over --moonvit-max-frames 64"),
    ],
)
def test_bad_images_are_named(pixels, sentence):
    with pytest.raises(ImageError, match=sentence):
        patchify(pixels, CONFIG, "cat.png")


@pytest.mark.parametrize(
    ("clip", "rows", "sentence"),
    [
        (Clip(1, 3, 2), 6, "clip 0 of the batch: a grid of 3 x 2 patches has an odd edge"),
        (Clip(1, 0, 2), 0, "clip 0 of the batch: the grid of 1 frames of 0 x 2 patches is empty"),
        (Clip(1, 512, 512), 4, "512 x 512 patches are 262144, over --moonvit-max-patches 65536"),
        (Clip(1, 2, 2), 5, r"1 clips need patches of shape \[4, 588\], and they have \[5, 588\]"),
    ],
)
def test_bad_batches_are_named(clip, rows, sentence):
    with pytest.raises(ImageError, match=sentence):
        check_batch(torch.zeros(rows, 588), [clip], CONFIG)
