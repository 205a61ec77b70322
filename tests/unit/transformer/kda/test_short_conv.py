"""The short convolution against nn.Conv1d on every sequence alone, in fp64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from k3_plugins.transformer.kda import short_conv as module
from k3_plugins.transformer.kda.short_conv import short_conv, short_conv_step


def reference(x, weight, activation="silu", halo=None):
    """One sequence [B, T, D] through PyTorch's convolution."""
    width = weight.shape[1]
    if x.shape[1] == 0:
        return x
    front = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    if halo is not None:
        front = torch.cat((front, halo), dim=1)[:, halo.shape[1] :]
    y = F.conv1d(torch.cat((front, x), dim=1).transpose(1, 2), weight.unsqueeze(1), groups=x.shape[2]).transpose(1, 2)
    return F.silu(y) if activation == "silu" else y


def data(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def compare(got, want, leaves, tolerance=1e-12):
    """Outputs and gradients for one random cotangent."""
    weights = data(*want.shape, seed=7)
    assert (got - want).abs().max() <= tolerance
    pairs = zip(
        torch.autograd.grad((got * weights).sum(), leaves, retain_graph=True),
        torch.autograd.grad((want * weights).sum(), leaves),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * (1.0 + b.abs().sum().item() / max(1, b.numel())))


@pytest.mark.parametrize("length", (1, 2, 3, 4, 5, 63, 64, 65, 300))
@pytest.mark.parametrize("width, activation", ((4, "silu"), (4, None), (1, "silu"), (2, "silu"), (7, None)))
def test_equals_conv1d(length, width, activation, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 2 * 6 * 50)  # several blocks of rows
    leaves = [data(2, length, 6).requires_grad_(), data(6, width, seed=1).requires_grad_()]
    compare(short_conv(*leaves, activation=activation), reference(*leaves, activation), leaves)


@pytest.mark.parametrize("rows", (0, 1, 2, 3))
@pytest.mark.parametrize("length", (1, 2, 3, 40))
def test_halo(rows, length, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 2 * 6 * 2)
    x, w, halo = (t.requires_grad_() for t in (data(2, length, 6), data(6, 4, seed=1), data(2, rows, 6, seed=2)))
    compare(short_conv(x, w, initial_rows=halo), reference(x, w, halo=halo), [x, w, halo])


@pytest.mark.parametrize(
    "cu", ([0, 1, 3, 6, 10], [0, 4, 5, 6, 7, 9], [0, 0, 3, 3, 3, 67, 131, 196], [0, 200], [0, 0, 0]), ids=str
)
@pytest.mark.parametrize("block", (1, 3, 1000))
@pytest.mark.parametrize("with_halo", (False, True))
def test_packed(cu, block, with_halo, monkeypatch):
    """Sequences shorter than the kernel neither leak nor lose gradients; rows behind the last are exact zeros."""
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 6 * block)
    x, w = data(1, 210, 6).requires_grad_(), data(6, 4, seed=1).requires_grad_()
    halo = data(1, 3, 6, seed=2).requires_grad_() if with_halo else None
    got = short_conv(x, w, cu_seqlens=torch.tensor(cu), initial_rows=halo)
    pieces = []
    for a, b in itertools.pairwise(cu):
        pieces.append(reference(x[:, a:b], w, halo=halo if a == 0 and b > 0 else None))
    want = torch.cat((*pieces, torch.zeros_like(x[:, cu[-1] :])), dim=1)
    leaves = [x, w] if halo is None or cu[-1] == 0 else [x, w, halo]
    if cu[-1] == 0:
        assert (got == 0).all() and (torch.autograd.grad(got.sum(), x)[0] == 0).all()
        return
    compare(got, want, leaves)
    (dx,) = torch.autograd.grad(got.sum(), x)
    assert (got[:, cu[-1] :] == 0).all() and (dx[:, cu[-1] :] == 0).all()


def test_padding_rows_are_never_read():
    x, w = data(1, 20, 6), data(6, 4, seed=1).requires_grad_()
    x[:, 12:] = float("nan")
    x.requires_grad_()
    got = short_conv(x, w, cu_seqlens=[0, 5, 12])
    dx, dw = torch.autograd.grad(got.sum(), (x, w))
    assert torch.isfinite(got).all() and torch.isfinite(dx).all() and torch.isfinite(dw).all()
    assert (got[:, 12:] == 0).all() and (dx[:, 12:] == 0).all()


def test_bf16_rounds_once():
    x, w = data(2, 50, 6, dtype=torch.bfloat16), data(6, 4, dtype=torch.bfloat16, seed=1)
    got = short_conv(x, w)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, reference(x.float(), w.float()).bfloat16())


def test_step_equals_whole_sequence():
    x, w = data(2, 9, 6), data(6, 4, seed=1)
    want, rows = short_conv(x, w), None
    for t in range(x.shape[1]):
        y, rows = short_conv_step(x[:, t], w, rows)
        assert (y - want[:, t]).abs().max() <= 1e-14


@pytest.mark.parametrize(
    "arguments, message",
    (
        ({"x": data(3, 4)}, "x must be"),
        ({"weight": data(5, 4)}, "weight must be"),
        ({"activation": "relu"}, "activation must be"),
        ({"initial_rows": data(1, 4, 6)}, "at most 3"),
        ({"cu_seqlens": [0, 9]}, "only 8 rows"),
        ({"x": data(2, 8, 6), "cu_seqlens": [0, 8]}, "batch of 1"),
    ),
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        short_conv(**{"x": data(1, 8, 6), "weight": data(6, 4), **arguments})
