"""Plain text for training with images: documents as webdataset shards, beside those of ``k3_plugins.data.render``.

    python -m k3_plugins.data.text_shards SOURCE ... --output DIR --bytes 500

Every document (files, folders, JSONL as for ``k3_plugins.data.prepare``) is cut at line ends into pieces of at most
so many bytes; a piece is a sample ``KEY.txt`` without an image, for ``k3_plugins.pretrain_vlm --vision-text-alone``.
Shards are named ``text-000000.tar``, so that they may lie in a folder of drawings. The bytes of a shard depend on the
documents and the settings alone. Documents that are left out are counted by reason: those that ``prepare`` leaves out,
and those that hold an image's mark, which training refuses in a text without an image.
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from k3_plugins.atomic import replacing
from k3_plugins.data.sources import InputError, Skip, enumerate_inputs, read_unit
from k3_plugins.vision.training.tokens import MARK


def pieces(text: bytes, most: int) -> Iterator[bytes]:
    """Cut a document at line ends, and in a line that is longer between characters.

    Args:
        text: UTF-8.
        most: bytes of a piece, at least 4, the longest character.
    """
    start = 0
    while len(text) - start > most:
        end = text.rfind(b"\n", start, start + most) + 1
        if end <= start:
            end = start + most
            while text[end] & 0xC0 == 0x80:  # not inside a character
                end -= 1
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def samples(
    sources: Sequence[str], include: Sequence[str], exclude: Sequence[str], most: int, left_out: Counter[str]
) -> Iterator[bytes]:
    """The pieces of all documents that hold more than white space, in order.

    Args:
        left_out: counts documents that are left out, by reason.

    Raises:
        InputError: a source that does not exist.
    """
    inputs = enumerate_inputs(sources, include=include, exclude=exclude)
    left_out.update(skip.reason for skip in inputs.skips)
    for unit in inputs.units:
        for item in read_unit(unit, json_key="text", on_bad_utf8="skip"):
            if isinstance(item, Skip):
                left_out[item.reason] += 1
            elif MARK in item.text:
                left_out[f"holds {MARK.decode()}"] += 1
            else:
                yield from (piece for piece in pieces(item.text, most) if piece.strip())


def write(texts: Iterable[bytes], folder: Path, per_shard: int) -> int:
    """Write shards of so many samples each, every one atomically; returns the number of samples."""
    texts, count = iter(texts), 0
    while batch := list(islice(texts, per_shard)):
        with replacing(folder / f"text-{count // per_shard:06d}.tar") as temporary:
            with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
                for number, text in enumerate(batch, start=count):
                    entry = tarfile.TarInfo(f"{number:09d}.txt")  # no time, no owner
                    entry.size, entry.mode = len(text), 0o644
                    tar.addfile(entry, io.BytesIO(text))
        count += len(batch)
    return count


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_plugins.data.text_shards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="files, folders, patterns")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a folder, made if it is not there")
    parser.add_argument("--bytes", type=int, default=500, help="most bytes of a sample (default 500)")
    parser.add_argument("--limit", type=int, metavar="N", help="write the first N samples only")
    parser.add_argument("--per-shard", type=int, default=1000, metavar="N", help="samples of a shard (default 1000)")
    parser.add_argument("--include", action="append", metavar="PATTERN", help="names to take in folders (default all)")
    parser.add_argument("--exclude", action="append", metavar="PATTERN", help="names to leave out in folders")
    options = parser.parse_args(argv)
    for flag, value, least in (("--bytes", options.bytes, 4), ("--per-shard", options.per_shard, 1)):
        if value < least:
            parser.error(f"{flag} {value} must be at least {least}")
    if options.limit is not None and options.limit < 1:
        parser.error(f"--limit {options.limit} must be at least 1")
    if any(options.output.glob("text-*.tar")):
        parser.error(f"--output {options.output} holds text shards already; remove them, or name another folder")
    options.output.mkdir(parents=True, exist_ok=True)
    left_out: Counter[str] = Counter()
    try:
        found = samples(options.sources, options.include or ["*"], options.exclude or [], options.bytes, left_out)
        count = write(islice(found, options.limit), options.output, options.per_shard)
    except InputError as error:
        parser.error(str(error))
    reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(left_out.items()))
    without = f"; documents left out: {reasons}" if reasons else ""
    if not count:
        parser.error(f"there is no text in {' '.join(options.sources)}{without}")
    print(f"text shards: {count} samples of at most {options.bytes} bytes in {options.output}{without}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
