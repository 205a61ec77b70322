"""Images and videos with texts out of webdataset tar shards, found by their headers alone.

A pair is two files of one key: ``KEY.png`` and a text, ``KEY.txt`` (captions, as ``k3_plugins.data.render`` writes
them) or another suffix; a text may stand alone where that is allowed. An animated PNG is a video. A text may say with
``<|media_pad|>`` where in it the image stands; otherwise the image comes first. As in webdataset a key is the path up
to the first dot of the file's name, and names without a dot or that begin with one belong to no pair.
Nothing is unpacked: offsets into the shards are kept, and the size of an image is read from the first bytes of its PNG.

Letters: n bytes of a text without the mark, H x W pixels of an image, N patches of it, P edge of a patch.
"""

from __future__ import annotations

import io
import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from k3_plugins.feature import FeatureError
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.geometry import Clip, ImageError, clip_of, patchify
from k3_plugins.vision.training.tokens import MARK

PNG = b"\x89PNG\r\n\x1a\n"


class BadSample(FeatureError):
    """A sample that cannot be trained on; the text names it.

    Args:
        kind: one or two words to count by.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Pair:
    """Where one pair lies, and how large it is."""

    key: str
    shard: Path
    image: tuple[int, int] | None
    """Offset and number of bytes; None for a text without an image."""
    text: tuple[int, int]
    clip: Clip | None
    mark: int | None = None
    """Where in the text the image's mark is."""

    @property
    def title(self) -> str:
        """For messages about the pair."""
        return f"{self.shard}: sample {self.key}"

    @property
    def name(self) -> str:
        """For messages about the image."""
        return f"{self.shard}: {self.key}.png"

    @property
    def image_tokens(self) -> int:
        """Tokens of the image."""
        return 0 if self.clip is None else self.clip.tokens

    @property
    def tokens(self) -> int:
        """Tokens of the image, bytes of the text, and the end."""
        return self.image_tokens + self.text_bytes + 1

    @property
    def text_bytes(self) -> int:
        """Bytes of the text without the mark."""
        return self.text[1] - (0 if self.mark is None else len(MARK))


def find_pairs(
    folder: str,
    config: MoonViTConfig,
    suffix: str,
    flag: str,
    text_alone: bool = False,
    bad: list[BadSample] | None = None,
) -> list[Pair]:
    """All pairs of a folder's shards, in the order of shards and of files.

    Args:
        suffix: of the text files, such as ``txt``.
        flag: names the folder in messages.
        text_alone: take texts without an image too.
        bad: gets the samples that are left out; without it the first one is raised.

    Raises:
        FeatureError: no shards, or a file that is no tar.
        BadSample: no PNG, a pair without its half, a file that is there twice, a size that the encoder refuses, marks
            that do not fit the images.
    """
    shards = sorted(Path(folder).glob("*.tar"))
    if not shards:
        raise FeatureError(
            f"{flag} {folder}: there are no *.tar shards; make some with python -m k3_plugins.data.render"
        )
    return [pair for shard in shards for pair in _pairs_of(shard, config, suffix, text_alone, bad)]


def _pairs_of(
    shard: Path, config: MoonViTConfig, suffix: str, text_alone: bool, bad: list[BadSample] | None
) -> list[Pair]:
    files: dict[str, dict[str, tuple[int, int]]] = {}
    twice: dict[str, str] = {}
    try:
        with tarfile.open(shard) as tar:
            for member in tar:
                folder, slash, name = member.name.rpartition("/")
                stem, _, kind = name.partition(".")
                if not (member.isfile() and stem and kind):
                    continue
                key = folder + slash + stem
                parts = files.setdefault(key, {})
                if kind in parts:
                    twice[key] = kind
                parts[kind] = (member.offset_data, member.size)
    except (OSError, tarfile.TarError) as error:
        raise FeatureError(f"{shard} cannot be read as a tar file: {error}; write it anew") from error
    pairs = []
    with shard.open("rb") as stream:
        for key, parts in files.items():
            try:
                if key in twice:
                    raise BadSample(
                        "repeated", f"{shard}: {key}.{twice[key]} is there twice: give every sample a name of its own"
                    )
                pairs.append(_pair_of(stream, shard, key, parts, config, suffix, text_alone))
            except BadSample as sample:
                if bad is None:
                    raise
                bad.append(sample)
    return pairs


def _pair_of(
    stream: BinaryIO,
    shard: Path,
    key: str,
    parts: dict[str, tuple[int, int]],
    config: MoonViTConfig,
    suffix: str,
    text_alone: bool,
) -> Pair:
    for kind in (suffix,) if text_alone else ("png", suffix):
        if kind not in parts:
            raise BadSample("incomplete", f"{shard}: sample {key} has no {key}.{kind}, only {', '.join(sorted(parts))}")
    clip = None
    if "png" in parts:
        size = png_size(stream, *parts["png"])
        if size is None:
            raise BadSample("corrupt", f"{shard}: {key}.png is no PNG file")
        try:
            clip = clip_of(*size, config, f"{shard}: {key}.png")
        except ImageError as error:
            raise BadSample("too large" if all(size) else "empty", str(error)) from error
    stream.seek(parts[suffix][0])
    text = stream.read(parts[suffix][1])
    mark = mark_of(text, int(clip is not None), f"{shard}: {key}.{suffix}")
    return Pair(key, shard, parts.get("png"), parts[suffix], clip, mark)


def png_size(stream: BinaryIO, offset: int, size: int) -> tuple[int, int, int] | None:
    """(frames, height, width) of a PNG, or None for another file.

    Args:
        stream: holds the file from ``offset`` on, ``size`` bytes of it.
    """
    stream.seek(offset)
    header = stream.read(min(24, size))
    if len(header) < 24 or header[:8] != PNG:
        return None
    width, height = struct.unpack(">II", header[16:])
    at = offset + len(PNG)
    while at + 12 <= offset + size:  # length, kind, content, checksum; what tells of frames comes ahead of the pixels
        stream.seek(at)
        length, kind = struct.unpack(">I4s", stream.read(8))
        if kind == b"acTL" and length >= 4:
            return struct.unpack(">I", stream.read(4))[0], height, width
        if kind == b"IDAT":
            break
        at += 12 + length
    return 1, height, width


def mark_of(text: bytes, images: int, name: str) -> int | None:
    """Where the image's mark is in a text; None: there is none, and the image comes first.

    Args:
        images: of the sample, 0 or 1.
        name: of the text, for the message.

    Raises:
        BadSample: more marks than images.
    """
    marks = text.count(MARK)
    if marks > images:
        raise BadSample(
            "wrong marks",
            f"{name}: {marks} marks {MARK.decode()} for {images} images; as many as images, or none, are needed",
        )
    return text.index(MARK) if marks else None


def too_long(name: str, image_tokens: int, text_bytes: int, seq_length: int) -> BadSample | None:
    """What is wrong with a sample that does not fit a row with its end."""
    tokens = image_tokens + text_bytes + 1
    if tokens <= seq_length:
        return None
    return BadSample(
        "too long",
        f"{name} has {image_tokens} image tokens and {text_bytes} bytes of text, {tokens} in all with the end: raise"
        f" --seq-length {seq_length}, or make smaller images",
    )


def read_text(pair: Pair) -> np.ndarray:
    """The text's bytes without the mark, ``[n]`` uint8."""
    return np.frombuffer(_bytes(pair, pair.text).replace(MARK, b"", 1), dtype=np.uint8)


def read_image(pair: Pair) -> Tensor:
    """The image of a pair that has one, as :func:`decode` gives it.

    Raises:
        ImageError: an image that does not decode, naming the sample.
    """
    assert pair.image is not None
    return decode(_bytes(pair, pair.image), pair.name)


def decode(image: bytes, name: str) -> Tensor:
    """An image file's contents to ``[3, H, W]`` uint8, those of an animated one to ``[frames, 3, H, W]``.

    Raises:
        ImageError: with ``name``, an image that does not decode.
    """
    from PIL import Image, ImageSequence

    try:
        with Image.open(io.BytesIO(image)) as file:
            frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(file)]
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise ImageError(f"{name} cannot be decoded: {error}") from error
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    return pixels[0] if len(frames) == 1 else pixels


def read_patches(pair: Pair, config: MoonViTConfig) -> Tensor:
    """The patches of a pair's image, ``[N, 3*P*P]`` fp32.

    Raises:
        ImageError: an image that does not decode, or to another size than its header says.
    """
    patches, clip = patchify(read_image(pair), config, pair.name)
    if clip != pair.clip:
        raise ImageError(
            f"{pair.name} decodes to {clip.tokens} tokens, and its header says {pair.image_tokens}: write it anew"
        )
    return patches


def _bytes(pair: Pair, place: tuple[int, int]) -> bytes:
    with pair.shard.open("rb") as stream:
        stream.seek(place[0])
        return stream.read(place[1])
