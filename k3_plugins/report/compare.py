"""Says whether two runs computed the same numbers: ``python -m k3_plugins.report.compare A B``.

TensorBoard keeps float32 values as Megatron wrote them, so equal bits here mean equal losses and gradient norms to the
last digit that was logged. Used to show that a resumed run continues exactly where the uninterrupted one went.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3_plugins.report.events import ReportError, Run, read_run

# Scalars that measure time or memory differ between two runs of the same computation; these do not, nor the
# validation losses.
COMPUTED = ("lm loss", "grad-norm", "learning-rate", "params-norm", "loss-scale")


@dataclass(frozen=True)
class Comparison:
    """Per tag: iterations that both runs logged, and the first one whose bits differ (None if there is none)."""

    tag: str
    iterations: int
    first: int
    last: int
    differs_at: int | None
    values: tuple[float, float] | None


def compare_runs(a: Run, b: Run) -> list[Comparison]:
    """Compares every computed scalar at every iteration that both runs logged.

    Raises:
        ReportError: the runs share no iteration of the training loss: there is nothing to compare.
    """
    comparisons = []
    for tag in sorted(a.scalars.keys() & b.scalars.keys()):
        if tag not in COMPUTED and not tag.startswith("lm loss validation"):
            continue
        left, right = a.scalars[tag], b.scalars[tag]
        steps, i, j = np.intersect1d(left.steps, right.steps, return_indices=True)
        if not len(steps):
            continue
        unequal = np.flatnonzero(left.values[i].view(np.uint32) != right.values[j].view(np.uint32))
        differs_at = values = None
        if len(unequal):
            k = unequal[0]
            differs_at, values = int(steps[k]), (float(left.values[i][k]), float(right.values[j][k]))
        comparisons.append(Comparison(tag, len(steps), int(steps[0]), int(steps[-1]), differs_at, values))
    if not any(comparison.tag == "lm loss" for comparison in comparisons):
        raise ReportError("the two runs have no iteration with a training loss in common: nothing can be compared")
    return comparisons


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m k3_plugins.report.compare",
        description="Compares two runs bit for bit where they logged the same iterations. "
        "Exit code 0: equal, 1: different, 2: nothing to compare.",
    )
    parser.add_argument("a", help="a run's folder (see python -m k3_plugins.report --help)")
    parser.add_argument("b", help="another one")
    args = parser.parse_args(argv)
    try:
        comparisons = compare_runs(read_run(args.a), read_run(args.b))
    except ReportError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    for found in comparisons:
        where = f"{found.tag}: {found.iterations} iterations in common ({found.first} to {found.last})"
        if found.values is None:
            print(f"{where}, equal bit for bit")
        else:
            print(
                f"{where}, DIFFERENT from iteration {found.differs_at} on: {found.values[0]!r} and {found.values[1]!r}"
            )
    return int(any(found.differs_at is not None for found in comparisons))


if __name__ == "__main__":
    sys.exit(main())
