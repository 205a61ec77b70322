"""Batched Newton-Schulz of ``emerging_optimizers``, scaled as Muon wants it.

Letters: b matrices of one shape, r rows, c columns.
"""

from __future__ import annotations

from torch import Tensor

from k3_plugins.optimizer.per_head_muon.settings import MuonSettings


def orthogonalise(batch: Tensor, settings: MuonSettings) -> Tensor:
    """The update directions of some matrices.

    Args:
        batch: ``[b, r, c]`` fp32.
        settings: steps, coefficients, precision and scale.

    Returns:
        ``[b, r, c]`` fp32, contiguous: U V^T of every matrix up to the iteration's error, times
        ``extra_scale * scale(r, c)``. With Moonlight's settings its root mean square is that of the singular values
        that the iteration leaves (0.7 to 1.2) times 0.2.
    """
    from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
    from emerging_optimizers.utils import fp32_matmul_precision

    rows, columns = batch.shape[-2:]
    with fp32_matmul_precision(settings.matmul_precision):
        update = newton_schulz(batch, steps=settings.steps, coefficient_type=settings.coefficients)
    scale = get_muon_scale_factor(rows, columns, mode=settings.scale_mode) * settings.extra_scale
    return update.mul_(scale).contiguous()
