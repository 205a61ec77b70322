"""MXFP4-packed weights of a published checkpoint as ordinary tensors, and back.

A packed matrix ``[n, m]`` is stored as ``weight_packed`` uint8 ``[n, m / 2]`` (two E2M1 values a byte, the even column
in the low four bits) and ``weight_scale`` uint8 ``[n, m / 32]`` (UE8M0: 2 ** (s - 127), one for 32 columns). Every
value is a product of a two-bit significand and a power of two, so bfloat16 and float32 hold it exactly.
"""

import torch
from torch import Tensor

from k3_plugins.models.kimi_k3.hf_config import ConversionError
from k3_plugins.post_training.mxfp4_qat.formats import BLOCK, pack_mxfp4

PUBLISHED_FORMAT = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["re:.*block_sparse_moe\\.experts\\.\\d+\\.w[123]$"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": BLOCK,
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
}
"""``quantization_config`` of a ``config.json`` that is written anew: routed experts are packed, and nothing else."""

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


def quantize(weight: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """The MXFP4 pair of a matrix ``[n, m]``: ``packed`` and ``scale`` of `dequantize`, rounded as in training.

    Raises:
        ConversionError: columns that 32 does not divide, or values that are not finite.
    """
    if weight.shape[-1] % BLOCK:
        raise ConversionError(f"{name}: {weight.shape[-1]} columns cannot be packed in blocks of {BLOCK}")
    if not torch.isfinite(weight).all():
        raise ConversionError(f"{name}: values that are not finite cannot be packed; the training has diverged")
    return pack_mxfp4(weight)
