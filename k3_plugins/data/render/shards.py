"""Webdataset tar shards of drawings: each sample is a PNG, its SVG code, its caption, and the same as JSON.

    000000123.png  000000123.svg  000000123.txt  000000123.json

The bytes of a shard depend on the seed and the settings alone. ``.nv-meta/dataset.yaml`` tells Megatron-Energon that a
sample is an image with a caption.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from k3_plugins.data.render.kinds import MOST, draw
from k3_plugins.data.render.renderer import render

DATASET_YAML = """\
sample_type:
  __module__: megatron.energon
  __class__: CaptioningSample
field_map:
  image: png
  caption: txt
"""


@dataclass(frozen=True)
class Settings:
    """What determines the data set."""

    count: int
    seed: int
    kinds: tuple[str, ...]
    smallest: int
    largest: int
    per_shard: int
    objects: int = MOST
    """Most objects that a caption names."""
    captions: Literal["full", "short"] = "full"
    """Sentences, or as few words as possible."""

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.count // self.per_shard)

    def samples(self, shard: int) -> range:
        """Numbers of the samples of one shard."""
        return range(shard * self.per_shard, min((shard + 1) * self.per_shard, self.count))


def sample(settings: Settings, index: int) -> dict[str, bytes]:
    """The files of one sample, by suffix."""
    drawing = draw(
        settings.seed,
        index,
        kinds=settings.kinds,
        smallest=settings.smallest,
        largest=settings.largest,
        limit=settings.objects,
    )
    return {
        "png": render(drawing),
        "svg": drawing.svg.encode(),
        "txt": (drawing.short_caption if settings.captions == "short" else drawing.caption).encode(),
        "json": json.dumps(drawing.record).encode(),
    }


def write_shard(settings: Settings, shard: int, folder: str) -> Iterator[int]:
    """Write one shard; yields 1 for each sample."""
    path = Path(folder) / shard_name(shard)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for index in settings.samples(shard):
            for suffix, content in sample(settings, index).items():
                # No time, no owner: the same seed gives the same bytes.
                entry = tarfile.TarInfo(f"{index:09d}.{suffix}")
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, io.BytesIO(content))
            yield 1


def _whole_shard(settings: Settings, shard: int, folder: str) -> int:
    return sum(write_shard(settings, shard, folder))


def shard_name(shard: int) -> str:
    """``shard-000000.tar``."""
    return f"shard-{shard:06d}.tar"


def write_shards(settings: Settings, folder: Path, workers: int) -> Iterator[int]:
    """Write all shards and the description for Energon; yields numbers of samples as they are done."""
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / "dataset.yaml").write_text(DATASET_YAML)
    jobs = range(settings.shards)
    pool = ProcessPoolExecutor(workers) if workers > 1 else nullcontext()
    with pool as executor:
        if executor is None:
            for shard in jobs:
                yield from write_shard(settings, shard, str(folder))
        else:
            futures = [executor.submit(_whole_shard, settings, shard, str(folder)) for shard in jobs]
            yield from (future.result() for future in futures)


def split_for_energon(folder: Path, ratios: Sequence[float]) -> None:
    """Write the index and the split that Energon needs, with its own function.

    Args:
        ratios: shares of train, val and test, by shards.
    """
    from k3_plugins.compat.optional import require

    require("megatron.energon", "--energon-split")
    from megatron.energon.flavors.webdataset import BaseWebdatasetFactory

    BaseWebdatasetFactory.prepare_dataset(
        folder,
        sorted(path.name for path in folder.glob("shard-*.tar")),
        split_parts_ratio=list(zip(("train", "val", "test"), ratios, strict=True)),
        shuffle_seed=None,
        workers=max(1, min(8, os.cpu_count() or 1)),
    )
