"""Causal attention against a literal softmax in fp64: dense, packed, grouped queries, zigzag context parallelism."""

import pytest
import torch

from k3_plugins.transformer.core_attention import causal_attention, zigzag_positions

# fp64 round-off of a softmax over at most 48 keys, relative to the largest entry
FP64 = 1e-13


def literal(q, k, v, scale, segments):
    """Softmax attention written out with a mask: [s, b, n, k] inputs, one segment id per token, -1 for padding."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    segment = torch.tensor(segments)
    position = torch.arange(len(segments))
    visible = (position[None, :] <= position[:, None]) & (segment[None, :] == segment[:, None])
    scores = scale * torch.einsum("ibnc,jbnc->bnij", q, k)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    out = torch.einsum("bnij,jbnc->ibnc", weights, v)
    return out * (segment >= 0)[:, None, None, None]


def inputs(s, b=2, n=4, m=4, k=6, v=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(s)
    shapes = ((s, b, n, k), (s, b, m, k), (s, b, m, v))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def segments_of(cu_seqlens, s):
    ids = [-1] * s
    for number, (a, b) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        ids[a:b] = [number] * (b - a)
    return ids


def compare(actual, expected, tensors):
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7), dtype=expected.dtype)
    grads = torch.autograd.grad((actual * weight).sum(), tensors)
    oracle = torch.autograd.grad((expected * weight).sum(), tensors)
    for x, y in zip([actual, *grads], [expected, *oracle], strict=True):
        assert (x - y).abs().max() <= FP64 * y.abs().max()


@pytest.mark.parametrize("m", [4, 2, 1])
@pytest.mark.parametrize("v", [5, 6, 9])
def test_dense(m, v):
    q, k, val = inputs(11, m=m, v=v)
    compare(causal_attention(q, k, val, scale=0.4), literal(q, k, val, 0.4, [0] * 11), [q, k, val])


@pytest.mark.parametrize("cu", [[0, 16], [0, 5, 16], [0, 1, 2, 9, 16], [0, 0, 7, 7, 16], [0, 3, 12]])
def test_packed_sequences_do_not_see_each_other_and_padding_gives_zeros(cu):
    q, k, v = inputs(16, b=1)
    out = causal_attention(q, k, v, scale=0.4, cu_seqlens=torch.tensor(cu, dtype=torch.int32))
    compare(out, literal(q, k, v, 0.4, segments_of(cu, 16)), [q, k, v])
    assert not out[cu[-1] :].any()


def test_a_batch_of_padding_only_gives_zeros_and_zero_gradients_even_beside_nan():
    tensors = inputs(16, b=1)
    with torch.no_grad():
        for tensor in tensors:
            tensor[3:] = float("nan")
    out = causal_attention(*tensors, scale=0.4, cu_seqlens=torch.tensor([0, 0], dtype=torch.int32))
    assert not out.any()
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("cu", [None, [0, 48], [0, 6, 16, 17, 48], [0, 0, 31, 40]])
def test_zigzag_queries_over_all_keys_equal_one_rank(cp, cu):
    q, k, v = inputs(48, b=1 if cu else 2)
    bounds = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    expected = literal(q, k, v, 0.4, [0] * 48 if cu is None else segments_of(cu, 48))
    actual = torch.zeros_like(expected)
    for rank in range(cp):
        where = zigzag_positions(48 // cp, rank, cp, q.device)
        part = causal_attention(q[where], k, v, scale=0.4, cu_seqlens=bounds, cp_rank=rank, cp_size=cp)
        actual = actual.index_add(0, where, part)
    compare(actual, expected, [q, k, v])


def test_bf16_inputs_give_an_fp32_output_close_to_fp64():
    q, k, v = inputs(32, dtype=torch.bfloat16)
    out = causal_attention(q, k, v, scale=0.4)
    assert out.dtype == torch.float32
    exact = literal(q.double(), k.double(), v.double(), 0.4, [0] * 32)
    # fp32 softmax and accumulation: 2^-23 times a few dozen terms
    assert (out - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_later_tokens_change_nothing_before_them():
    q, k, v = inputs(20)
    changed = [t.detach().clone() for t in (q, k, v)]
    for tensor in changed:
        tensor[13:] += 5.0
    before = causal_attention(q, k, v, scale=0.4)[:13]
    after = causal_attention(*changed, scale=0.4)[:13]
    assert (before - after).abs().max() <= FP64 * before.abs().max()
