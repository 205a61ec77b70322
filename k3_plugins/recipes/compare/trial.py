"""One training run at one learning rate and batch size, through the product's own door, and what it reached.

A finished trial leaves ``trial.json`` in its folder; the same command is not run twice.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from k3_plugins.atomic import replacing
from k3_plugins.recipes import process
from k3_plugins.recipes.compare.arm import Arm
from k3_plugins.report.events import ReportError, read_run
from k3_plugins.report.summary import VALIDATION

RESULT, LOG = "trial.json", "log.txt"


class TrialError(RuntimeError):
    """A run that could not be started or ended with an argument error: the whole comparison would be the same."""


@dataclass(frozen=True)
class Budget:
    """What every trial of a comparison shares."""

    tokens: int
    seq_length: int
    evaluations: int
    eval_iters: int
    shared: tuple[str, ...]
    """Flags of both arms: data, tokenizer, sequence length, schedule, platform."""
    default_batch: int


@dataclass(frozen=True)
class Point:
    """Where a trial stands in its arm's grid."""

    lr: float
    batch: int
    seed: int


@dataclass(frozen=True)
class Trial:
    """What a run reached. ``loss`` is the last validation loss in nats per token; infinite if the run diverged."""

    point: Point
    loss: float
    curve: tuple[tuple[int, float], ...]
    """(tokens, validation loss)."""
    iterations: int


def iterations(budget: Budget, batch: int) -> int:
    """Steps in which a batch size spends the budget (rounded down: no trial sees more tokens).

    Raises:
        TrialError: if not one step fits.
    """
    steps = budget.tokens // (batch * budget.seq_length)
    if steps < 1:
        raise TrialError(
            f"--tokens {budget.tokens} is less than one step of {batch} sequences of {budget.seq_length} tokens"
        )
    return steps


def command(arm: Arm, budget: Budget, point: Point, folder: Path) -> list[str]:
    """The words after ``python``."""
    steps = iterations(budget, point.batch)
    own = {"lr": point.lr} | {name: factor * point.lr for name, factor in arm.scale_with_lr.items()}
    words = [*budget.shared, *arm.flags]
    for name, value in own.items():
        words += [f"--{name}", f"{value:.10g}"]
    for name, factor in arm.scale_with_steps.items():
        words += [f"--{name}", str(max(1, round(factor * steps)))]
    words += ["--global-batch-size", str(point.batch), "--train-iters", str(steps), "--seed", str(point.seed)]
    words += ["--eval-interval", str(max(1, steps // budget.evaluations)), "--eval-iters", str(budget.eval_iters)]
    words += ["--tensorboard-dir", str(folder / "tensorboard")]
    return [*process.door(arm.nproc), *words]


def run(arm: Arm, budget: Budget, point: Point, folder: Path) -> Trial:
    """Train, or read what an earlier call trained.

    Raises:
        TrialError: for argument errors (exit code 2) and runs without a validation loss; the log's end is in the text.
    """
    words = command(arm, budget, point, folder)
    done = _finished(folder, words)
    if done is not None:
        return done
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    code = process.run(words, folder / LOG)
    trial = _result(budget, point, folder, code)
    with replacing(folder / RESULT) as temporary:  # half a result must not look like a finished trial
        temporary.write_text(json.dumps({"command": words, **asdict(trial)}, indent=1))
    return trial


def _result(budget: Budget, point: Point, folder: Path, code: int) -> Trial:
    steps = iterations(budget, point.batch)
    if code == 2:
        raise TrialError(f"the run in {folder} was refused (exit code 2):\n{process.tail(folder / LOG)}")
    try:
        series = read_run(folder).scalars.get(VALIDATION)
    except ReportError:
        series = None
    if code != 0 and not _diverged(folder):
        raise TrialError(f"the run in {folder} ended with exit code {code}:\n{process.tail(folder / LOG)}")
    if code != 0 and series is None:
        return Trial(point, float("inf"), (), steps)
    if series is None or not len(series.steps):
        raise TrialError(
            f"the run in {folder} logged no {VALIDATION!r}; give validation data (--data a folder with a validation"
            " split, or flags of your own)"
        )
    tokens = point.batch * budget.seq_length
    curve = tuple(
        (int(step) * tokens, float(value)) for step, value in zip(series.steps, series.values, strict=True)
    )
    finished = code == 0 and math.isfinite(curve[-1][1])
    return Trial(point, curve[-1][1] if finished else float("inf"), curve, steps)


def _finished(folder: Path, words: Sequence[str]) -> Trial | None:
    try:
        saved = json.loads((folder / RESULT).read_text())
    except (OSError, ValueError):
        return None
    if saved.pop("command", None) != list(words):
        return None
    curve = tuple((int(tokens), float(loss)) for tokens, loss in saved["curve"])
    return Trial(Point(**saved["point"]), float(saved["loss"]), curve, saved["iterations"])


def _diverged(folder: Path) -> bool:
    """Whether Megatron ended the run at a loss or a gradient that is not finite."""
    text = (folder / LOG).read_text(errors="replace")
    return re.search(r"(found|result|norm)\W+(nan|inf)", text, re.IGNORECASE) is not None
