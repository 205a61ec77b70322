"""The Quantile Balancing bias from integer histograms: pure torch, no communication, no router.

With scores ``s_ij`` and biases ``b_j``, token i selects the k largest ``s_ij + b_j``; its cutoff ``a_i`` is the
(k+1)-th. Expert j is selected where ``b_j > a_i - s_ij =: r_ij``, so it gets its fair share ``k / E`` of the tokens
when ``b_j`` is the ``k / E`` quantile of ``r_ij`` over ALL tokens of the global batch. Counting ``r_ij`` into bins
makes this a sum of integers, which does not depend on how the batch was split.

Letters: T tokens, E experts, k experts per token, B bins.

Bins. ``uniform``: equal bins over ``[min b - 1, max b + 1]``, every value that r can take. ``centred``: log-spaced
around each expert's current bias (``r_ij - b_j``), from 1e-5 to the same range on both sides: fine where the quantile
moves little from step to step, which is where saturating sigmoid scores crowd. The estimate lies in the bin that holds
the exact quantile.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Bins = Literal["centred", "uniform"]
NUM_BINS = 1000
FINEST = 1e-5
_CHUNK = 1 << 22  # values binned at once: bounds the temporaries at 100 MB


def bin_edges(bias: Tensor, bins: Bins, num_bins: int = NUM_BINS) -> Tensor:
    """fp32 ``[B + 1]`` ascending edges; for ``centred`` they are offsets from each expert's bias.

    Args:
        bias: ``[E]`` fp32, the biases that the histogram's tokens were routed with.
    """
    low, high = bias.min() - 1.0, bias.max() + 1.0
    steps = torch.arange(num_bins + 1, device=bias.device, dtype=torch.float32)
    if bins == "uniform":
        return low + (high - low) * (steps / num_bins)
    half = num_bins // 2
    reach = high - low - 1.0  # |r_ij - b_j| <= max b - min b + 1
    growth = (steps[:half] / (half - 1)).to(torch.float64)
    side = FINEST * (reach.to(torch.float64) / FINEST) ** growth
    side = side.to(torch.float32)
    return torch.cat((-side.flip(0), side.new_zeros(1), side))


def count(
    scores: Tensor, cutoff: Tensor, bias: Tensor, edges: Tensor, bins: Bins, valid: Tensor | None, into: Tensor
) -> None:
    """Add the tokens' margins ``r_ij = a_i - s_ij`` to a histogram.

    Args:
        scores: ``[T, E]`` fp32, unbiased.
        cutoff: ``[T]`` fp32, the (k+1)-th largest biased score of each token.
        bias: ``[E]`` fp32.
        edges: ``[B + 1]`` from `bin_edges`.
        bins: the layout of ``edges``.
        valid: bool ``[T]``; False rows (padding) are not counted. None counts all.
        into: int32 ``[E, B]``, changed in place.
    """
    num_experts, num_bins = into.shape
    inner = edges[1:-1].contiguous()
    first = torch.arange(num_experts, device=into.device) * num_bins
    rows = max(1, _CHUNK // num_experts)
    for start in range(0, scores.shape[0], rows):
        part = slice(start, start + rows)
        margin = cutoff[part, None] - scores[part]
        if bins == "centred":
            margin = margin - bias
        index = torch.bucketize(margin, inner, right=True) + first
        weight = torch.ones_like(margin, dtype=torch.int32)
        if valid is not None:
            weight = weight * valid[part, None]
        into.view(-1).scatter_add_(0, index.flatten(), weight.flatten())


def estimate(histogram: Tensor, bias: Tensor, edges: Tensor, bins: Bins, k: int) -> Tensor:
    """The next bias ``[E]``, mean-centred, from a histogram of the whole batch; the old one where nothing was counted.

    The first bin whose cumulative count reaches ``ceil(q)``, ``q = T k / E``, holds the quantile; linear inside it.

    Args:
        histogram: integer ``[E, B]``.
        bias: fp32 ``[E]``, the biases that routed the counted tokens.
    """
    num_experts = histogram.shape[0]
    running = histogram.to(torch.int64).cumsum(1)
    wanted = running[:, -1:] * k  # q E, an integer
    place = (running * num_experts < wanted).sum(1, keepdim=True).clamp(max=histogram.shape[1] - 1)
    inside = histogram.gather(1, place).to(torch.float64).clamp(min=1)
    before = running.gather(1, place) - histogram.gather(1, place)
    fraction = ((wanted.to(torch.float64) / num_experts - before) / inside).clamp(0, 1)
    low, high = edges[place].to(torch.float64), edges[place + 1].to(torch.float64)
    value = (low + (high - low) * fraction).squeeze(1)
    if bins == "centred":
        value = value + bias.to(torch.float64)
    value = value - value.mean()
    return torch.where(running[:, -1] > 0, value.to(torch.float32), bias)


def exact(scores: Tensor, cutoff: Tensor, k: int) -> Tensor:
    """The exact pooled quantiles ``[E]``, not centred: the ``ceil(T k / E)``-th smallest margin. For tests."""
    tokens, num_experts = scores.shape
    rank = -(-tokens * k // num_experts)
    return (cutoff[:, None] - scores).kthvalue(rank, dim=0).values


def select(scores: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Chosen experts ``[T, k]`` and cutoffs ``[T]``. With ``k = E`` there is no cutoff and -inf is returned."""
    biased = scores + bias
    if k == scores.shape[1]:
        return biased.topk(k, dim=1).indices, torch.full_like(biased[:, 0], -torch.inf)
    top = biased.topk(k + 1, dim=1)
    return top.indices[:, :k], top.values[:, k]
