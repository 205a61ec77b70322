"""Shards in which every row holds one sample: images of very different sizes, videos, and texts without an image."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

SEQ_LENGTH = 64
# Edges in pixels (height, width); None is a text without an image. Patches of 14 pixels, 2 x 2 of them a token.
SIZES = ((28, 28), (84, 112), None, (56, 28), (112, 112), (28, 84), None, (70, 70), (28, 56), None, (112, 56), (56, 56))
FRAMES = {3: 2, 8: 3}
"""By place in SIZES: these are videos."""


def write(folder: Path, count: int, seed: int) -> None:
    """``count`` samples in one shard; the same for the same seed."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number in range(count):
            size = SIZES[number % len(SIZES)]
            # Longer than half a row, so that a row holds one sample.
            tokens = 0 if size is None else -(-size[0] // 28) * -(-size[1] // 28)
            text = rng.integers(32, 127, SEQ_LENGTH // 2 + 4 - tokens // 2, dtype=np.uint8).tobytes()
            files = {"txt": text}
            if size is not None:
                stream, count_of_frames = io.BytesIO(), FRAMES.get(number % len(SIZES), 1)
                first, *others = (
                    Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for _ in range(count_of_frames)
                )
                first.save(stream, "PNG", save_all=bool(others), append_images=others)
                files = {"png": stream.getvalue(), **files}
            for suffix, content in files.items():
                entry = tarfile.TarInfo(f"{number:04d}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
