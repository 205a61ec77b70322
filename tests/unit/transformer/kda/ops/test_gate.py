"""The decay gate: formula, range, and gradients that stay finite under saturation."""

import math

import pytest
import torch
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate

from k3_plugins.transformer.kda.ops import kda_gate


def test_bounded_gate_is_the_sigmoid_and_not_a_clamp():
    z = torch.tensor([0.0, 1.0, -1.0, 3.0], dtype=torch.float64).view(1, 1, 1, 4)
    A_log = torch.tensor([math.log(2.0)], dtype=torch.float64)
    got = kda_gate(z, A_log, -5.0)
    assert got[0, 0, 0, 0] == -2.5  # a clamped softplus gives -2 log 2 here
    want = [-5 / (1 + math.exp(-2 * x)) for x in (0.0, 1.0, -1.0, 3.0)]
    assert torch.allclose(got.flatten(), torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("lower_bound", (-5.0, None))
def test_equals_fla_reference(lower_bound):
    z, A_log = torch.randn(2, 7, 3, 8), torch.randn(3)
    reference = naive_kda_gate if lower_bound is None else naive_kda_lowerbound_gate
    options = {} if lower_bound is None else {"lower_bound": lower_bound}
    torch.testing.assert_close(kda_gate(z, A_log, lower_bound), reference(z, A_log, **options), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("lower_bound", (-5.0, None))
def test_gradients(lower_bound):
    z = (3 * torch.randn(2, 3, 2, 4, dtype=torch.float64)).requires_grad_()
    A_log = torch.randn(2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: kda_gate(*x, lower_bound), (z, A_log))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("lower_bound", (-5.0, None))
@pytest.mark.parametrize("rate", (float("-inf"), -20.0, 0.0, 20.0, 90.0))
def test_finite_when_saturated(dtype, lower_bound, rate):
    """exp(20) * 50 saturates the gate: 0 * inf must not appear in its gradient. exp(-inf) = 0 is finite too."""
    z = torch.tensor([-50.0, -1.0, 0.0, 1.0, 50.0], dtype=dtype).view(1, 1, 1, 5).requires_grad_()
    A_log = torch.tensor([rate], dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    g = kda_gate(z, A_log, lower_bound)
    assert g.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isfinite(g).all() and (g <= 0).all()
    if lower_bound is not None:
        assert (g >= lower_bound).all()
    for grad in torch.autograd.grad(g.sum(), (z, A_log)):
        assert torch.isfinite(grad).all()


def test_bad_arguments():
    with pytest.raises(ValueError, match="A_log must be"):
        kda_gate(torch.zeros(1, 2, 3, 4), torch.zeros(4), -5.0)
    with pytest.raises(ValueError, match="lower_bound must be negative"):
        kda_gate(torch.zeros(1, 2, 3, 4), torch.zeros(3), 5.0)
