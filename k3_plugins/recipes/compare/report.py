"""The comparison as JSON, as a table and as a picture with curves and sweeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from k3_plugins.atomic import replacing
from k3_plugins.recipes.compare.budget import Budget
from k3_plugins.recipes.compare.search import Search
from k3_plugins.recipes.compare.verdict import Verdict, mean_loss

COLOURS = ("#2a6fbb", "#d9622b")


def values(searches: tuple[Search, Search], verdict: Verdict, budget: Budget) -> dict[str, Any]:
    """Everything, as JSON values; a loss of a run that diverged is null."""
    return {
        "verdict": verdict.sentence,
        "aligned": verdict.aligned,
        "difference": _finite(verdict.difference),
        "standard_error": verdict.noise,
        "reasons": list(verdict.reasons),
        "tokens": budget.tokens,
        "shared_flags": list(budget.shared),
        "arms": [
            {
                "name": search.arm.name,
                "flags": list(search.arm.flags),
                "best": vars(search.best.point),
                "loss": _finite(mean_loss(search)),
                "losses_by_seed": {str(trial.point.seed): _finite(trial.loss) for trial in search.repeats},
                "trials": [
                    {**vars(trial.point), "loss": _finite(trial.loss), "curve": [list(point) for point in trial.curve]}
                    for trial in search.trials.values()
                ],
            }
            for search in searches
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(searches: tuple[Search, Search], verdict: Verdict) -> None:
    """Print the sweeps and the verdict."""
    from rich.console import Console
    from rich.table import Table

    from k3_plugins.activation_report import output_width

    console = Console(width=output_width(), highlight=False)
    table = Table(title="Validation loss at the end, nats per token", title_justify="left")
    for column in ("arm", "batch size", "learning rate", "steps", "loss"):
        table.add_column(column, justify="left" if column == "arm" else "right", overflow="fold")
    for search in searches:
        for point in sorted(search.trials, key=lambda p: (p.batch, p.lr)):
            trial = search.trials[point]
            mark = "  <- best" if trial is search.best else ""
            loss = f"{trial.loss:.4f}" if math.isfinite(trial.loss) else "diverged"
            table.add_row(search.arm.name, str(point.batch), f"{point.lr:g}", str(trial.iterations), loss + mark)
    console.print(table)
    for search in searches:
        losses = ", ".join(f"{trial.loss:.4f}" for trial in search.repeats)
        if len(search.repeats) > 1:
            console.print(f"{search.arm.name}: seeds {losses}", soft_wrap=True)
    console.print(f"[bold]{verdict.sentence}[/bold]", soft_wrap=True)


def draw(searches: tuple[Search, Search], verdict: Verdict, path: Path) -> None:
    """Write the PNG, atomically: the optima's curves on the left, the sweeps on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for search, colour in zip(searches, COLOURS, strict=True):
        # a repetition may have diverged before it was evaluated
        for index, trial in enumerate(trial for trial in search.repeats if trial.curve):
            tokens, losses = zip(*trial.curve, strict=True)
            label = f"{search.arm.name} (lr {trial.point.lr:g}, batch {trial.point.batch})" if index == 0 else None
            left.plot(tokens, losses, color=colour, marker="o", markersize=3, linewidth=1.3, label=label)
        for batch, style in zip(search.batches, ("-", "--", ":", "-.", (0, (1, 3))), strict=False):
            points = [
                (point.lr, trial.loss)
                for point, trial in sorted(search.trials.items(), key=lambda item: item[0].lr)
                if point.batch == batch and math.isfinite(trial.loss)
            ]
            if points:
                label = f"{search.arm.name}, batch {batch}"
                rates, losses = zip(*points, strict=True)
                right.plot(rates, losses, color=colour, linestyle=style, marker="o", markersize=4, label=label)
    left.set_xlabel("tokens")
    left.set_ylabel("validation loss, nats per token")
    right.set_xscale("log")
    right.set_xlabel("learning rate")
    right.set_ylabel("validation loss at the end")
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:  # none where every run diverged
            axes.legend(frameon=False, fontsize=8)
    figure.suptitle(verdict.sentence, fontsize=9, wrap=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
