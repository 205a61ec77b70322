"""MXFP4 and MXFP8 values, packed bytes and scales equal ModelOpt's packed tensors bit for bit."""

import pytest
import torch
from hypothesis import given, strategies

from k3_plugins.models.kimi_k3 import mxfp4 as published
from k3_plugins.post_training.mxfp4_qat import formats

qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

# Every border between two E2M1 values, its neighbourhood, the values themselves, zeros of both signs, 6 and a bit more.
BORDERS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
EDGES = [*BORDERS, *(-b for b in BORDERS), *(b * 1.0001 for b in BORDERS[:4]), *(b * 0.9999 for b in BORDERS[:4])]
EDGES += [0.0, -0.0, 0.5, 1.0, 3.0, 4.0, 6.0, -6.0, 1e-20, 6.0000005]
assert len(EDGES) == formats.BLOCK


def finite(x):
    return torch.where(torch.isfinite(x), x, 0)


def named_cases(dtype):
    generator = torch.Generator().manual_seed(0)
    powers = torch.exp2(torch.arange(-160, 128).float())[:, None]
    for size in (1e-38, 1e-30, 1e-6, 1.0, 1e3, 1e30):
        yield f"normal {size}", torch.randn(64, 128, generator=generator) * size
    yield "ties under every scale", torch.tensor(EDGES)[None] * powers
    yield "ties in the subnormal range", torch.tensor(EDGES)[None] * powers / 8
    yield "zeros", torch.zeros(4, 64)
    limits = torch.finfo(dtype)
    for name, value in (("largest", limits.max), ("smallest", limits.min), ("tiny", limits.smallest_normal)):
        yield name, torch.full((2, 64), value)
    steps = torch.randint(-40, 40, (64, 64), generator=generator).float()
    yield "subnormals", steps * limits.smallest_normal / 64
    # The largest value of a block on both sides of the border between two scales, bit by bit.
    for maximum in (6.0, 448.0):
        for bits in (-2, -1, 0, 1, 2):
            block = torch.full((288, 32), 0.1) * powers
            edge = (maximum * powers[:, 0]).view(torch.int32) + bits
            block[:, 3] = edge.clamp(min=0).view(torch.float32)
            yield f"{maximum} and {bits} bits", block
    width = 16 if dtype != torch.float32 else 32
    patterns = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), (4096, 32), generator=generator)
    yield "random bits", patterns.to(BITS[dtype]).view(dtype)


def check(x, name=""):
    """All four: values in MXFP4 and MXFP8, packed bytes, scales."""
    tensor, scale = qtensor.MXFP4QTensor.quantize(x, formats.BLOCK)
    expected = tensor.dequantize(scale=scale, block_sizes={-1: formats.BLOCK})
    same_bits(formats.mxfp4(x), expected, f"MXFP4 of {name}")
    packed, ours = formats.pack_mxfp4(x)
    assert torch.equal(packed, tensor._quantized_data), name
    assert torch.equal(ours, scale.view_as(ours)), name
    tensor, scale = qtensor.MXFP8QTensor.quantize(x)
    same_bits(formats.mxfp8(x), tensor.dequantize(scale=scale), f"MXFP8 of {name}")
    if torch.isfinite(expected).all():
        assert torch.equal(published.dequantize(packed, ours, x.dtype), expected), name


def same_bits(actual, expected, what):
    """Also the sign of zeros, and what overflows: fp16 and fp32 cannot hold 4 / 3 of their largest values."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bits = BITS[actual.dtype]
    assert torch.equal(actual.view(bits), expected.view(bits)), what


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modelopt_says_the_same(dtype):
    for name, x in named_cases(dtype):
        check(finite(x.to(dtype)), name)


@given(
    values=strategies.lists(
        strategies.floats(allow_nan=False, allow_infinity=False, width=32), min_size=32, max_size=32
    ),
    dtype=strategies.sampled_from(DTYPES),
)
def test_any_block(values, dtype):
    check(finite(torch.tensor([values]).to(dtype)))


def test_stacks_of_experts_are_rounded_like_their_matrices():
    stack = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(1))
    for function in (formats.mxfp4, formats.mxfp8):
        assert torch.equal(function(stack), torch.stack([function(matrix) for matrix in stack]))
        assert torch.equal(function(stack.transpose(1, 2).contiguous().transpose(1, 2)), function(stack))


def test_what_is_rounded_stays_as_it_is():
    """So weights that were imported from MXFP4 are trained in the values that were published."""
    packed = torch.randint(0, 256, (64, 48), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    scale = torch.randint(1, 250, (64, 3), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    values = published.dequantize(packed, scale, torch.float32)
    assert torch.equal(formats.mxfp4(values), values)
    assert torch.equal(published.dequantize(*published.quantize(values), torch.float32), values)


def test_a_broken_weight_stays_visible():
    x = torch.ones(1, 64)
    x[0, 3] = float("nan")
    for function in (formats.mxfp4, formats.mxfp8):
        assert torch.isnan(function(x)[0, 3]) and not torch.isnan(function(x)[0, 32:]).any()
    with pytest.raises(published.ConversionError, match="experts.0.w1: values that are not finite"):
        published.quantize(x, "experts.0.w1")
    with pytest.raises(published.ConversionError, match="48 columns cannot be packed in blocks of 32"):
        published.quantize(torch.ones(1, 48))


def test_modelopts_quantizer_calls_the_registered_arithmetic_and_passes_gradients():
    from modelopt.torch.quantization.conversion import set_quantizer_by_cfg
    from modelopt.torch.quantization.nn import TensorQuantizer

    from k3_plugins.post_training.mxfp4_qat import backends
    from k3_plugins.post_training.mxfp4_qat.convert import quantizer_config

    backends.register()
    backends.register()  # no warning about a second registration
    holder = torch.nn.ModuleDict({"weight_quantizer": TensorQuantizer(), "input_quantizer": TensorQuantizer()})
    set_quantizer_by_cfg(holder, quantizer_config("torch"))
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(4)).requires_grad_()
    for name, function in (("weight_quantizer", formats.mxfp4), ("input_quantizer", formats.mxfp8)):
        upstream = torch.randn(4, 64)
        rounded = holder[name](x)
        assert torch.equal(rounded, function(x)) and not torch.equal(rounded, x)
        (gradient,) = torch.autograd.grad((rounded * upstream).sum(), x)
        assert torch.equal(gradient, upstream)
        assert backends.calls(holder[name]) == 1
