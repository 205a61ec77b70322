"""How good and how fast the MoonEP planner is, on six load shapes.

    python benchmarks/moonep_planner.py [--seeds 5] [--repeats 20] [--ilp-seconds 20] [--json]

For each size and shape: the largest and the total number of redundant experts of our plan, of the plain alias method,
and of the exact optimum where an integer program solves it in time; then the CPU time of one plan on one core. The
first plan, which compiles, is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from k3_plugins.transformer.moe.moonep.loads import SHAPES
from k3_plugins.transformer.moe.moonep.planner import plan
from k3_plugins.transformer.moe.moonep.planner_reference import alias_plan, redundancy, solve_exactly

# (experts, ranks, pairs per rank); K3 routes 8192 tokens to 16 experts each.
SIZES = ((8, 2, 4096), (16, 4, 4096), (64, 8, 4096), (896, 64, 8192 * 16))
LARGEST_FOR_ILP = 512  # cells E * R


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="instances per size and shape")
    parser.add_argument("--repeats", type=int, default=20, help="timed plans per instance")
    parser.add_argument("--ilp-seconds", type=float, default=20.0, help="time limit of one integer program")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    for name in ("seeds", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if not args.json:
        print("max / total redundant experts, summed over instances (ILP '>=': lower bound, the time limit came first)")
        heads = f"{'ours':>12} {'alias':>12} {'ILP':>14}   {'ms per plan (median, min)':>24}"
        print(f"{'E':>4} {'R':>3}  {'load':<12} {heads}")
    rows = []
    for size in SIZES:
        for name in SHAPES:
            rows.append(measure(size, name, args))
            if not args.json:
                print(_line(rows[-1]), flush=True)
    if args.json:
        print(json.dumps({"options": vars(args), "rows": rows}, indent=2))


def measure(size: tuple[int, int, int], name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: sums of [largest, total] redundant experts over the instances, and times."""
    num_experts, ranks, per_rank = size
    ours, alias, exact, times = [], [], [], []
    for seed in range(args.seeds):
        counts = SHAPES[name](np.random.default_rng(seed), num_experts, ranks, per_rank)
        plan(counts)
        for _ in range(args.repeats):
            start = time.thread_time()
            ours_plan = plan(counts)
            times.append(1e3 * (time.thread_time() - start))
        ours.append(redundancy(ours_plan.assignment))
        alias.append(redundancy(alias_plan(counts)))
        if num_experts * ranks <= LARGEST_FOR_ILP:
            exact.append(solve_exactly(counts, args.ilp_seconds))
    optimum = None
    if exact:
        optimum = {
            "redundant": [sum(o.max_redundant or 0 for o in exact), sum(o.total_redundant for o in exact)],
            "proven": all(o.proven for o in exact),
        }
    return {
        "experts": num_experts,
        "ranks": ranks,
        "load": name,
        "ours": [int(sum(column)) for column in zip(*ours, strict=True)],
        "alias": [int(sum(column)) for column in zip(*alias, strict=True)],
        "optimum": optimum,
        "plan_ms": {"median": statistics.median(times), "min": min(times)},
    }


def _line(row: dict[str, Any]) -> str:
    def pair(values: list[int], bound: str = "") -> str:
        return f"{values[0]} / {bound}{values[1]}"

    best = row["optimum"]
    optimum = "-" if best is None else pair(best["redundant"], "" if best["proven"] else ">=")
    start = f"{row['experts']:>4} {row['ranks']:>3}  {row['load']:<12} {pair(row['ours']):>12} {pair(row['alias']):>12}"
    return f"{start} {optimum:>14}   {row['plan_ms']['median']:>12.3f} {row['plan_ms']['min']:>10.3f}"


if __name__ == "__main__":
    main()
