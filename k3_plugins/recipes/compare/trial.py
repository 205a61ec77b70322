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
from k3_plugins.recipes.compare.budget import Budget, Point, TrialError, flags, iterations
from k3_plugins.report.events import ReportError, read_run
from k3_plugins.report.summary import VALIDATION

RESULT, LOG = "trial.json", "log.txt"


@dataclass(frozen=True)
class Trial:
    """What a run reached. ``loss`` is the last validation loss in nats per token; infinite if the run diverged."""

    point: Point
    loss: float
    curve: tuple[tuple[int, float], ...]
    """(tokens, validation loss)."""
    iterations: int


def command(arm: Arm, budget: Budget, point: Point, folder: Path) -> list[str]:
    """The words after ``python``."""
    own = flags(budget, point, folder)
    steps = int(own["train-iters"])
    scaled = {name: f"{factor * point.lr:.10g}" for name, factor in arm.scale_with_lr.items()}
    scaled |= {name: str(max(1, round(factor * steps))) for name, factor in arm.scale_with_steps.items()}
    words = [*process.door(arm.nproc), *budget.shared, *arm.flags]
    for name, value in (scaled | own).items():
        words += [f"--{name}", value]
    return words


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
    steps = iterations(budget.tokens, budget.seq_length, point.batch)
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
    curve = tuple((int(step) * tokens, float(value)) for step, value in zip(series.steps, series.values, strict=True))
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


_NOT_FINITE = re.compile(r"Unexpected result .*\(message='found (NaN|Inf) in ")
"""Megatron's words for a loss or a gradient that its checks refuse. A norm that is only logged ends no run."""


def _diverged(folder: Path) -> bool:
    """Whether Megatron ended the run at a loss or a gradient that is not finite."""
    return _NOT_FINITE.search((folder / LOG).read_text(errors="replace")) is not None
