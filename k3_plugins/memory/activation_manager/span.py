"""Which part of its storage a tensor covers, so that views of the same values are stored once.

``x``, ``x.view(-1)`` and ``x.t()`` cover the same span. A view with gaps (a slice of the last dimension) is stored as a
copy of its own, or together with its neighbours as the whole storage, whichever is smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Span = tuple[int, int, int, torch.dtype]
"""(storage, first element, elements, dtype)"""


@dataclass(frozen=True)
class View:
    """How a saved tensor lies in its storage; sizes in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    @property
    def count(self) -> int:
        """Elements of the tensor."""
        total = 1
        for length in self.size:
            total *= length
        return total

    @property
    def extent(self) -> int:
        """Elements of the storage from the first to the last that it touches; not for empty tensors."""
        return 1 + sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))

    @property
    def has_gaps(self) -> bool:
        """Whether elements of the storage between its first and its last belong to other views."""
        return self.extent > self.count

    def within(self, flat: Tensor, start: int) -> Tensor:
        """The tensor, in a one-dimensional copy of the storage from element ``start`` on."""
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset - start)


def packed_stride(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of a copy without gaps whose dimensions lie in memory in the same order."""
    packed, step = [0] * len(size), 1
    for dim in sorted(range(len(size)), key=lambda d: (stride[d], size[d])):
        packed[dim] = step
        step *= size[dim]
    return tuple(packed)


def flat_span(tensor: Tensor, start: int, length: int) -> Tensor:
    """``[length]`` elements of the tensor's storage from element ``start`` on, in its dtype; no copy."""
    return tensor.as_strided((length,), (1,), start)
