"""Draws a planned step: a picture (PNG) and a trace for chrome://tracing or Perfetto (JSON).

    python -m k3_plugins.pipeline_parallel.vision_bubble.plot --pipeline-size 4 --chunks 2 --microbatches 8

writes vision_bubble.png and vision_bubble.json (--output names others). Times are numbers in one unit;
--encoder-forward and --encoder-backward also take a comma-separated list, one time per micro-batch (0: no images).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from k3_plugins.atomic import replacing
from k3_plugins.pipeline_parallel.vision_bubble.plan import Plan, Task, TaskKind
from k3_plugins.pipeline_parallel.vision_bubble.planner import plan
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem, PlanError

INK, BUBBLE = "#1f2430", "#eceef2"
COLOURS = {
    TaskKind.TEXT_FORWARD: "#7fb2e5",
    TaskKind.TEXT_BACKWARD: "#2a6fbb",
    TaskKind.ENCODER_FORWARD: "#f2a65a",
    TaskKind.ENCODER_BACKWARD: "#c8553d",
}
# Names from Chrome's fixed palette.
TRACE_COLOURS = {
    TaskKind.TEXT_FORWARD: "thread_state_runnable",
    TaskKind.TEXT_BACKWARD: "rail_response",
    TaskKind.ENCODER_FORWARD: "thread_state_iowait",
    TaskKind.ENCODER_BACKWARD: "terrible",
}
# Boxes narrower than this share of the picture have no room for a number.
LABEL_WIDTH = 1 / 90


def chrome_trace(plan: Plan, microseconds: float = 1000.0) -> dict[str, object]:
    """The plan in the trace event format; one thread per rank.

    Args:
        microseconds: how long one unit of the plan's time is.
    """
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(plan.ranks))
    ]
    for task in plan.tasks:
        part = "chunk" if task.kind.is_text else "piece"
        events.append(
            {
                "name": _name(task),
                "cat": str(task.kind),
                "ph": "X",
                "pid": 0,
                "tid": task.rank,
                "ts": task.start * microseconds,
                "dur": (task.end - task.start) * microseconds,
                "cname": TRACE_COLOURS[task.kind],
                "args": {"micro-batch": task.microbatch, part: task.part},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": summary(plan)}


def summary(plan: Plan) -> dict[str, object]:
    """The numbers of a plan (JSON types)."""
    return {
        "pipeline_size": plan.problem.pipeline_size,
        "chunks": plan.problem.chunks,
        "microbatches": plan.problem.microbatches,
        "text": plan.bounds.text,
        "makespan": plan.makespan,
        "bound": plan.bounds.rule,
        "makespan_over_bound": plan.makespan / plan.bounds.rule,
        "strict_bound": plan.bounds.strict,
        "hidden": plan.hidden,
        "peak_activations": max(plan.peak_activations),
    }


def _name(task: Task) -> str:
    letter = {"text forward": "F", "text backward": "B", "encoder forward": "EF", "encoder backward": "EB"}[task.kind]
    return f"{letter}{task.microbatch}" + (f".{task.part}" if task.kind is not TaskKind.ENCODER_FORWARD else "")


def draw(plan: Plan, path: Path) -> None:
    """Draw the picture into ``path`` (PNG): one row per rank, bubbles in grey; later chunks are paler."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows, end = len(plan.ranks), plan.makespan
    figure = Figure(figsize=(14, 1.6 + 0.45 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # White lines between boxes would cover boxes that are as narrow as they.
    line = 0.3 if max(map(len, plan.ranks)) < 150 else 0.0
    for rank, tasks in enumerate(plan.ranks):
        axes.broken_barh([(0, end)], (rank - 0.42, 0.84), facecolors=BUBBLE)
        for kind, colour in COLOURS.items():
            for part in range(plan.problem.chunks if kind.is_text else 1):
                spans = [
                    (task.start, task.end - task.start)
                    for task in tasks
                    if task.kind is kind and (task.part == part or not kind.is_text)
                ]
                alpha = 1.0 - 0.5 * part / plan.problem.chunks
                axes.broken_barh(
                    spans, (rank - 0.42, 0.84), facecolors=colour, alpha=alpha, edgecolors="white", linewidth=line
                )
        for task in tasks:
            if task.end - task.start > end * LABEL_WIDTH:
                middle = (task.start + task.end) / 2
                axes.text(middle, rank, str(task.microbatch), ha="center", va="center", fontsize=6, color="white")
    axes.set_yticks(range(rows), [f"rank {rank}" for rank in range(rows)])
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel("time", color=INK)
    facts = summary(plan)
    axes.set_title(
        f"p={rows} v={plan.problem.chunks} m={plan.problem.microbatches}: step {end:.4g}, text alone"
        f" {facts['text']:.4g}, bound {facts['bound']:.4g}, {100 * plan.hidden:.0f} % of the encoder hidden",
        loc="left",
        color=INK,
        fontsize=10,
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [Patch(color=colour, label=str(kind)) for kind, colour in COLOURS.items()]
    handles.append(Patch(color=BUBBLE, label="bubble"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, format="png")


def write(plan: Plan, output: Path) -> tuple[Path, Path]:
    """Write ``output``.png and ``output``.json, each in one step; returns both paths."""
    picture, trace = output.with_name(output.name + ".png"), output.with_name(output.name + ".json")
    output.parent.mkdir(parents=True, exist_ok=True)
    for path, fill in (
        (picture, lambda temporary: draw(plan, temporary)),
        (trace, lambda temporary: temporary.write_text(json.dumps(chrome_trace(plan)))),
    ):
        with replacing(path) as temporary:
            fill(temporary)
    return picture, trace


def _time_or_times(text: str) -> float | list[float]:
    times = [float(word) for word in text.split(",")]
    return times[0] if len(times) == 1 else times


def problem_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe a problem."""
    parser.add_argument("--pipeline-size", type=int, default=4, help="p, pipeline ranks")
    parser.add_argument("--chunks", type=int, default=2, help="v, model chunks per rank; 1 is plain 1F1B")
    parser.add_argument("--microbatches", type=int, default=8, help="m")
    parser.add_argument("--forward", type=float, default=1.0, help="time of one chunk's forward")
    parser.add_argument("--backward", type=float, default=2.0, help="time of one chunk's backward")
    parser.add_argument("--encoder-forward", type=_time_or_times, default=1.0, help="a time, or m times")
    parser.add_argument("--encoder-backward", type=_time_or_times, default=2.0, help="a time, or m times; 0: frozen")
    parser.add_argument("--pieces", type=int, default=9, help="parts of one encoder backward")
    parser.add_argument("--communication", choices=("overlap", "blocking"), default="overlap")


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, draw, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    problem_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("vision_bubble"), help="path without suffix")
    args = parser.parse_args(argv)
    output = args.output
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    try:
        planned = plan(BubbleProblem(**settings))
        picture, trace = write(planned, output)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --output {output}: {error.strerror or error}", file=sys.stderr)
        return 2
    for name, value in summary(planned).items():
        print(f"{name:>20}  {value:.6g}")
    print(f"{'picture':>20}  {picture}\n{'trace':>20}  {trace}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
