"""The lean aggregation and the two-phase evaluation against the literal equations, in fp64."""

import pytest
import torch
from torch.autograd import gradcheck

from k3_plugins.transformer.attention_residuals.ops import naive
from k3_plugins.transformer.attention_residuals.ops.aggregate import aggregate
from k3_plugins.transformer.attention_residuals.ops.two_phase import inter_block_pass, measure_two_phase

EPS = 1e-5


def _inputs(num_sources, shape=(5, 2), hidden=7, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=dtype)  # noqa: E731
    query, key = draw(hidden), 1 + 0.3 * draw(hidden)
    sources = [scale * (index + 1) * draw(*shape, hidden) for index in range(num_sources)]
    return [t.requires_grad_() for t in (query, key, *sources)], draw(*shape, hidden)


def _gradients(function, tensors, cotangent):
    hidden, weights = function(*tensors)
    return hidden, weights, torch.autograd.grad(hidden, tensors, cotangent)


def _lean(query, key, *sources):
    return aggregate(query, key, list(sources), EPS)


def _literal(query, key, *sources):
    hidden, weights = naive.aggregate(query, key, list(sources), EPS)
    return hidden, weights.flatten(1)


def _two_phase(query, key, *sources, partial=True):
    finished = list(sources[:-1] if partial else sources)
    wide = torch.promote_types(query.dtype, torch.float32)
    inter = inter_block_pass((query.to(wide) * key.to(wide)).detach().unsqueeze(0), finished, EPS)[0]
    return aggregate(query, key, list(sources), EPS, inter)


@pytest.mark.parametrize("num_sources", [1, 2, 3, 9])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_lean_and_two_phase_equal_the_literal_equations(num_sources, scale):
    tensors, cotangent = _inputs(num_sources, scale=scale)
    expected = _gradients(_literal, tensors, cotangent)
    candidates = [_lean, lambda *t: _two_phase(*t, partial=False)]
    if num_sources > 1:
        candidates.append(_two_phase)
    for candidate in candidates:
        hidden, weights, gradients = _gradients(candidate, tensors, cotangent)
        # fp64: 1e-12 is some 4000 roundings of a quantity of order one
        torch.testing.assert_close(hidden, expected[0], rtol=1e-12, atol=1e-12 * scale)
        torch.testing.assert_close(weights, expected[1], rtol=1e-12, atol=1e-12)
        for gradient, reference in zip(gradients, expected[2], strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-12 * max(1.0, scale))


def test_gradcheck():
    tensors, _ = _inputs(3, shape=(3,), hidden=4)
    assert gradcheck(lambda *t: _lean(*t)[0], tensors)


def test_zero_query_gives_the_mean():
    (query, key, *sources), _ = _inputs(4)
    hidden, weights = aggregate(torch.zeros_like(query), key, sources, EPS)
    torch.testing.assert_close(hidden, torch.stack(sources).mean(0), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(weights, torch.full_like(weights, 0.25))


def test_large_logits_do_not_overflow():
    (query, key, *sources), cotangent = _inputs(3)
    big = (query * 1e6).detach().requires_grad_()
    for function in (_lean, _two_phase):
        hidden, weights, gradients = _gradients(function, (big, key, *sources), cotangent)
        assert all(torch.isfinite(t).all() for t in (hidden, weights, *gradients))


def test_batched_pass_over_many_queries():
    (query, key, *sources), _ = _inputs(5)
    queries = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    statistics = inter_block_pass(queries * key.detach(), sources[:-1], EPS)
    for one, inter in zip(queries, statistics, strict=True):
        expected = naive.aggregate(one, key, sources, EPS)[0]
        torch.testing.assert_close(aggregate(one, key, sources, EPS, inter).hidden, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("two_phase", [False, True])
def test_bf16_sources_are_weighed_in_fp32(two_phase):
    tensors, cotangent = _inputs(4, shape=(33,), hidden=48)
    low = [t.detach().bfloat16().requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in low]
    hidden, weights, gradients = _gradients(_two_phase if two_phase else _lean, low, cotangent.bfloat16())
    reference = _gradients(_literal, exact, cotangent.bfloat16().double())
    assert weights.dtype == torch.float32 and hidden.dtype == torch.bfloat16
    torch.testing.assert_close(weights.double(), reference[1], rtol=2e-6, atol=2e-6)  # fp32 arithmetic throughout
    # one rounding to bf16 at the end: half a unit in the last place is 2^-9
    torch.testing.assert_close(hidden.double(), reference[0], rtol=2**-8, atol=1e-5)
    for gradient, exact_gradient in zip(gradients, reference[2], strict=True):
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=2**-8, atol=2e-5)


def test_saved_tensors_are_the_sources_and_one_scalar_each():
    (query, key, *sources), _ = _inputs(4, shape=(64,), hidden=32, dtype=torch.float32)
    saved = {}

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        aggregate(query, key, sources, EPS)
    for shared in (query, key, *sources):
        saved.pop(shared.untyped_storage().data_ptr())
    assert sum(saved.values()) == 4 * 64 * 4  # 4 sources, 64 tokens, fp32


def test_sources_that_need_no_gradient():
    (query, key, *sources), cotangent = _inputs(3)
    frozen = [sources[0].detach(), *sources[1:]]
    hidden, _ = aggregate(query, key, frozen, EPS)
    reference = _gradients(_literal, (query, key, *sources), cotangent)[2]
    gradients = torch.autograd.grad(hidden, (query, key, *sources[1:]), cotangent)
    for gradient, expected in zip(gradients, (*reference[:2], *reference[3:]), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_bad_sources_are_named():
    query, key = torch.zeros(4), torch.ones(4)
    with pytest.raises(ValueError, match="no source"):
        aggregate(query, key, [], EPS)
    with pytest.raises(ValueError, match="differ"):
        aggregate(query, key, [torch.zeros(2, 4), torch.zeros(3, 4)], EPS)


def test_benchmark_reports_both_times_and_leaves_the_random_state():
    before = torch.get_rng_state()
    choice = measure_two_phase(4, 3, 16, 8, dtype=torch.float32, device="cpu")
    assert choice.enabled == (choice.two_phase_ms < choice.single_pass_ms)
    assert "ms" in str(choice) and torch.equal(before, torch.get_rng_state())
