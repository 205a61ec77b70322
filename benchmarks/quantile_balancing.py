"""How well router biases balance the load: Quantile Balancing's two bin layouts against other rules.

    python benchmarks/quantile_balancing.py [--draws 3] [--tokens 16384] [--updates 8] [--shards 8] [--logit-std 2]
                                            [--json]

Gaussian logits (standard deviation 2) plus an offset per expert (standard deviation sigma), sigmoid scores, the same
batch at every update.
Prints the largest expert load over the mean, with the range over the draws: with 896 experts one draw says little, the
few most overloaded experts decide. Rules: no bias; uniform bins; centred log bins; the exact pooled quantile;
the sign update (bias -/+ 0.001 by overload, DeepSeek-V3), which needs many more updates; and the average over
micro-batches of per-micro-batch quantiles (Megatron's quantile_balancing), on shards of equal and of skewed content.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from k3_plugins.transformer.moe.quantile_balancing import estimator

CASES = ((64, 4, 1.5), (64, 4, 3.0), (896, 16, 1.5), (896, 16, 3.0))
COLUMNS = ("before", "uniform", "centred", "exact", "sign", "average")
SIGN_RATE = 1e-3


def make_scores(
    tokens: int, num_experts: int, sigma: float, seed: int, skewed: bool = False, logit_std: float = 2.0
) -> Tensor:
    """fp32 ``[tokens, E]`` sigmoid scores; ``skewed``: the experts' offsets drift along the batch, as topics do."""
    g = torch.Generator().manual_seed(seed)
    offset = sigma * torch.randn(num_experts, generator=g)
    logits = logit_std * torch.randn(tokens, num_experts, generator=g) + offset
    if skewed:
        other = sigma * torch.randn(num_experts, generator=g)
        logits += torch.linspace(0, 1, tokens)[:, None] * other
    return logits.sigmoid()


def imbalance(scores: Tensor, bias: Tensor, k: int) -> float:
    """Largest over mean expert load."""
    experts, _ = estimator.select(scores, bias, k)
    load = torch.bincount(experts.flatten(), minlength=scores.shape[1]).float()
    return (load.max() / load.mean()).item()


def by_histogram(scores: Tensor, bias: Tensor, k: int, bins: estimator.Bins) -> Tensor:
    """One update from binned margins."""
    edges = estimator.bin_edges(bias, bins)
    histogram = torch.zeros(scores.shape[1], estimator.NUM_BINS, dtype=torch.int32)
    estimator.count(scores, estimator.select(scores, bias, k)[1], bias, edges, bins, None, histogram)
    return estimator.estimate(histogram, bias, edges, bins, k)


def by_exact(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """One update from the exact pooled quantile."""
    value = estimator.exact(scores, estimator.select(scores, bias, k)[1], k)
    return value - value.mean()


def by_sign(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """One auxiliary-loss-free update: a fixed step against the sign of the overload."""
    experts, _ = estimator.select(scores, bias, k)
    load = torch.bincount(experts.flatten(), minlength=scores.shape[1]).float()
    return bias + SIGN_RATE * torch.sign(load.mean() - load)


def by_average(scores: Tensor, bias: Tensor, k: int, shards: int) -> Tensor:
    """One update from the mean of each shard's own quantile."""
    values = [
        estimator.exact(part, estimator.select(part, bias, k)[1], k) for part in scores.chunk(shards)
    ]
    value = torch.stack(values).mean(0)
    return value - value.mean()


def run(scores: Tensor, k: int, updates: int, shards: int) -> dict[str, float]:
    """Imbalance after ``updates`` of every rule."""
    rules = {
        "uniform": lambda bias: by_histogram(scores, bias, k, "uniform"),
        "centred": lambda bias: by_histogram(scores, bias, k, "centred"),
        "exact": lambda bias: by_exact(scores, bias, k),
        "sign": lambda bias: by_sign(scores, bias, k),
        "average": lambda bias: by_average(scores, bias, k, shards),
    }
    zero = torch.zeros(scores.shape[1])
    result = {"before": imbalance(scores, zero, k)}
    for name, rule in rules.items():
        bias = zero
        for _ in range(updates):
            bias = rule(bias)
        result[name] = imbalance(scores, bias, k)
    return result


def measure(options: argparse.Namespace) -> list[dict]:
    """One entry per case and kind of batch: for every rule the imbalance of each draw."""
    entries = []
    for num_experts, k, sigma in CASES:
        for skewed in (False, True):
            draws = []
            for seed in range(options.seed, options.seed + options.draws):
                scores = make_scores(options.tokens, num_experts, sigma, seed, skewed, options.logit_std)
                draws.append(run(scores, k, options.updates, options.shards))
            imbalances = {name: [draw[name] for draw in draws] for name in COLUMNS}
            case = {"experts": num_experts, "k": k, "sigma": sigma, "drifting": skewed}
            entries.append({**case, "imbalance": imbalances})
            if not options.json:
                print_row(entries[-1])
    return entries


def print_row(entry: dict) -> None:
    """The mean over the draws; below it their range, if there are several."""
    label = f"{entry['experts']}, {entry['k']}, {entry['sigma']:g}"
    kind = "drifting" if entry["drifting"] else "uniform"
    columns = list(entry["imbalance"].values())
    means = (f"{statistics.fmean(values):>13.3f}" for values in columns)
    print(f"{label:<16} {kind:<8} {' '.join(means)}", flush=True)
    if len(columns[0]) > 1:
        ranges = (f"{min(values):>6.3f}-{max(values):.3f}".rjust(13) for values in columns)
        print(f"{'':<25} {' '.join(ranges)}", flush=True)


def main() -> int:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the global batch")
    parser.add_argument("--updates", type=int, default=8, help="bias updates on the same batch")
    parser.add_argument("--seed", type=int, default=0, help="of the first draw")
    parser.add_argument("--draws", type=int, default=3, help="draws of logits and offsets per row")
    parser.add_argument("--logit-std", type=float, default=2.0, help="spread of one expert's logits over the tokens")
    parser.add_argument("--shards", type=int, default=8, help="micro-batches of the averaged rule")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    for name in ("tokens", "updates", "draws", "shards"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} must be at least 1")
    if not options.json:
        print("largest / mean expert load after the updates")
        print(f"{'E, k, sigma':<16} {'batch':<8} " + " ".join(f"{name:>13}" for name in COLUMNS))
    entries = measure(options)
    if options.json:
        print(json.dumps({"options": vars(options), "rows": entries}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
