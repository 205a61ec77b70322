"""The histogram estimator: within one bin of the exact pooled quantile, independent of splits, and really balancing."""

import pytest
import torch

from benchmarks import quantile_balancing as bench
from k3_plugins.transformer.moe.quantile_balancing import estimator

T, E, K = 3000, 24, 3
BINS = ("centred", "uniform")


def scores(skewed: bool = False) -> torch.Tensor:
    return bench.make_scores(T, E, 1.5, seed=3, skewed=skewed, logit_std=1.0)


def histogram(parts, bias, bins, valid=None):
    edges = estimator.bin_edges(bias, bins)
    total = torch.zeros(E, estimator.NUM_BINS, dtype=torch.int32)
    for i, part in enumerate(parts):
        mask = None if valid is None else valid[i]
        estimator.count(part, estimator.select(part, bias, K)[1], bias, edges, bins, mask, total)
    return total, edges


@pytest.mark.parametrize("bins", BINS)
def test_estimate_lies_in_the_bin_of_the_exact_quantile(bins) -> None:
    s, bias = scores(), torch.zeros(E)
    for _ in range(3):
        total, edges = histogram([s], bias, bins)
        cutoff = estimator.select(s, bias, K)[1]
        exact = estimator.exact(s, cutoff, K)
        moved = exact - bias if bins == "centred" else exact
        place = torch.bucketize(moved, edges[1:-1].contiguous(), right=True)
        width = edges[place + 1] - edges[place]
        raw = _uncentred(total, bias, edges, bins)
        # fp32 edges near 1: 1e-7.
        assert ((raw - exact).abs() <= width + 2e-7).all()
        bias = estimator.estimate(total, bias, edges, bins, K)
        torch.testing.assert_close(bias, (raw - raw.mean()).float(), rtol=0, atol=1e-6)


def _uncentred(total, bias, edges, bins):
    """The quantile read off the cumulative counts in plain Python."""
    result = []
    edges = edges.double().numpy()
    for j in range(E):
        running, wanted = 0, T * K / E
        for b, c in enumerate(total[j].tolist()):
            if running + c >= wanted:
                lo, hi = edges[b], edges[b + 1]
                result.append(lo + (hi - lo) * (wanted - running) / c + (bias[j].item() if bins == "centred" else 0))
                break
            running += c
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("bins", BINS)
def test_any_split_gives_the_same_bits(bins) -> None:
    s, bias = scores(skewed=True), 0.1 * torch.randn(E, generator=torch.Generator().manual_seed(0))
    whole, edges = histogram([s], bias, bins)
    assert whole.sum(1).tolist() == [T] * E
    for parts in (s.chunk(4), s.chunk(7), [s[::2], s[1::2]], [s[:1], s[1:]]):
        assert torch.equal(histogram(parts, bias, bins)[0], whole)


@pytest.mark.parametrize("bins", BINS)
def test_padding_is_not_counted(bins) -> None:
    s, bias = scores(), torch.zeros(E)
    valid = torch.rand(T, generator=torch.Generator().manual_seed(1)) < 0.6
    poisoned = torch.where(valid[:, None], s, 0.123)
    assert torch.equal(histogram([poisoned], bias, bins, [valid])[0], histogram([s[valid]], bias, bins)[0])
    nothing, edges = histogram([s], bias, bins, [torch.zeros(T, dtype=torch.bool)])
    assert torch.equal(estimator.estimate(nothing, bias, edges, bins, K), bias)


def test_every_margin_falls_into_a_bin() -> None:
    """Extreme scores and biases: nothing is lost outside the range, NaN never appears."""
    bias = torch.linspace(-3, 3, E)
    s = torch.cat((torch.zeros(5, E), torch.ones(5, E), torch.rand(5, E).round()))
    for bins in BINS:
        total, edges = histogram([s], bias, bins)
        assert (edges[1:] > edges[:-1]).all() and total.sum() == 15 * E
        assert torch.isfinite(estimator.estimate(total, bias, edges, bins, K)).all()


def test_the_average_of_micro_batch_quantiles_is_another_number() -> None:
    """Megatron's rule on shards of different content: far from the pooled quantile, and worse balanced."""
    s, zero = scores(skewed=True), torch.zeros(E)
    pooled, averaged = bench.by_exact(s, zero, K), bench.by_average(s, zero, K, 4)
    ours = bench.by_histogram(s, zero, K, "centred")
    assert (averaged - pooled).abs().max() > 20 * (ours - pooled).abs().max()
    biases = [zero, zero]
    for _ in range(8):
        biases = [bench.by_histogram(s, biases[0], K, "centred"), bench.by_average(s, biases[1], K, 4)]
    assert bench.imbalance(s, biases[0], K) < 1.1 < 1.3 < bench.imbalance(s, biases[1], K)


def _after(num_experts, k, sigma, updates=8) -> float:
    s = bench.make_scores(16384, num_experts, sigma, seed=0)
    bias = torch.zeros(num_experts)
    for _ in range(updates):
        bias = bench.by_histogram(s, bias, k, "centred")
    return bench.imbalance(s, bias, k)


def test_eight_updates_balance_64_experts() -> None:
    assert _after(64, 4, 1.5) <= 1.03


@pytest.mark.slow
def test_eight_updates_balance_896_experts() -> None:
    assert _after(896, 16, 1.5) <= 1.06
