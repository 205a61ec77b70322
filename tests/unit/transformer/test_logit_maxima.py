"""Largest logits by blocks against a whole score matrix."""

import pytest
import torch

from k3_plugins.transformer import logit_maxima
from k3_plugins.transformer.core_attention import zigzag_slices
from k3_plugins.transformer.logit_maxima import LogitMaxima, largest_logits


def literal(q, k, scale, cu_seqlens=None):
    """``[n]`` from the S x S matrix of each head."""
    length, _, heads, _ = q.shape
    k = k.repeat_interleave(heads // k.shape[2], dim=2)
    scores = torch.einsum("sbnc,tbnc->bnst", q, k) * scale
    admitted = torch.ones(length, length, dtype=torch.bool).tril()
    if cu_seqlens is not None:
        segment = torch.full((length,), -1)
        for number, (first, last) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
            segment[first:last] = number
        admitted &= (segment[:, None] == segment) & (segment[:, None] >= 0)
    return scores.masked_fill(~admitted, -torch.inf).amax(dim=(0, 2, 3))


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("block", [1, 300, 2**22])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 5, 5, 6, 20]])
def test_blocks_equal_the_whole_matrix(monkeypatch, groups, block, cu_seqlens):
    monkeypatch.setattr(logit_maxima, "_SCORES_PER_BLOCK", block)
    generator = torch.Generator().manual_seed(groups)
    batch = 1 if cu_seqlens else 3
    q = torch.randn(24, batch, 4, 5, dtype=torch.float64, generator=generator)
    k = torch.randn(24, batch, groups, 5, dtype=torch.float64, generator=generator)
    boundaries = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    expected = literal(q, k, 0.3, cu_seqlens)
    for size in (1, 2):
        parts = []
        for rank in range(size):
            slices = zigzag_slices(24 // size, rank, size)
            local = torch.cat([q[first : first + length] for first, length in slices])
            parts.append(largest_logits(local, k, scale=0.3, slices=slices, cu_seqlens=boundaries))
        torch.testing.assert_close(torch.stack(parts).amax(0), expected, rtol=1e-14, atol=0)


def test_the_future_never_counts():
    q, k = torch.ones(4, 1, 1, 2), torch.ones(4, 1, 1, 2)
    k[3] = 100.0  # only the last query may see it
    assert largest_logits(q[:3], k, scale=1.0, slices=[(0, 3)]).item() == 2.0
    assert largest_logits(q, k, scale=1.0, slices=[(0, 4)]).item() == 200.0


def test_maxima_accumulate_until_taken():
    maxima = LogitMaxima()
    assert maxima.take() is None
    maxima.update(torch.tensor([1.0, 5.0]))
    maxima.update(torch.tensor([3.0, 2.0]))
    assert maxima.take().tolist() == [3.0, 5.0]
    assert maxima.take() is None
