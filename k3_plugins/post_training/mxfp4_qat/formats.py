"""The arithmetic of MXFP4 and MXFP8, rounded as ModelOpt's packed tensors round it. Pure torch, any device.

    MXFP4   E2M1 values 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign; one scale 2 ** ceil(log2(amax / 6)) per block
    MXFP8   E4M3 values up to 448; one scale 2 ** ceil(log2(amax / 448)) per block

A block is 32 neighbours of the last dimension. Two rules differ from the OCP specification, and are kept because the
export must agree with ModelOpt's: scales are rounded up (OCP takes the floor of log2(amax) and saturates), and an MXFP4
value half-way between two others goes to the smaller one (.75 to .5, 2.5 to 2, 3.5 to 3), not to the even one. A zero
is stored as minus zero. Equality holds for finite values; NaN stays NaN, so that a broken weight shows in the loss.

Letters: n rows, k columns, a multiple of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Values that share a scale, along the last dimension."""

_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -127, 127  # of a UE8M0 scale
_BIAS = 127


def mxfp4(x: Tensor) -> Tensor:
    """The values of ``x [..., k]`` in MXFP4, in its shape and dtype (at least fp32 in between)."""
    blocks, scale = _mxfp4_blocks(x)
    return (_e2m1(blocks) * scale).view(x.shape).to(x.dtype)


def mxfp8(x: Tensor) -> Tensor:
    """The values of ``x [..., k]`` in MXFP8, in its shape and dtype (at least fp32 in between)."""
    blocks = _blocks(x)
    exponent = torch.log2(blocks.abs().amax(-1, keepdim=True).float() / _E4M3_MAX).ceil()
    exponent = exponent.clamp(_LOWEST_EXPONENT, _HIGHEST_EXPONENT)
    scaled = (blocks * torch.exp2(-exponent)).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return (scaled.float() * torch.exp2(exponent)).view(x.shape).to(x.dtype)


def pack_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """A weight as it is published.

    Args:
        x: ``[n, k]``, finite.

    Returns:
        ``weight_packed`` uint8 ``[n, k / 2]``, the even column in the low four bits, and ``weight_scale`` uint8
        ``[n, k / 32]``, the exponent plus 127.
    """
    blocks, scale = _mxfp4_blocks(x)
    blocks = blocks.view(x.shape)
    magnitude = _e2m1(blocks).abs()
    # Twice a value is 0, 1, 2, 3, 4, 6, 8, 12: up to 4 its own index; 6, 8, 12 are numbers 5, 6, 7.
    twice = (magnitude * 2).to(torch.int32)
    index = twice - (twice >= 6).int() - (twice >= 8).int() - 3 * (twice >= 12).int()
    codes = (index + 8 * (blocks <= 0).int()).to(torch.uint8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    exponent = torch.log2(scale).round() + _BIAS
    return packed, exponent.to(torch.uint8).view(*x.shape[:-1], -1)


def _blocks(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def _mxfp4_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` divided by its scales, ``[..., k / 32, 32]``, and the scales, fp32 ``[..., k / 32, 1]``."""
    blocks = _blocks(x)
    amax = blocks.abs().amax(-1, keepdim=True).float()
    scale = torch.exp2(torch.log2(amax / _E2M1_MAX).clamp(min=_LOWEST_EXPONENT).ceil())
    return blocks / scale, scale


def _e2m1(x: Tensor) -> Tensor:
    """The nearest E2M1 value, half-way to the smaller one; the sign of zero is minus."""
    magnitude = x.abs()
    # Values are .5 apart up to 2, 1 apart up to 4, 2 apart beyond.
    step = torch.where(magnitude > 4, 2.0, torch.where(magnitude > 2, 1.0, 0.5))
    # ceil(m - 1/2) rounds to the nearest and a half down; the quotient by a power of two is exact. Without abs() what
    # is below a quarter would become minus zero, and its sign with it.
    rounded = (magnitude / step - 0.5).ceil().abs() * step
    return torch.where(x > 0, rounded, -rounded)
