"""MXFP4-packed weights of a published checkpoint as ordinary tensors.

A packed matrix ``[n, m]`` is stored as ``weight_packed`` uint8 ``[n, m / 2]`` (two E2M1 values a byte, the even column
in the low four bits) and ``weight_scale`` uint8 ``[n, m / 32]`` (UE8M0: 2 ** (s - 127), one for 32 columns). Every
value is a product of a two-bit significand and a power of two, so bfloat16 and float32 hold it exactly.
"""

import torch
from torch import Tensor

from k3_plugins.models.kimi_k3.hf_config import ConversionError

BLOCK = 32
"""Columns that share a scale."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_NAN = 255


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype, name: str = "weight") -> Tensor:
    """The matrix that an MXFP4 pair stands for.

    Args:
        packed: uint8 ``[n, m / 2]``.
        scale: uint8 ``[n, m / 32]``.
        dtype: of the result.
        name: for messages.

    Returns:
        ``[n, m]``.

    Raises:
        ConversionError: other element types, shapes that do not fit each other, or values that ``dtype`` cannot hold.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ConversionError(f"{name}: packed values and scales are {packed.dtype} and {scale.dtype}, not uint8")
    if packed.dim() != 2 or scale.shape != (packed.shape[0], packed.shape[1] * 2 // BLOCK):
        raise ConversionError(
            f"{name}: scales {tuple(scale.shape)} do not fit packed values {tuple(packed.shape)}: one scale for "
            f"{BLOCK // 2} bytes of a row"
        )
    if (scale == _SCALE_NAN).any():
        raise ConversionError(f"{name}: a scale is NaN (255); the file is damaged")
    signed = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32)
    pairs = torch.stack([signed.repeat(16), signed.repeat_interleave(16)], dim=1)  # byte -> (low, high)
    values = pairs[packed.int()].view(*scale.shape, BLOCK)
    values = torch.ldexp(values, (scale.int() - 127).unsqueeze(-1)).flatten(1).to(dtype)
    if not torch.isfinite(values).all():
        raise ConversionError(f"{name}: values beyond the range of {dtype}; convert with dtype bfloat16 in config.json")
    return values
