"""How well router biases balance the load: Quantile Balancing's two bin layouts against other rules.

    python benchmarks/quantile_balancing.py [--tokens 16384] [--updates 8] [--seed 0] [--shards 8] [--logit-std 2]

Gaussian logits (standard deviation 2) plus an offset per expert (standard deviation sigma), sigmoid scores, the same
batch at every update.
Prints the largest expert load over the mean. Rules: no bias; uniform bins; centred log bins; the exact pooled quantile;
the sign update (bias -/+ 0.001 by overload, DeepSeek-V3), which needs many more updates; and the average over
micro-batches of per-micro-batch quantiles (Megatron's quantile_balancing), on shards of equal and of skewed content.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from k3_plugins.transformer.moe.quantile_balancing import estimator

CASES = ((64, 4, 1.5), (64, 4, 3.0), (896, 16, 1.5), (896, 16, 3.0))
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the global batch")
    parser.add_argument("--updates", type=int, default=8, help="bias updates on the same batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logit-std", type=float, default=2.0, help="spread of one expert's logits over the tokens")
    parser.add_argument("--shards", type=int, default=8, help="micro-batches of the averaged rule")
    args = parser.parse_args()
    columns = ("before", "uniform", "centred", "exact", "sign", "average")
    print("largest / mean expert load after the updates")
    print(f"{'E, k, sigma':<16} {'batch':<8} " + " ".join(f"{name:>8}" for name in columns))
    for num_experts, k, sigma in CASES:
        for skewed in (False, True):
            scores = make_scores(args.tokens, num_experts, sigma, args.seed, skewed, args.logit_std)
            result = run(scores, k, args.updates, args.shards)
            label = f"{num_experts}, {k}, {sigma:g}"
            kind = "drifting" if skewed else "uniform"
            print(f"{label:<16} {kind:<8} " + " ".join(f"{result[name]:>8.3f}" for name in columns), flush=True)


if __name__ == "__main__":
    main()
