"""MXFP4 weights are unpacked as ModelOpt packs and unpacks them."""

import pytest
import torch

from k3_plugins.models.kimi_k3.hf_config import ConversionError
from k3_plugins.models.kimi_k3.mxfp4 import dequantize


def every_byte():
    """All 256 bytes under scales from tiny to large: every pair of values, in a matrix of 16 rows and 1024 columns."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(32).view(16, 512)
    scale = torch.randint(100, 150, (16, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return packed, scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_is_what_modelopt_says(dtype):
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor.mxfp4_tensor")
    packed, scale = every_byte()
    tensor = qtensor.MXFP4QTensor(torch.Size((16, 1024)), dtype, packed)
    expected = tensor.dequantize(dtype=dtype, scale=scale, block_sizes={-1: 32})
    assert torch.equal(dequantize(packed, scale, dtype), expected)


def test_what_modelopt_packs_is_read_back():
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor.mxfp4_tensor")
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    packed, scale = qtensor.MXFP4QTensor.quantize(weight, 32)
    ours = dequantize(packed._quantized_data, scale.view(8, 3), torch.float32)
    assert torch.equal(ours, packed.dequantize(dtype=torch.float32, scale=scale, block_sizes={-1: 32}))
    # One bit of significand and a shared exponent: the error of a value is at most a sixth of its block's largest.
    blocks = weight.view(8, 3, 32)
    assert ((ours.view_as(blocks) - blocks).abs() <= blocks.abs().amax(-1, keepdim=True) / 3).all()


def test_low_four_bits_come_first():
    packed = torch.full((1, 16), 0x21, dtype=torch.uint8)  # low 1 -> 0.5, high 2 -> 1.0
    values = dequantize(packed, torch.full((1, 1), 128, dtype=torch.uint8), torch.float32)
    assert values[0, :4].tolist() == [1.0, 2.0, 1.0, 2.0]  # times 2 ** (128 - 127)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p, s: (p, s[:, :-1]), "do not fit"),
        (lambda p, s: (p, s.float()), "not uint8"),
        (lambda p, s: (p, torch.full_like(s, 255)), "NaN"),
        (lambda p, s: (p, torch.full_like(s, 150)), "beyond the range"),
    ],
)
def test_damaged_pairs_are_refused(change, says):
    with pytest.raises(ConversionError, match=says):
        dequantize(*change(*every_byte()), torch.float16, "experts.0.w1")
