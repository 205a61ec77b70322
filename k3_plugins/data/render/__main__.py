"""Makes pairs of SVG code and its rendering, with captions, as webdataset tar shards.

    python -m k3_plugins.data.render --output DIR --count 1000 --energon-split 0.9,0.1,0

Captions name every object's box in absolute pixels and in [0, 1] of the image's size. The same seed and settings give
the same bytes, on any number of workers. Needs resvg-py (the extra `vision`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from k3_plugins.compat.optional import require
from k3_plugins.data.render.kinds import KINDS, MOST
from k3_plugins.data.render.shards import Settings, split_for_energon, write_shards
from k3_plugins.feature import FeatureError

LARGEST = 3584


class RenderError(ValueError):
    """A flag that cannot be used; the message says what to do."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_plugins.data.render",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to make; it must not hold anything")
    parser.add_argument("--count", type=int, required=True, help="number of pairs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of drawings, taken in turn (default: all)")
    parser.add_argument("--min-edge", type=int, default=56, help="shortest edge in pixels")
    parser.add_argument("--max-edge", type=int, default=LARGEST, help=f"longest edge in pixels, at most {LARGEST}")
    parser.add_argument("--max-objects", type=int, default=MOST, help=f"most objects in a drawing, 1 to {MOST}")
    parser.add_argument(
        "--captions",
        choices=("full", "short"),
        default="full",
        help="sentences, or the same facts and coordinates with as few words as possible (default: full)",
    )
    parser.add_argument("--per-shard", type=int, default=500, help="pairs in a shard")
    parser.add_argument("--workers", type=int, default=1, help="processes; the result does not depend on it")
    parser.add_argument(
        "--energon-split",
        metavar="TRAIN,VAL,TEST",
        help="shares of the shards; writes Megatron-Energon's index and split too (needs megatron-energon)",
    )
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> tuple[Settings, tuple[float, ...] | None]:
    """The settings, or a sentence about the flag that is wrong.

    Raises:
        RenderError: naming the flag, its value and what to do.
    """
    for flag, value in (("--count", args.count), ("--per-shard", args.per_shard), ("--workers", args.workers)):
        if value < 1:
            raise RenderError(f"{flag} {value} must be at least 1")
    if args.seed < 0:
        raise RenderError(f"--seed {args.seed} must be at least 0")
    if not 16 <= args.min_edge <= args.max_edge <= LARGEST:
        raise RenderError(
            f"--min-edge {args.min_edge} --max-edge {args.max_edge}: edges must be from 16 to {LARGEST} pixels, the"
            " shortest not above the longest"
        )
    if not 1 <= args.max_objects <= MOST:
        raise RenderError(f"--max-objects {args.max_objects} must be from 1 to {MOST}")
    kinds = tuple(args.kinds.split(","))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise RenderError(f"--kinds: there is no kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        raise RenderError(f"--output {args.output} exists already: name another folder, or remove it")
    ratios = None
    if args.energon_split is not None:
        try:
            ratios = tuple(float(word) for word in args.energon_split.split(","))
        except ValueError:
            ratios = ()
        if len(ratios) != 3 or min(ratios) < 0 or not 0 < sum(ratios) < float("inf"):
            raise RenderError(f"--energon-split {args.energon_split}: three shares are needed, such as 0.9,0.1,0")
    limits = args.min_edge, args.max_edge, args.per_shard, args.max_objects
    return Settings(args.count, args.seed, kinds, *limits, args.captions), ratios


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, render, pack; 2 after a sentence if something is wrong."""
    args = parse(argv)
    stage = args.output.with_name(f".{args.output.name}.tmp-{os.getpid()}")
    try:
        settings, ratios = check(args)
        require("resvg_py", "rendering SVG")
        if ratios is not None:
            require("megatron.energon", "--energon-split")
        stage.parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir()
        _write(settings, stage, args.workers)
        if ratios is not None:
            split_for_energon(stage, ratios)
        if args.output.is_dir():
            args.output.rmdir()
        os.replace(stage, args.output)
    except (RenderError, FeatureError) as error:
        print(f"render: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"render: error: --output {args.output}: {error.strerror or error}", file=sys.stderr)
        return 2
    finally:
        if stage.is_dir():
            shutil.rmtree(stage)
    print(f"render: {settings.count} pairs in {settings.shards} shards in {args.output}")
    if ratios is None:
        print(
            "render: Megatron-Energon also needs an index and a split: --energon-split here, or energon prepare"
            f" --skip-dataset-yaml --non-interactive --split-ratio 90,10,0 {args.output}"
        )
    return 0


def _write(settings: Settings, stage: Path, workers: int) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("render"), BarColumn(), MofNCompleteColumn(), TextColumn("pairs"), TimeRemainingColumn())
    with Progress(*columns, transient=False) as progress:
        bar = progress.add_task("render", total=settings.count)
        for done in write_shards(settings, stage, workers):
            progress.advance(bar, done)


if __name__ == "__main__":
    sys.exit(main())
