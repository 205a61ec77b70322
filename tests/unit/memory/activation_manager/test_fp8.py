"""The block codec keeps its error bounds on every kind of value, takes the better of its codes, and does not hide what
is not finite."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_plugins.memory.activation_manager.fp8 import LARGEST, decode, encode
from k3_plugins.memory.policy import FP8_BLOCK, coded_bytes

BOTH = pytest.mark.parametrize("only_e4m3", [False, True])


def blocks_of(x):
    """Magnitudes [blocks, 128] in fp64, zeros behind the end."""
    return torch.nn.functional.pad(x.double().abs(), (0, -x.numel() % FP8_BLOCK)).view(-1, FP8_BLOCK)


def is_int8(coded, count):
    """Per element: whether its block is coded so, from the sign of the scale."""
    blocks = -(-count // FP8_BLOCK)
    scales = coded[blocks * FP8_BLOCK :].view(torch.float32)
    return (scales < 0).repeat_interleave(FP8_BLOCK)[:count]


def bound(x, coded):
    """max|x| / 254 for int8, max(|x| / 16, scale / 1024) for e4m3, element by element, from the definition."""
    count = x.numel()
    largest = blocks_of(x).amax(1, keepdim=True).expand(-1, FP8_BLOCK).reshape(-1)[:count]
    scale = (largest / LARGEST).clamp(min=2.0**-126)
    return torch.where(is_int8(coded, count), largest / 254, torch.maximum(x.double().abs() / 16, scale / 1024))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("spread", [0, 3])
def test_error_bound(dtype, count, spread, only_e4m3):
    generator = torch.Generator().manual_seed(count)
    exponents = torch.empty(count).uniform_(-spread, spread, generator=generator)
    x = (torch.randn(count, generator=generator) * 10**exponents).to(dtype)
    x[::7] = 0
    coded = encode(x, only_e4m3=only_e4m3)
    assert coded.dtype == torch.uint8 and coded.numel() == coded_bytes(count)
    if only_e4m3 or spread:  # values over six decades: nearly all lie far below the largest of their block
        assert not is_int8(coded, count).any()
    else:
        assert is_int8(coded, count)[: count // FP8_BLOCK * FP8_BLOCK].all()
    back = decode(coded, count, dtype)
    assert back.dtype == dtype
    # besides the rounding to the dtype (2^-8 relative for bf16) and of the fp32 scale
    slack = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-10 if dtype == torch.float16 else 1e-6
    assert ((back.double() - x.double()).abs() <= bound(x, coded) * (1 + slack) + x.double().abs() * slack).all()
    assert (back[::7] == 0).all()


@BOTH
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200))
def test_any_finite_value(only_e4m3, values):
    x = torch.tensor(values, dtype=torch.float32)
    coded = encode(x, only_e4m3=only_e4m3)
    back = decode(coded, len(values), torch.float32)
    assert back.isfinite().all()
    assert ((back.double() - x.double()).abs() <= bound(x, coded) * (1 + 1e-5)).all()
    # each block within 1/15 of itself in the mean square (where no value is below what fp32 can scale)
    if x.double().abs().max() > 1e-30:
        errors, sizes = blocks_of(back.double() - x.double()), blocks_of(x)
        assert (errors.norm(dim=1) <= sizes.norm(dim=1) / 15 + 1e-34).all()


@given(st.lists(st.floats(-30, 30), min_size=FP8_BLOCK, max_size=FP8_BLOCK), st.integers(0, 2**32 - 1))
def test_the_better_code_is_taken(exponents, seed):
    """Never a mean error much above that of e4m3, whatever the spread within a block: the rule compares expected
    errors, and those of a block of 128 scatter around them."""
    noise = torch.rand(FP8_BLOCK, generator=torch.Generator().manual_seed(seed)) + 1
    x = noise * 2 ** torch.tensor(exponents, dtype=torch.float32)
    mixed, e4m3 = (decode(encode(x, only_e4m3=only), FP8_BLOCK, torch.float32) for only in (False, True))
    assert (mixed - x).abs().mean() <= 1.6 * (e4m3 - x).abs().mean() + 1e-3 * x.abs().mean()


def test_normal_values_lose_a_quarter_and_small_ones_beside_an_outlier_survive():
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    errors = []
    for only in (False, True):
        back = decode(encode(x, only_e4m3=only), x.numel(), torch.float32)
        errors.append(((back - x).norm() / x.norm()).item())
    # int8: max|x| of 128 normal values is 2.8 in the mean, 2.8 / 127 / sqrt(12) = 0.64 %; e4m3: 2.6 %
    assert errors[0] == pytest.approx(0.0064, rel=0.05) and errors[1] == pytest.approx(0.026, rel=0.05)
    x[5] = 1e4  # int8 would make zeros of its neighbours
    back = decode(encode(x), x.numel(), torch.float32)
    assert ((back - x)[:128].abs() <= x[:128].abs() / 16 + 1e4 / 448 / 1024).all()


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_overflow_is_not_hidden(bad, only_e4m3):
    x = torch.ones(300)
    x[130] = bad
    back = decode(encode(x, only_e4m3=only_e4m3), 300, torch.float32)
    assert not back[128:256].isfinite().any()
    assert back[:128].isfinite().all() and back[256:].isfinite().all()


def test_values_on_the_grid_are_exact():
    x = torch.tensor([448.0, -256.0, 0.0, 1.0, 1.125, 2.0**-9, -0.875])
    assert torch.equal(decode(encode(x), 7, torch.float32), x)
    x = torch.arange(-127.0, 128.0)[:128]
    assert is_int8(encode(x), 128).all() and torch.equal(decode(encode(x), 128, torch.float32), x)


def test_the_extremes_of_fp32():
    for size in (3.4e38, 2.0**-126, 1e-44):
        x = torch.full((FP8_BLOCK,), size)
        back = decode(encode(x), FP8_BLOCK, torch.float32)
        assert ((back.double() - x.double()).abs() <= max(size / 16, 2.0**-136)).all(), size
