"""How good and how fast the MoonEP planner is, on six load shapes.

    python benchmarks/moonep_planner.py [--seeds 5] [--repeats 20] [--ilp-seconds 20]

For each size and shape: the largest and the total number of redundant experts of our plan, of the plain alias method,
and of the exact optimum where an integer program solves it in time; then the CPU time of one plan on one core. The
first plan, which compiles, is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time

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
    args = parser.parse_args()
    print("max / total redundant experts, summed over instances (ILP '>=': lower bound, the time limit came first)")
    print(f"{'E':>4} {'R':>3}  {'load':<12} {'ours':>12} {'alias':>12} {'ILP':>14}   {'ms per plan (median, min)':>24}")
    for num_experts, ranks, per_rank in SIZES:
        for name, shape in SHAPES.items():
            ours, alias, exact, times = [], [], [], []
            for seed in range(args.seeds):
                counts = shape(np.random.default_rng(seed), num_experts, ranks, per_rank)
                plan(counts)
                for _ in range(args.repeats):
                    start = time.thread_time()
                    ours_plan = plan(counts)
                    times.append(1e3 * (time.thread_time() - start))
                ours.append(redundancy(ours_plan.assignment))
                alias.append(redundancy(alias_plan(counts)))
                if num_experts * ranks <= LARGEST_FOR_ILP:
                    exact.append(solve_exactly(counts, args.ilp_seconds))
            optimum = "-"
            if exact:
                proven = all(o.proven for o in exact)
                worst = sum(o.max_redundant or 0 for o in exact)
                optimum = f"{worst} / {'' if proven else '>='}{sum(o.total_redundant for o in exact)}"
            print(
                f"{num_experts:>4} {ranks:>3}  {name:<12} {_sums(ours):>12} {_sums(alias):>12} {optimum:>14}   "
                f"{statistics.median(times):>12.3f} {min(times):>10.3f}",
                flush=True,
            )


def _sums(values: list[tuple[int, int]]) -> str:
    return f"{sum(v[0] for v in values)} / {sum(v[1] for v in values)}"


if __name__ == "__main__":
    main()
