"""What quantization-aware training does to the operands of an expert's two GEMMs; without it, nothing.

Every function maps a tensor to the values it is replaced by, in the same shape and dtype, row by row along the last
dimension. Gradients go straight through: the gradient of the rounded operand is that of the operand.

Letters: n rows, g experts, l input and output width, f expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def keep(x: Tensor) -> Tensor:
    """The operand as it is."""
    return x


@dataclass(frozen=True)
class Rounding:
    """See the module docstring."""

    input1: Callable[[Tensor], Tensor] = keep
    """``[n, l]``, the experts' input."""
    weight1: Callable[[Tensor], Tensor] = keep
    """``[g, 2 f, l]``."""
    input2: Callable[[Tensor], Tensor] = keep
    """``[n, f]``, the weighted hidden layer."""
    weight2: Callable[[Tensor], Tensor] = keep
    """``[g, l, f]``."""


EXACT = Rounding()
