"""8-bit block codec: one byte a value, and one fp32 scale for 128 of them in memory order.

Each block takes the one of two codes that loses less of it; the sign of its scale says which:

    plain blocks            scale = max|x| / 127 (stored as -scale),  code = int8(x / scale)    MXINT8's code
    blocks with outliers    scale = max|x| / 448,                     code = e4m3(x / scale)    FP8 proper

e4m3 rounds relative to each value, by a 44th of it in the mean (3 mantissa bits, half a step at most 1/16). int8 spends
no bits on exponents: it rounds by max|x| / 508 in the mean, which is four to five times less for normally distributed
values, but loses small values beside a large one. So int8 is taken where its mean error is the smaller one:
max|x| <= 508/44 mean|x|. (Compared are mean absolute errors, because in a mean square one outlier would hide that all
others are lost.)

Error bounds, element by element, besides one rounding to the tensor's dtype:

    int8    |x' - x| <= scale / 2 = max|x| / 254
    e4m3    |x' - x| <= max(|x| / 16, scale / 1024), the half steps of normal and subnormal e4m3 (smallest step 2^-9)

In both, the error of a block is at most 1/16 of it in the mean square. Zeros stay zeros. A block that holds an infinity
or a NaN comes back as NaN throughout, so that overflow checks of loss scaling still see it.

Letters: n values, m = ceil(n / 128) blocks.

int8 in blocks: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.4, there with 32 values and a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_plugins.memory.policy import FP8_BLOCK as BLOCK

LARGEST = 448.0  # of e4m3
LARGEST_INT8 = 127.0
OUTLIERS = 508 / 44
"""A block whose largest magnitude is more than so many times its mean magnitude is coded in e4m3."""
_SMALLEST_SCALE = 2.0**-126  # of normal fp32; a smaller scale would round to zero


@torch.no_grad()
def encode(values: Tensor, *, only_e4m3: bool = False) -> Tensor:
    """Floating-point ``[n]`` to bytes uint8 ``[m * 132]``.

    Args:
        only_e4m3: code every block in e4m3.
    """
    count = values.numel()
    blocks = -(-count // BLOCK)
    wide = values.float()
    if count != blocks * BLOCK:
        wide = torch.nn.functional.pad(wide, (0, blocks * BLOCK - count))
    wide = wide.view(blocks, BLOCK)
    largest = wide.abs().amax(dim=1, keepdim=True)  # NaN and infinity propagate
    scales = (largest / LARGEST).clamp(min=_SMALLEST_SCALE)
    codes = (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    if not only_e4m3:
        steps = largest / LARGEST_INT8
        # divided first: a sum of the largest floats would overflow. False for blocks of zeros and of what is not finite
        plain = ((wide / largest).abs().mean(dim=1, keepdim=True) * OUTLIERS >= 1) & (steps >= _SMALLEST_SCALE)
        whole = (wide / steps).round_().clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8).view(torch.uint8)
        codes = torch.where(plain, whole, codes)
        scales = torch.where(plain, -steps, scales)
    return torch.cat((codes.view(-1), scales.view(-1).view(torch.uint8)))


@torch.no_grad()
def decode(coded: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Bytes of `encode` to ``[count]`` in ``dtype``."""
    blocks = -(-count // BLOCK)
    codes = coded[: blocks * BLOCK].view(blocks, BLOCK)
    scales = coded[blocks * BLOCK :].view(torch.float32)[:, None]
    units = torch.where(scales < 0, codes.view(torch.int8).float(), codes.view(torch.float8_e4m3fn).float())
    return (units * scales.abs()).view(-1)[:count].to(dtype)
