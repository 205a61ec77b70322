"""What rounds for ModelOpt's quantizers, under names that its configuration knows.

    register()                             once; then {"backend": NAMES["torch"]} in a quantizer's configuration

``torch`` is the arithmetic of `formats`, equal to ModelOpt's packed tensors; ``modelopt-cuda`` is ModelOpt's own fused
kernel. Both pass gradients straight through. Each call is counted on the quantizer (``calls``): the witness that a
quantizer which is enabled also ran.
"""

from __future__ import annotations

from typing import Any

import torch
from modelopt.torch.quantization.nn import TensorQuantizer
from modelopt.torch.quantization.nn.modules.tensor_quantizer import (
    is_registered_quant_backend,
    register_quant_backend,
)
from modelopt.torch.quantization.tensor_quant import dynamic_block_quant
from torch import Tensor
from torch.autograd.function import FunctionCtx

from k3_plugins.post_training.mxfp4_qat import formats

NAMES = {"torch": "k3-mx-torch", "modelopt-cuda": "k3-mx-modelopt-cuda"}
"""``--mxfp4-qat-backend`` -> ModelOpt's name."""

_FORMATS = {(2, 1): formats.mxfp4, (4, 3): formats.mxfp8}
"""Exponent and mantissa bits -> arithmetic."""


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, bits: tuple[int, int]) -> Tensor:
        return _FORMATS[bits](x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _torch(x: Tensor, quantizer: TensorQuantizer) -> Tensor:
    _count(quantizer)
    return _StraightThrough.apply(x, tuple(quantizer.num_bits))


def _modelopt_cuda(x: Tensor, quantizer: TensorQuantizer) -> Tensor:
    _count(quantizer)
    scale_bits: Any = quantizer.block_sizes["scale_bits"]
    # amax, bias: none in MX formats; the last argument passes gradients straight through.
    return dynamic_block_quant(x, formats.BLOCK, None, None, quantizer.num_bits, scale_bits, None, None, True)


def _count(quantizer: TensorQuantizer) -> None:
    quantizer.calls = calls(quantizer) + 1


def calls(quantizer: TensorQuantizer) -> int:
    """How often a quantizer rounded something."""
    return getattr(quantizer, "calls", 0)


def register() -> None:
    """Make both backends known to ModelOpt; a second call changes nothing."""
    for name, function in ((NAMES["torch"], _torch), (NAMES["modelopt-cuda"], _modelopt_cuda)):
        if not is_registered_quant_backend(name):
            register_quant_backend(name, function)
