"""Shards with samples that cannot be trained on, between good ones; and the same shards without them."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

GOOD = 8
TOO_LARGE = 20  # for --moonvit-max-patches: the good images have 16


def png(height: int, width: int, seed: int = 0) -> bytes:
    """A picture of noise."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def header(height: int, width: int) -> bytes:
    """The beginning of a PNG file of any size, checksum and all, and nothing behind it."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


CUT = png(56, 56)[:400]
"""Its header is right: it is found by decoding only."""
BAD = {
    "cut": {"png": CUT, "txt": b"the file ends too early"},
    "nopng": {"png": b"GIF89a" + bytes(60), "txt": b"another format"},
    "zero": {"png": header(0, 56), "txt": b"nothing to see"},
    "large": {"png": png(140, 140), "txt": b"100 patches"},
    # The sixth image of those whose headers are right: decoded by the other of two ranks than the first.
    "cutlater": {"png": CUT, "txt": b"and again"},
    "half": {"png": png(56, 56)},
    "marks": {"png": png(56, 56), "txt": b"two <|media_pad|> marks <|media_pad|> and one image"},
    "long": {"png": png(56, 56), "txt": b"x" * 500},
}
KINDS = "3 corrupt, 1 empty, 1 incomplete, 1 too large, 1 too long, 1 wrong marks"


def write(folder: Path, bad: dict[str, dict[str, bytes]]) -> Path:
    """Two shards of good samples, with bad ones between them."""
    folder.mkdir(parents=True)
    samples = {f"good{number}": {"png": png(28 + 28 * (number % 2), 56, number),
                                 "txt": b"before <|media_pad|> and behind" if number % 3 else b"behind"}
               for number in range(GOOD)}  # fmt: skip
    half, some = GOOD // 2, -(-len(bad) // 2)
    for shard in range(2):
        good_names = list(samples)[shard * half : (shard + 1) * half]
        bad_names = list(bad)[shard * some : (shard + 1) * some]
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for place, name in enumerate(good_names):
                for key in (*bad_names[place : place + 1], name):
                    _add(tar, key, bad.get(key) or samples[key])
    return folder


def _add(tar: tarfile.TarFile, key: str, files: dict[str, bytes]) -> None:
    for suffix, content in files.items():
        entry = tarfile.TarInfo(f"{key}.{suffix}")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
