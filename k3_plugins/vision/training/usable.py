"""Which pairs of a folder are trained on: the same on every rank, or the job ends on every rank.

Without ``--vision-skip-bad`` the first sample that cannot be trained on ends the job. With it such samples are left out
and counted; every image is decoded once for that before training, each by one rank, because a sample must be left out
on all ranks or on none: stages of a pipeline read the same row for different parts of it.
"""

from __future__ import annotations

import hashlib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.training import get_args, print_rank_0

from k3_plugins.activation import current
from k3_plugins.failure import fail, fail_together, place_of
from k3_plugins.feature import FeatureError
from k3_plugins.training.metrics import write
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.geometry import ImageError
from k3_plugins.vision.training.pairs import BadSample, Pair, find_pairs, read_patches, too_long

_SHOWN = 5
"""Sentences about samples that are left out; the others are only counted."""


@dataclass(frozen=True)
class PairSource:
    """What the door's flags say about samples."""

    suffix: str = "txt"
    """Of the text files."""
    text_alone: bool = False
    """Whether texts without an image are taken."""
    skip_bad: bool = False
    """Whether samples that cannot be trained on are left out, instead of ending the job."""
    reader: str = "shards"
    """``shards`` (``pairs.py``), or ``energon``."""


def usable_pairs(folder: str, flag: str, source: PairSource, config: MoonViTConfig, seq_length: int) -> list[Pair]:
    """The pairs to train on. Collective over all ranks; ends all of them with exit code 2 if there is a problem.

    Args:
        flag: names the folder in messages and in the metric of samples left out.
    """
    bad: list[BadSample] | None = [] if source.skip_bad else None
    pairs: list[Pair] = []
    mine: dict[int, str] = {}
    problem = None
    try:
        pairs = _fitting(find_pairs(folder, config, source.suffix, flag, source.text_alone, bad), seq_length, bad)
        if source.skip_bad:
            mine = _undecodable(pairs, config)
    except Exception as error:
        problem = in_words(error, f"reading {flag} {folder}")
    fail_together(problem)
    found = _gather((_digest(pairs), mine))
    if len({digest for digest, _ in found}) > 1:
        others = [rank for rank, (digest, _) in enumerate(found) if digest != found[0][0]]
        fail(
            f"{flag} {folder}: rank {others[0]} does not see the samples that rank 0 sees: copy the same shards to"
            " every machine, or name a folder that all of them share",
            at_once=True,
        )
    if bad is None:
        if not pairs:
            fail(f"{flag} {folder}: the shards hold no samples", at_once=len(found) > 1)
        return pairs
    undecodable = {number: text for _, part in found for number, text in part.items()}
    bad += [BadSample("corrupt", undecodable[number]) for number in sorted(undecodable)]
    usable = [pair for number, pair in enumerate(pairs) if number not in undecodable]
    if not usable:
        why = f"; the first: {bad[0]}" if bad else ""
        fail(f"{flag} {folder}: none of {len(bad)} samples can be used{why}", at_once=len(found) > 1)
    _tell(folder, flag, bad)
    return usable


def in_words(error: Exception, doing: str) -> str:
    """One rank's failure as every rank says it; that rank's log gets the traceback, if the words are not our own.

    Args:
        doing: what failed, such as ``reading --vision-data DIR``.
    """
    if isinstance(error, FeatureError):
        return str(error)
    traceback.print_exception(error)
    return (
        f"{doing} failed on rank {torch.distributed.get_rank()}: {type(error).__name__}: {error} ({place_of(error)}); "
        "make the files readable there, or see the traceback in that rank's log"
    )


def _fitting(pairs: Sequence[Pair], seq_length: int, bad: list[BadSample] | None) -> list[Pair]:
    """The pairs that fit a row."""
    fitting = []
    for pair in pairs:
        sample = too_long(pair.title, pair.image_tokens, pair.text_bytes, seq_length)
        if sample is None:
            fitting.append(pair)
        elif bad is None:
            raise sample
        else:
            bad.append(sample)
    return fitting


def _undecodable(pairs: Sequence[Pair], config: MoonViTConfig) -> dict[int, str]:
    """This rank's share of all images is decoded: the numbers of those that cannot be, and why."""
    from rich.progress import track

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {}
    numbers = [number for number in range(rank, len(pairs), world) if pairs[number].image is not None]
    for number in track(numbers, "decoding all images once", transient=True, disable=rank != 0):
        try:
            read_patches(pairs[number], config)
        except (ImageError, OSError) as error:
            found[number] = f"{pairs[number].name}: {error}" if isinstance(error, OSError) else str(error)
    return found


def _tell(folder: str, flag: str, bad: Sequence[BadSample]) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(sample.kind for sample in bad).items()))
    print_rank_0(f"> {flag} {folder}: {f'{len(bad)} samples are left out ({kinds})' if bad else 'no bad sample'}")
    for sample in bad[:_SHOWN]:
        print_rank_0(f">   {sample}")
    write({f"k3/{flag.removeprefix('--')}-skipped": len(bad)}, get_args().iteration)


def _digest(pairs: Sequence[Pair]) -> str:
    """Of what the pairs are, but for the folder, which may have another name elsewhere."""
    text = "\n".join(f"{p.shard.name} {p.key} {p.image} {p.text} {p.clip} {p.mark}" for p in pairs)
    return hashlib.sha256(text.encode()).hexdigest()


def _gather(value: object) -> list:
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


@contextmanager
def named_failures() -> Iterator[None]:
    """A sample that cannot be read in the middle of training ends the job with its name."""
    try:
        yield
    except ImageError as error:
        # A worker process of the loader puts its own traceback in front.
        sentence = str(error).rpartition("ImageError: ")[2].strip()
        message = (
            f"{sentence}; repair the sample, or give --vision-skip-bad; where that is given, the sample was good when "
            "training began: see what writes to the folder"
        )
        activation = current()
        if activation is not None and activation.abort_channel is not None:
            activation.abort_channel.publish(message)  # until the first step ends, torchrun need not end the others
        fail(message, at_once=get_args().world_size > 1)
