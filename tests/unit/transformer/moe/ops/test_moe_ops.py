"""SiTU-GLU, segment GEMMs and the grouped expert network: formulas, bounds, limits, gradients, poison."""

import math

import pytest
import torch

from k3_plugins.transformer.moe.ops import naive, segment_gemm
from k3_plugins.transformer.moe.ops.activation import SITU, SWIGLU, GatedActivation
from k3_plugins.transformer.moe.ops.grouped_mlp import grouped_mlp

NAN = float("nan")


def test_situ_is_the_formula_with_exact_gradients() -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(7, 12, dtype=torch.float64)).requires_grad_()
    p = torch.rand(7, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    # fp64: a handful of operations, each 1e-16 of values up to 100.
    torch.testing.assert_close(SITU(x, p), naive.situ_glu(gate, up) * p[:, None], rtol=1e-13, atol=1e-13)
    for act in (SITU, SWIGLU, GatedActivation(4.0, None), GatedActivation(None, 2.0)):
        assert torch.autograd.gradcheck(lambda a, b, act=act: act(a, b), (x, p))
        assert torch.autograd.gradcheck(lambda a, act=act: act(a), (x,))


def test_situ_is_bounded_and_tends_to_swiglu() -> None:
    far = torch.tensor([-1e30, -50.0, -1.0, 0.0, 1.0, 50.0, 1e30])
    gate, up = torch.meshgrid(far, far, indexing="ij")
    x = torch.stack([gate.flatten(), up.flatten()], dim=1).requires_grad_()
    y = SITU(x)
    y.sum().backward()
    assert y.abs().max() <= 100.0 and torch.isfinite(x.grad).all()
    near = torch.randn(50, 8, dtype=torch.float64)
    wide = GatedActivation(1e6, 1e6)
    # tanh(x / b) b = x (1 - x^2 / 3 b^2): relative 3e-12 at |x| = 3, b = 1e6.
    torch.testing.assert_close(wide(near), SWIGLU(near), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        SWIGLU(near), torch.nn.functional.silu(near[:, :4]) * near[:, 4:], rtol=1e-14, atol=1e-14
    )


def test_situ_computes_in_fp32_for_bf16_and_saves_only_its_input() -> None:
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = SITU(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
    exact = SITU(x.detach().double())
    assert y.dtype == torch.bfloat16
    # One rounding to bf16 (2^-8 relative), none inside.
    torch.testing.assert_close(y.double(), exact, rtol=2**-8 * 1.01, atol=1e-30)


def test_bad_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="beta_gate 0 must be positive"):
        GatedActivation(0, 25)


def _case(dtype: torch.dtype, l: int, f: int, sizes: list[int], slack: int):
    torch.manual_seed(1)
    n = sum(sizes)
    x = torch.randn(n + slack, l, dtype=torch.float64).to(dtype)
    p = torch.rand(n + slack, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    x[n:], p[n:] = NAN, NAN
    w1 = torch.randn(len(sizes), 2 * f, l, dtype=torch.float64).div(math.sqrt(l)).to(dtype)
    w2 = torch.randn(len(sizes), l, f, dtype=torch.float64).div(math.sqrt(f)).to(dtype)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return [t.requires_grad_() for t in (x, p, w1, w2)], ends, n


@pytest.mark.parametrize(
    "dtype,l,f,tolerance",
    [
        (torch.float64, 6, 5, 1e-12),
        (torch.float32, 8, 4, 2e-5),  # grouped
        (torch.float32, 6, 5, 2e-5),  # widths that the grouped kernel refuses
    ],
)
@pytest.mark.parametrize("slack", [0, 3])
def test_grouped_mlp_equals_the_token_loop(dtype, l, f, tolerance, slack) -> None:
    """Every gradient; empty segments first, in the middle and last; slack rows hold NaN and must not be seen."""
    sizes = [0, 3, 0, 5, 1, 0]
    (x, p, w1, w2), ends, n = _case(dtype, l, f, sizes, slack)
    grouped = dtype == torch.float32 and l == 8
    assert segment_gemm.implementation(dtype, l, f, 2 * f) == ("grouped" if grouped else "loop")
    y = grouped_mlp(x, p, w1, w2, ends, SITU)
    upstream = torch.randn(n + slack, l, dtype=torch.float64).to(dtype)
    upstream[n:] = NAN
    got = torch.autograd.grad(y, (x, p, w1, w2), upstream)
    assert (y[n:] == 0).all() and all((g[n:] == 0).all() for g in got[:2])

    leaves = [t.detach().double().requires_grad_() for t in (x[:n], p[:n], w1, w2)]
    expert = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rows = [
        naive.latent_moe(
            leaves[0][i : i + 1], expert[i].view(1, 1), leaves[1][i].view(1, 1), None, None, None, *leaves[2:], None
        )
        for i in range(n)
    ]
    want = torch.cat(rows)
    expected = torch.autograd.grad(want, leaves, upstream[:n].double())
    torch.testing.assert_close(y[:n].double(), want, rtol=tolerance, atol=tolerance)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g[: len(e)].double(), e, rtol=tolerance, atol=tolerance)


def test_grouped_mlp_calls_do_not_grow_with_tokens() -> None:
    """One GEMM per expert or one grouped call; never one per token."""

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for n in (8, 512):
        (x, p, w1, w2), ends, _ = _case(torch.float32, 8, 4, [n // 4] * 4, 0)
        Count.calls = 0
        with Count():
            grouped_mlp(x, p, w1, w2, ends, SITU).sum().backward()
        counts.append(Count.calls)
    assert counts[0] == counts[1]


def test_saved_for_backward_are_input_hidden_and_probabilities() -> None:
    (x, p, w1, w2), ends, n = _case(torch.float32, 8, 4, [2, 6], 0)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        grouped_mlp(x, p, w1, w2, ends, SITU)
    activations = sum(t.numel() for t in saved if t.data_ptr() not in (w1.data_ptr(), w2.data_ptr(), ends.data_ptr()))
    assert activations == n * (8 + 2 * 4 + 1)
