"""FP8 block codec: e4m3 values, one fp32 scale for 128 of them in memory order.

    scale = max|x| / 448,    code = e4m3(x / scale),    x' = code * scale

Error bound, element by element: ``|x' - x| <= max(|x| / 16, scale / 1024)``, the half steps of normal and subnormal
e4m3 (3 mantissa bits, smallest step 2^-9), besides one rounding to the tensor's dtype. Zeros stay zeros. A block that
holds an infinity or a NaN comes back as NaN throughout, so that overflow checks of loss scaling still see it.

Letters: n values, m = ceil(n / 128) blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_plugins.memory.policy import FP8_BLOCK as BLOCK

LARGEST = 448.0  # of e4m3
_SMALLEST_SCALE = 2.0**-126  # of normal fp32; a smaller scale would round to zero


@torch.no_grad()
def encode(values: Tensor) -> Tensor:
    """Floating-point ``[n]`` to bytes uint8 ``[m * 132]``."""
    count = values.numel()
    blocks = -(-count // BLOCK)
    wide = values.float()
    if count != blocks * BLOCK:
        wide = torch.nn.functional.pad(wide, (0, blocks * BLOCK - count))
    wide = wide.view(blocks, BLOCK)
    largest = wide.abs().amax(dim=1, keepdim=True)  # NaN and infinity propagate
    scales = (largest / LARGEST).clamp(min=_SMALLEST_SCALE)
    codes = (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return torch.cat((codes.view(-1).view(torch.uint8), scales.view(-1).view(torch.uint8)))


@torch.no_grad()
def decode(coded: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Bytes of `encode` to ``[count]`` in ``dtype``."""
    blocks = -(-count // BLOCK)
    codes = coded[: blocks * BLOCK].view(torch.float8_e4m3fn).view(blocks, BLOCK)
    scales = coded[blocks * BLOCK :].view(torch.float32)
    return (codes.float() * scales[:, None]).view(-1)[:count].to(dtype)
