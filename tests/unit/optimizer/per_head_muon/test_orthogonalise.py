"""Newton-Schulz in batches: equal to the iteration written out in fp64, and every head's update has its size."""

import dataclasses

import pytest
import torch

from k3_plugins.optimizer.per_head_muon.newton_schulz import orthogonalise
from k3_plugins.optimizer.per_head_muon.settings import MuonSettings
from tests.distributed.optimizer.per_head_muon.literal import orthogonal

MOONLIGHT = MuonSettings(matmul_precision="high")


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (1, 16, 16)])
def test_batches_equal_single_matrices_in_fp64(shape):
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    update = orthogonalise(batch, MOONLIGHT)
    for one, matrix in zip(update, batch, strict=True):
        expected = 0.2 * max(shape[1:]) ** 0.5 * orthogonal(matrix.double())
        # fp32 rounding, times up to 485 (3.4445^5) for small singular values; measured 2e-6 to 1e-5
        assert (one - expected).abs().max() <= 5e-5 * expected.abs().max()
    assert update.is_contiguous()


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (32, 32)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_every_head_has_the_root_mean_square_of_an_adamw_update(shape, scale):
    """0.2 times the singular values that the iteration leaves, 0.68 to 1.14 for these coefficients."""
    heads = torch.randn(4, *shape, generator=torch.Generator().manual_seed(2))
    heads *= scale * torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(4, 1, 1)
    rms = orthogonalise(heads, MOONLIGHT).pow(2).mean(dim=(1, 2)).sqrt()
    assert ((rms > 0.2 * 0.65) & (rms < 0.2 * 1.2)).all(), rms


def test_a_small_head_is_drowned_in_a_whole_matrix_only():
    heads = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3))
    heads[1] *= 1e-4
    apart = orthogonalise(heads, MOONLIGHT)
    together = orthogonalise(heads.view(1, 16, 32), MOONLIGHT).view(2, 8, 32)
    rms = [float(update[1].pow(2).mean().sqrt()) for update in (apart, together)]
    assert rms[0] > 0.13 and rms[1] < 0.05


def test_zero_momentum_gives_a_zero_update():
    assert not orthogonalise(torch.zeros(2, 4, 6), MOONLIGHT).any()


def test_flags_of_megatron_are_honoured():
    batch = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(4))
    base = orthogonalise(batch, MOONLIGHT)
    for change in (
        {"steps": 3},
        {"coefficients": "quintic"},
        {"scale_mode": "shape_scaling"},
        {"extra_scale": 0.3},
        {"matmul_precision": "medium"},
    ):
        assert not torch.equal(orthogonalise(batch, dataclasses.replace(MOONLIGHT, **change)), base), change
    assert torch.allclose(orthogonalise(batch, dataclasses.replace(MOONLIGHT, extra_scale=0.4)), 2 * base)
