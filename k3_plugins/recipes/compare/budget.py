"""What every run of a comparison shares, and the flags that follow from it, none of which an arm may set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class TrialError(RuntimeError):
    """A run that could not be started or ended with an argument error: the whole comparison would be the same."""


@dataclass(frozen=True)
class Budget:
    """What every trial of a comparison shares."""

    tokens: int
    seq_length: int
    evaluations: int
    """Points of a curve before the last one; at most half the steps of the shortest run."""
    eval_iters: int
    eval_batch: int
    """Sequences of a validation batch."""
    shared: tuple[str, ...]
    """Flags of both arms that an arm may change: data, tokenizer, schedule, platform."""
    default_batch: int


@dataclass(frozen=True)
class Point:
    """Where a trial stands in its arm's grid."""

    lr: float
    batch: int
    seed: int


def iterations(tokens: int, seq_length: int, batch: int) -> int:
    """Steps in which a batch size spends the budget (rounded down: no trial sees more tokens).

    Raises:
        TrialError: if not one step fits.
    """
    steps = tokens // (batch * seq_length)
    if steps < 1:
        raise TrialError(f"--tokens {tokens} is less than one step of {batch} sequences of {seq_length} tokens")
    return steps


def flags(budget: Budget, point: Point, folder: Path) -> dict[str, str]:
    """Flag -> value, of one trial.

    Every validation takes the next samples of one stream. The last one, which follows the end of training, is over the
    same samples in every trial, since each has the same batches and the same number of validations before it.

    Raises:
        TrialError: see :func:`iterations`.
    """
    steps = iterations(budget.tokens, budget.seq_length, point.batch)
    interval = max(1, steps // budget.evaluations)
    skipped = max(0, steps // interval - budget.evaluations)
    values = {
        "lr": f"{point.lr:.10g}",
        "seq-length": budget.seq_length,
        "max-position-embeddings": budget.seq_length,
        "global-batch-size": point.batch,
        "train-iters": steps,
        "seed": point.seed,
        "eval-interval": interval,
        # one more than a multiple: Megatron provides no samples for a validation at the first step itself
        "start-eval-at-iter": skipped * interval + 1 if skipped else 0,
        "eval-iters": budget.eval_iters,
        "eval-global-batch-size": budget.eval_batch,
        "tensorboard-dir": folder / "tensorboard",
    }
    return {name: str(value) for name, value in values.items()}


RESERVED = frozenset(flags(Budget(1, 1, 1, 1, 1, (), 1), Point(1.0, 1, 1), Path())) | {
    # other ways to say how long and at which batch sizes a run trains
    *("train-samples", "rampup-batch-size", "step-batch-size-schedule", "phase-transition-iterations"),
    *("exit-interval", "exit-duration-in-mins", "iterations-to-skip", "skip-train", "yaml-cfg"),
    # other validation samples, or another name for their loss
    *("full-validation", "multiple-validation-sets"),
    *("save", "load"),
}
"""Flags that the comparison sets itself, the same way for every arm, and those that would overrule them."""
