"""Token counts for tests and benchmarks of the planner: ``[R, E]`` with equal rows (every source rank has ``C`` pairs).

Letters as in `planner`. The names are the load shapes that `benchmarks/moonep_planner.py` prints.
"""

from __future__ import annotations

import numpy as np


def uniform(rng: np.random.Generator, num_experts: int, ranks: int, per_rank: int) -> np.ndarray:
    """Every expert equally likely."""
    return _draw(rng, np.ones(num_experts), ranks, per_rank)


def lognormal(rng: np.random.Generator, num_experts: int, ranks: int, per_rank: int) -> np.ndarray:
    """Expert popularity exp(N(0, 1))."""
    return _draw(rng, rng.lognormal(0.0, 1.0, num_experts), ranks, per_rank)


def zipf(rng: np.random.Generator, num_experts: int, ranks: int, per_rank: int) -> np.ndarray:
    """Popularity 1/i, the popular experts scattered over the ranks."""
    return _draw(rng, rng.permutation(1.0 / np.arange(1, num_experts + 1)), ranks, per_rank)


def zipf_sorted(rng: np.random.Generator, num_experts: int, ranks: int, per_rank: int) -> np.ndarray:
    """Popularity 1/i, the popular experts on the first ranks."""
    return _draw(rng, 1.0 / np.arange(1, num_experts + 1), ranks, per_rank)


def single_hot(rng: np.random.Generator, num_experts: int, ranks: int, per_rank: int) -> np.ndarray:
    """Half of all tokens choose one expert."""
    weights = np.full(num_experts, 0.5 / max(num_experts - 1, 1))
    weights[rng.integers(num_experts)] = 0.5
    return _draw(rng, weights, ranks, per_rank)


def tight(rng: np.random.Generator, num_experts: int, ranks: int, per_rank: int) -> np.ndarray:
    """The worst case of the guarantee: rank 0's experts get nothing, all others the same."""
    m = num_experts // ranks
    loads = np.zeros(num_experts, dtype=np.int64)
    share, extra = divmod(ranks * per_rank, num_experts - m)
    loads[m:] = share
    loads[m : m + extra] += 1
    # Deal the pairs out row by row: source rank s gets positions [s C, (s + 1) C) of the concatenated experts.
    edges = np.concatenate([[0], np.cumsum(loads)])
    low, high = np.arange(ranks)[:, None] * per_rank, (np.arange(ranks)[:, None] + 1) * per_rank
    return np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None)


SHAPES = {f.__name__: f for f in (uniform, lognormal, zipf, zipf_sorted, single_hot, tight)}


def _draw(rng: np.random.Generator, weights: np.ndarray, ranks: int, per_rank: int) -> np.ndarray:
    return rng.multinomial(per_rank, weights / weights.sum(), size=ranks)
