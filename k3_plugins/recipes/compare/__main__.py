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
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from k3_plugins.atomic import replacing
from k3_plugins.data import sidecar
from k3_plugins.data.sources import InputError
from k3_plugins.recipes import declaration
from k3_plugins.recipes.compare import report
from k3_plugins.recipes.compare.arm import RESERVED, Arm, ArmError, read
from k3_plugins.recipes.compare.search import Search, search
from k3_plugins.recipes.compare.trial import Budget, Point, Trial, TrialError, run
from k3_plugins.recipes.compare.verdict import judge
from k3_plugins.training.inputs import DATA_ARGUMENTS

RECIPE = "--lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --clip-grad 1.0"
"""Defaults of both arms: K3's schedule. An arm's own flags come later and win."""


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m k3_plugins.recipes.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("arms", nargs=2, type=Path, metavar="ARM.yaml")
    add("--tokens", type=_positive, required=True, help="training tokens of every run")
    add("--output", type=Path, required=True, help="folder for runs and report")
    add("--data", type=Path, help="a folder made by python -m k3_plugins.data.prepare")
    add("--shared", default="", help="more flags of both arms, quoted as one word")
    add("--seq-length", type=_positive, default=256, help="tokens in a sequence (default 256)")
    add("--micro-batch-size", type=_positive, default=4, help="default 4")
    add("--batch", type=_positive, default=16, help="global batch size of an arm without a grid of them (default 16)")
    add("--extend", type=int, default=2, help="learning rates that may be added beyond an edge (default 2)")
    add("--seeds", type=_positive, default=1, help="runs at each optimum (default 1)")
    add("--evaluations", type=_positive, default=10, help="points of a curve (default 10)")
    add("--eval-iters", type=_positive, default=10, help="batches of an evaluation (default 10)")
    return result


def main(argv: list[str] | None = None) -> int:
    """See the module docstring."""
    command = parser()
    options = command.parse_args(argv)
    try:
        first, second = (read(path) for path in options.arms)
        if first.name == second.name:
            raise ArmError(f"both arms are called {first.name!r}: give them different names")
        budget = _budget(options, _shared(options, (first, second)))
        searches = (_search(first, budget, options), _search(second, budget, options))
    except (ArmError, InputError, TrialError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    verdict = judge(*searches)
    contents = json.dumps(report.values(searches, verdict, budget), indent=1) + "\n"
    with replacing(options.output / "report.json") as temporary:
        temporary.write_text(contents)
    report.draw(searches, verdict, options.output / "report.png")
    report.show(searches, verdict)
    print(f"report: {options.output / 'report.json'}, picture: {options.output / 'report.png'}")
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


def _budget(options: argparse.Namespace, words: Sequence[str]) -> Budget:
    shared = shlex.split(RECIPE)
    if options.data is not None:
        shared += sidecar.read(options.data).megatron_flags(str(options.data))
    length = str(options.seq_length)
    shared += ["--seq-length", length, "--max-position-embeddings", length]
    shared += ["--micro-batch-size", str(options.micro_batch_size), "--log-interval", "10"]
    shared += words
    return Budget(
        tokens=options.tokens,
        seq_length=options.seq_length,
        evaluations=options.evaluations,
        eval_iters=options.eval_iters,
        shared=tuple(shared),
        default_batch=options.batch,
    )


def _search(arm: Arm, budget: Budget, options: argparse.Namespace) -> Search:
    def train(point: Point) -> Trial:
        name = f"lr{point.lr:g}-batch{point.batch}-seed{point.seed}"
        print(f"{arm.name}: learning rate {point.lr:g}, batch size {point.batch}, seed {point.seed} ...", flush=True)
        trial = run(arm, budget, point, options.output / arm.name / name)
        print(f"{arm.name}:   validation loss {trial.loss:.4f}", flush=True)
        return trial

    return search(arm, train, budget.default_batch, max(0, options.extend), range(1, options.seeds + 1))


if __name__ == "__main__":
    raise SystemExit(main())
