"""Inputs and comparisons shared by the KDA tests."""

import torch
import torch.nn.functional as F

from k3_plugins.transformer.kda.ops import kda, kda_gate

NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


def make_inputs(t, *, b=1, h=2, hv=None, k=16, v=None, lower_bound=-5.0, states=None, seed=0, dtype=torch.float64):
    """[q, k, v, g, beta, initial_state]; g really is KDA's gate, with a rate that differs by head.

    Three of four channels decay slowly (by a few per cent a token): if all decayed fast, nothing would be left of the
    state after a chunk, and a wrong state would not show.
    """
    hv, v = hv or h, v or k
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, key = (F.normalize(normal(b, t, h, k), dim=-1) for _ in range(2))
    g = kda_gate(2 * normal(b, t, hv, k) - 5.0 * (torch.arange(k) % 4 > 0), 0.3 * normal(hv), lower_bound)
    beta = torch.sigmoid(normal(b, t, hv))
    state = normal(states or b, hv, k, v)
    return [x.to(dtype) for x in (q, key, normal(b, t, hv, v), g, beta, state)]


def cotangents(inputs, seed=1):
    """Fixed gradients of the output and of the final state."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (inputs[2], inputs[5])]


def run(inputs, backend, *, with_state=True, **options):
    """Output, final state and all gradients, as a dict of NAMES."""
    d_o, d_state = (x.to(inputs[2].dtype) for x in cotangents(inputs))
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    state = leaves[5] if with_state else None
    o, final = kda(*leaves[:5], initial_state=state, output_final_state=True, backend=backend, **options)
    wanted = leaves if with_state else leaves[:5]
    loss = (o * d_o).sum() + (final * d_state).sum() + 0 * leaves[0].sum()
    grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return dict(zip(NAMES, (o.detach(), final.detach(), *grads), strict=False))


def relative_error(got, want):
    """Largest difference over the largest entry; 0 for two empty or two zero tensors."""
    if want.numel() == 0:
        return 0.0
    difference, size = (got.double() - want.double()).abs().max().item(), want.double().abs().max().item()
    return difference / size if size else difference


def assert_close(got, want, tolerance):
    """Every entry of two `run` results, with the name of the first one that is off."""
    assert got.keys() == want.keys()
    for name, reference in want.items():
        assert torch.isfinite(got[name]).all(), f"{name} is not finite"
        error = relative_error(got[name], reference)
        assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"
