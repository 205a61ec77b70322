"""Images with texts out of webdataset tar shards, found by their headers alone.

A pair is two neighbouring files of one key: ``KEY.png`` and a text, ``KEY.txt`` (captions, as
``k3_plugins.data.render`` writes them) or another suffix; a text may stand alone where that is allowed. Nothing is
unpacked: offsets into the shards are kept, and the size of an image is read from the first bytes of its PNG.
"""

from __future__ import annotations

import io
import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k3_plugins.feature import FeatureError
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.geometry import Clip, ImageError, clip_of

PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Pair:
    """Where one pair lies, and how large it is."""

    key: str
    shard: Path
    image: tuple[int, int] | None
    """Offset and number of bytes; None for a text without an image."""
    text: tuple[int, int]
    clip: Clip | None

    @property
    def image_tokens(self) -> int:
        """Tokens of the image."""
        return 0 if self.clip is None else self.clip.tokens

    @property
    def tokens(self) -> int:
        """Tokens of the image, bytes of the text, and the end."""
        return self.image_tokens + self.text[1] + 1


def find_pairs(folder: str, config: MoonViTConfig, suffix: str, flag: str, text_alone: bool = False) -> list[Pair]:
    """All pairs of a folder's shards, in the order of shards and of files.

    Args:
        suffix: of the text files, such as ``txt``.
        flag: names the folder in messages.
        text_alone: take texts without an image too.

    Raises:
        FeatureError: no shards, a file that is no tar or no PNG, a pair without its half, a size that the encoder
            refuses; the sentence names the sample.
    """
    shards = sorted(Path(folder).glob("*.tar"))
    if not shards:
        raise FeatureError(
            f"{flag} {folder}: there are no *.tar shards; make some with python -m k3_plugins.data.render"
        )
    return [pair for shard in shards for pair in _pairs_of(shard, config, suffix, text_alone)]


def _pairs_of(shard: Path, config: MoonViTConfig, suffix: str, text_alone: bool) -> list[Pair]:
    files: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, kind = member.name.partition(".")
                files.setdefault(key, {})[kind] = (member.offset_data, member.size)
    except (OSError, tarfile.TarError) as error:
        raise FeatureError(f"{shard} cannot be read as a tar file: {error}") from error
    pairs = []
    with shard.open("rb") as stream:
        for key, parts in files.items():
            for kind in (suffix,) if text_alone else ("png", suffix):
                if kind not in parts:
                    raise FeatureError(f"{shard}: sample {key} has no {key}.{kind}, only {', '.join(sorted(parts))}")
            if "png" not in parts:
                pairs.append(Pair(key, shard, None, parts[suffix], None))
                continue
            stream.seek(parts["png"][0])
            header = stream.read(24)
            if len(header) < 24 or header[:8] != PNG:
                raise FeatureError(f"{shard}: {key}.png is no PNG file")
            width, height = struct.unpack(">II", header[16:])
            try:
                clip = clip_of(1, height, width, config, f"{shard}: {key}.png")
            except ImageError as error:
                raise FeatureError(str(error)) from error
            pairs.append(Pair(key, shard, parts["png"], parts[suffix], clip))
    return pairs


def read_text(pair: Pair) -> np.ndarray:
    """The text's bytes, ``[n]`` uint8."""
    return np.frombuffer(_bytes(pair, pair.text), dtype=np.uint8)


def read_image(pair: Pair) -> Tensor:
    """The image of a pair that has one, ``[3, H, W]`` uint8.

    Raises:
        ImageError: an image that does not decode, naming the sample.
    """
    from PIL import Image

    try:
        pixels = np.asarray(Image.open(io.BytesIO(_bytes(pair, pair.image))).convert("RGB"))
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise ImageError(f"{pair.shard}: {pair.key}.png cannot be decoded: {error}") from error
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def _bytes(pair: Pair, place: tuple[int, int]) -> bytes:
    with pair.shard.open("rb") as stream:
        stream.seek(place[0])
        return stream.read(place[1])
