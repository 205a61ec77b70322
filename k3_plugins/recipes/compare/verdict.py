"""What two searches allow to be said."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

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


def judge(first: Search, second: Search) -> Verdict:
    """Compare two arms at their own optima."""
    reasons = [f"{search.arm.name}: {edge}" for search in (first, second) for edge in search.edges()]
    batches = {tuple(search.batches) for search in (first, second)}
    if all(len(entry) == 1 for entry in batches) and len(batches) == 2:
        reasons.append("the arms were trained at different batch sizes, neither of them tuned")
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
