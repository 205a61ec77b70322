"""What two searches allow to be said."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from k3_plugins.recipes.compare.arm import Arm
from k3_plugins.recipes.compare.search import Search

NOT_ALIGNED = "hyperparameters not aligned, indicative only"


@dataclass(frozen=True)
class Verdict:
    """``sentence`` is the whole of it."""

    sentence: str
    aligned: bool
    """Both optima lie inside their grids."""
    difference: float
    """Second arm's loss minus the first one's, means over seeds, nats per token."""
    noise: float | None
    """Standard error of the difference over seeds; None with one seed."""
    reasons: tuple[str, ...]
    """Why not aligned."""


def mean_loss(search: Search) -> float:
    """Of the optimum, over seeds; infinite if any of them diverged."""
    return statistics.fmean(trial.loss for trial in search.repeats) if search.repeats else math.inf


def impossible(first: Arm, second: Arm, default_batch: int, extend: int) -> str | None:
    """Why no results could give a verdict; None if some could.

    Args:
        default_batch: batch size of an arm without a grid of them.
        extend: learning rates that may be added to a grid.
    """
    for arm in (first, second):
        rates = arm.grid["lr"]
        if len(rates) + extend < 3:
            return (
                f"{arm.name}: grid.lr {list(rates)} with --extend {extend} has no rate between two others, and an"
                " optimum at an edge allows no verdict: give three or more, or a larger --extend"
            )
    batches = [arm.batches or (default_batch,) for arm in (first, second)]
    if batches[0] != batches[1] and all(len(entry) == 1 for entry in batches):
        return (
            f"{first.name} would be trained at batch size {batches[0][0]}, {second.name} at {batches[1][0]}, tuned for"
            " neither: give both the same, or grids of three or more in global-batch-size"
        )
    return None


def judge(first: Search, second: Search) -> Verdict:
    """Compare two arms at their own optima."""
    reasons = [f"{search.arm.name}: {edge}" for search in (first, second) for edge in search.edges()]
    used = [search.best.point.batch for search in (first, second)]
    if used[0] != used[1] and any(len(search.batches) == 1 for search in (first, second)):
        tuned = [search.arm.name for search in (first, second) if len(search.batches) > 1]
        reasons.append(
            f"the arms were trained at different batch sizes ({used[0]}, {used[1]}), tuned for"
            f" {f'{tuned[0]} alone' if tuned else 'neither of them'}"
        )
    losses = mean_loss(first), mean_loss(second)
    difference = losses[1] - losses[0]
    noise = _standard_error(first, second)
    names = first.arm.name, second.arm.name
    if not all(map(math.isfinite, losses)):
        reasons = reasons or ["a repetition of an optimum diverged"]
        return Verdict(f"{NOT_ALIGNED}: {'; '.join(reasons)}", False, difference, noise, tuple(reasons))
    lower, higher = names if difference > 0 else names[::-1]
    numbers = f"{names[0]} {losses[0]:.4f}, {names[1]} {losses[1]:.4f} nats per token"
    if reasons:
        return Verdict(f"{NOT_ALIGNED} ({numbers}): {'; '.join(reasons)}", False, difference, noise, tuple(reasons))
    if noise is None:
        sentence = f"{lower} is lower than {higher} by {abs(difference):.4f} ({numbers}); one seed: no noise estimate"
    elif abs(difference) <= 2 * noise:
        sentence = f"no difference beyond the noise of seeds: {difference:+.4f} +- {noise:.4f} ({numbers})"
    else:
        sentence = f"{lower} is lower than {higher} by {abs(difference):.4f} +- {noise:.4f} ({numbers})"
    return Verdict(sentence, True, difference, noise, ())


def _standard_error(first: Search, second: Search) -> float | None:
    variances = []
    for search in (first, second):
        losses = [trial.loss for trial in search.repeats]
        if len(losses) < 2 or not all(map(math.isfinite, losses)):
            return None
        variances.append(statistics.variance(losses) / len(losses))
    return math.sqrt(sum(variances))
