"""Compare two ways to train, each at its own best learning rate and batch size, under one token budget.

    python -m k3_plugins.recipes.compare A.yaml B.yaml --tokens 2000000 --data DATA --output runs/compare

Each file describes an arm (name, flags, grid; see k3_plugins/recipes/compare/arm.py). Every point of both grids is a
real run; with --extend, learning rates beyond an edge are added where the best one lies there. A verdict is given only
if both optima lie inside what was tried; otherwise the numbers are "hyperparameters not aligned, indicative only".
Finished runs are kept in --output and not repeated. Exit code 0 with a verdict, 1 without, 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from k3_plugins.atomic import replacing
from k3_plugins.command_line import positive, whole_from
from k3_plugins.data import sidecar
from k3_plugins.data.sources import InputError
from k3_plugins.recipes import declaration
from k3_plugins.recipes.compare import report
from k3_plugins.recipes.compare.arm import Arm, ArmError, read
from k3_plugins.recipes.compare.budget import RESERVED, Budget, Point, TrialError, iterations
from k3_plugins.recipes.compare.search import Search, search
from k3_plugins.recipes.compare.trial import Trial, run
from k3_plugins.recipes.compare.verdict import Verdict, impossible, judge
from k3_plugins.training.inputs import DATA_ARGUMENTS

RECIPE = "--lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --clip-grad 1.0"
"""Defaults of both arms: K3's schedule. An arm's own flags come later and win."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m k3_plugins.recipes.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("arms", nargs=2, type=Path, metavar="ARM.yaml")
    add("--tokens", type=positive, required=True, help="training tokens of every run")
    add("--output", type=Path, required=True, help="folder for runs and report")
    add("--data", type=Path, help="a folder made by python -m k3_plugins.data.prepare")
    add("--shared", default="", help="more flags of both arms, quoted as one word")
    add("--seq-length", type=positive, default=256, help="tokens in a sequence (default 256)")
    add("--micro-batch-size", type=positive, default=4, help="default 4")
    add("--batch", type=positive, default=16, help="global batch size of an arm without a grid of them (default 16)")
    add("--extend", type=whole_from(0), default=2, help="learning rates that may be added beyond an edge (default 2)")
    add("--seeds", type=positive, default=1, help="runs at each optimum (default 1)")
    add("--evaluations", type=positive, default=10, help="points of a curve (default 10)")
    add("--eval-iters", type=positive, default=10, help="batches of an evaluation (default 10)")
    return result


def main(argv: list[str] | None = None) -> int:
    """See the module docstring."""
    command = parser()
    options = command.parse_args(argv)
    try:
        first, second = (read(path) for path in options.arms)
        if first.name == second.name:
            raise ArmError(f"both arms are called {first.name!r}: give them different names")
        if (why := impossible(first, second, options.batch, options.extend)) is not None:
            raise ArmError(why)
        budget = _budget(options, _shared(options, (first, second)), (first, second))
        searches = (_search(first, budget, options), _search(second, budget, options))
    except (ArmError, InputError, TrialError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    verdict = judge(*searches)
    contents = json.dumps(report.values(searches, verdict, budget), indent=1) + "\n"
    with replacing(options.output / "report.json") as temporary:
        temporary.write_text(contents)
    report.show(searches, verdict)
    print(f"report: {options.output / 'report.json'}, {_picture(searches, verdict, options.output / 'report.png')}")
    return 0 if verdict.aligned else 1


def _shared(options: argparse.Namespace, arms: Sequence[Arm]) -> list[str]:
    """The words of ``--shared``.

    Raises:
        ArmError: if they cannot be read, or set what the comparison sets, or nobody names data.
    """
    try:
        words = shlex.split(options.shared)
        declaration.refuse_reserved(words, RESERVED, "is set by the comparison, the same way for both arms")
    except ValueError as error:
        raise ArmError(f"--shared {options.shared!r}: {error}") from error
    naming = {f"--{name.replace('_', '-')}" for name in (*DATA_ARGUMENTS, "mock_data")}
    for arm in arms if options.data is None else ():
        if not naming & {word.partition("=")[0] for word in (*words, *arm.flags)}:
            raise ArmError(
                "no data is named: give --data DIR (python -m k3_plugins.data.prepare makes it), or data flags in "
                "--shared"
            )
    return words


def _budget(options: argparse.Namespace, words: Sequence[str], arms: Sequence[Arm]) -> Budget:
    """What both arms share.

    Raises:
        InputError: for a folder that is no prepared data set.
        TrialError: if the tokens are less than one step of some batch size.
    """
    shared = shlex.split(RECIPE)
    if options.data is not None:
        shared += sidecar.read(options.data).megatron_flags(str(options.data))
    micro = str(options.micro_batch_size)
    shared += ["--micro-batch-size", micro, "--eval-micro-batch-size", micro, "--log-interval", "10"]
    shared += words
    batches = [batch for arm in arms for batch in arm.batches or (options.batch,)]
    fewest = min(iterations(options.tokens, options.seq_length, batch) for batch in batches)
    # divisible by whole micro-batches of every number of data-parallel ranks that either arm may have
    unit = options.micro_batch_size * math.lcm(*(arm.nproc for arm in arms))
    return Budget(
        tokens=options.tokens,
        seq_length=options.seq_length,
        evaluations=min(options.evaluations, max(1, fewest // 2)),
        eval_iters=options.eval_iters,
        eval_batch=math.ceil(options.batch / unit) * unit,
        shared=tuple(shared),
        default_batch=options.batch,
    )


def _picture(searches: tuple[Search, Search], verdict: Verdict, path: Path) -> str:
    """Draw it; what became of it, in words."""
    try:
        report.draw(searches, verdict, path)
    except Exception as error:  # missing, broken or too old: the runs and the verdict are worth more than the picture
        path.unlink(missing_ok=True)  # an earlier call's
        return f"no picture, matplotlib failed: {type(error).__name__}: {error}"
    return f"picture: {path}"


def _search(arm: Arm, budget: Budget, options: argparse.Namespace) -> Search:
    def train(point: Point) -> Trial:
        name = f"lr{point.lr:g}-batch{point.batch}-seed{point.seed}"
        print(f"{arm.name}: learning rate {point.lr:g}, batch size {point.batch}, seed {point.seed} ...", flush=True)
        trial = run(arm, budget, point, options.output / arm.name / name)
        print(f"{arm.name}:   validation loss {trial.loss:.4f}", flush=True)
        return trial

    return search(arm, train, budget.default_batch, options.extend, range(1, options.seeds + 1))


if __name__ == "__main__":
    raise SystemExit(main())
