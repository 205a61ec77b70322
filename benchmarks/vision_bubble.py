"""Encoder work inside stage 0 against encoder work in pipeline bubbles: simulated, and executed on this machine.

    python benchmarks/vision_bubble.py [--json FILE] [--random 1000] [--execute] [--steps 12]

--execute trains on the CPU, in one run with the encoder inside stage 0's forward and in bubbles in turn: PP 2 VPP 2
with real work and one core for each process (more processes than cores leave no idle time to fill), and PP 4 VPP 2 with
EMULATED durations, in which processes sleep instead of computing.

Nothing of the table is executed: the planner and its simulator compute makespans for a text forward of 1 and backward
of 2 per chunk, encoder forward of 1 and backward of 2 per micro-batch. The column "planned in" is real: the time of one
plan on one core, after a first one that compiles. --random adds random layouts and times (see random_problem) and
prints every plan that is more than 5 % above the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from k3_plugins.pipeline_parallel.vision_bubble.planner import plan
from k3_plugins.pipeline_parallel.vision_bubble.plot import summary
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem
from k3_plugins.pipeline_parallel.vision_bubble.simulate import coupled

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SETTINGS = ((4, 1, 8), (4, 2, 8), (8, 2, 32), (16, 4, 64), (16, 4, 128))
CLOSE = 1.05


def random_problem(rng: np.random.Generator) -> BubbleProblem:
    """p of 2 to 8, v of 1 to 4, up to 8 p micro-batches; encoder work from 5 % to 4 times a chunk's, equal, uneven, or
    heavy-tailed with a quarter of the micro-batches without images; one encoder in ten is frozen."""
    p, v = int(rng.choice([2, 3, 4, 6, 8])), int(rng.integers(1, 5))
    m = p * int(rng.integers(1, 9)) if v > 1 else int(rng.integers(1, 8 * p + 1))
    forward = float(rng.uniform(0.5, 2.0))
    level = forward * float(np.exp(rng.uniform(np.log(0.05), np.log(4.0))))
    shapes = (
        np.ones(m),
        rng.uniform(0.5, 1.5, m),
        rng.lognormal(0.0, 1.0, m) * (rng.random(m) > 0.25),
    )
    encoder = level * shapes[rng.integers(3)]
    return BubbleProblem(
        p,
        v,
        m,
        forward,
        forward * float(rng.uniform(1.5, 2.5)),
        encoder,
        encoder * (float(rng.uniform(1.5, 2.5)) if rng.random() > 0.1 else 0.0),
        pieces=int(rng.choice([1, 3, 9, 27])),
        communication=str(rng.choice(["overlap", "blocking"])),
    )


def table() -> list[dict[str, object]]:
    """One row per setting; printed as it is computed."""
    print("SIMULATED, text forward 1 and backward 2 per chunk, encoder forward 1 and backward 2 per micro-batch")
    print(f"{'p':>3}{'v':>3}{'m':>5} {'text work':>10} {'text':>7} {'bubble':>8} {'in stage 0':>11} {'planned':>8} "
          f"{'bound':>7} {'/ bound':>8} {'hidden':>7} {'planned in':>11}")  # fmt: skip
    plan(BubbleProblem(2, 1, 2))
    rows = []
    for p, v, m in SETTINGS:
        problem = BubbleProblem(p, v, m)
        start = time.thread_time()
        planned = plan(problem)
        seconds = time.thread_time() - start
        work = float(problem.text_work[0])
        row = {
            **summary(planned),
            "text_work": work,
            "bubble": planned.bounds.text - work,
            "in_stage_0": coupled(problem),
            "plan_seconds": seconds,
        }
        rows.append(row)
        print(f"{p:>3}{v:>3}{m:>5} {work:>10g} {row['text']:>7g} {100 * row['bubble'] / work:>7.2f}% "
              f"{row['in_stage_0']:>11g} {row['makespan']:>8.6g} {row['bound']:>7g} {row['makespan_over_bound']:>8.4f} "
              f"{100 * row['hidden']:>6.1f}% {seconds:>10.2f}s", flush=True)  # fmt: skip
    return rows


def random_plans(count: int, seed: int = 0) -> dict[str, object]:
    """Plans ``count`` random steps; prints the misses."""
    rng = np.random.default_rng(seed)
    ratios, strict, misses = [], [], []
    for i in range(count):
        problem = random_problem(rng)
        planned = plan(problem)
        ratios.append(planned.makespan / planned.bounds.rule)
        strict.append(planned.makespan / planned.bounds.strict)
        if ratios[-1] > CLOSE:
            misses.append({"number": i, **summary(planned)})
            print(f"  miss: number {i}, p={problem.pipeline_size} v={problem.chunks} m={problem.microbatches} "
                  f"{problem.communication}, {problem.pieces} pieces: {ratios[-1]:.4f} x bound")  # fmt: skip
    result = {
        "count": count,
        "within_5_percent": float(np.mean(np.array(ratios) <= CLOSE)),
        "within_5_percent_of_strict_bound": float(np.mean(np.array(strict) <= CLOSE)),
        "largest_over_bound": max(ratios),
        "misses": misses,
    }
    print(f"{count} random steps: {100 * result['within_5_percent']:.1f} % within 5 % of the bound, "
          f"{100 * result['within_5_percent_of_strict_bound']:.1f} % within 5 % of the strict bound, largest "
          f"{result['largest_over_bound']:.4f} x bound")  # fmt: skip
    return result


def execute(steps: int) -> list[dict[str, object]]:
    """Train both ways and print what a step took."""
    from benchmarks.vision_bubble_steps import run

    rows = []
    for kind in ("real", "emulated"):
        row = run(kind, steps)
        rows.append(row)
        label = "real work, one core per process" if kind == "real" else "EMULATED durations (sleep)"
        hidden = ", ".join(f"{100 * share:.0f} %" for share in row["hidden_by_rank"])
        print(f"executed, {label}: p={row['p']} v={row['v']} m={row['m']}, medians of {row['steps']} steps each")
        print(f"  encoder in stage 0 {row['in_stage_0_seconds']:.3f} s, in bubbles {row['scheduled_seconds']:.3f} s:"
              f" {row['ratio']:.2f} times as fast; hidden by rank {hidden}", flush=True)  # fmt: skip
    return rows


def main() -> int:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="plan N random steps too")
    parser.add_argument("--execute", action="store_true", help="train on the CPU as well, with 2 and 4 processes")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="timed steps of each way")
    args = parser.parse_args()
    report: dict[str, object] = {"simulated": True, "table": table()}
    if args.execute:
        report["executed"] = execute(args.steps)
    if args.random:
        report["random"] = random_plans(args.random)
    if args.json:
        temporary = args.json.with_name(f".{args.json.name}.tmp-{os.getpid()}")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(temporary, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
