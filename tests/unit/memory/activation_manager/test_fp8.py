"""The block codec keeps its error bound on every kind of value, and does not hide what is not finite."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_plugins.memory.activation_manager.fp8 import LARGEST, decode, encode
from k3_plugins.memory.policy import FP8_BLOCK, coded_bytes


def bound(x):
    """max(|x| / 16, scale / 1024) element by element, from the definition."""
    count = x.numel()
    padded = torch.nn.functional.pad(x.double().abs(), (0, -count % FP8_BLOCK)).view(-1, FP8_BLOCK)
    scale = (padded.amax(1, keepdim=True) / LARGEST).clamp(min=2.0**-126).expand_as(padded).reshape(-1)[:count]
    return torch.maximum(x.double().abs() / 16, scale / 1024)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000])
def test_error_bound(dtype, count):
    generator = torch.Generator().manual_seed(count)
    x = (torch.randn(count, generator=generator) * 10 ** torch.empty(count).uniform_(-3, 3, generator=generator)).to(
        dtype
    )
    x[::7] = 0
    coded = encode(x)
    assert coded.dtype == torch.uint8 and coded.numel() == coded_bytes(count)
    back = decode(coded, count, dtype)
    assert back.dtype == dtype
    # besides the rounding to the dtype (2^-8 relative for bf16) and of the fp32 scale
    slack = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-10 if dtype == torch.float16 else 1e-6
    assert ((back.double() - x.double()).abs() <= bound(x) * (1 + slack) + x.double().abs() * slack).all()
    assert (back[::7] == 0).all()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200))
def test_any_finite_value(values):
    x = torch.tensor(values, dtype=torch.float32)
    back = decode(encode(x), len(values), torch.float32)
    assert back.isfinite().all()
    assert ((back.double() - x.double()).abs() <= bound(x) * (1 + 1e-5)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_overflow_is_not_hidden(bad):
    x = torch.ones(300)
    x[130] = bad
    back = decode(encode(x), 300, torch.float32)
    assert not back[128:256].isfinite().any()
    assert back[:128].isfinite().all() and back[256:].isfinite().all()


def test_values_on_the_grid_are_exact():
    x = torch.tensor([448.0, -256.0, 0.0, 1.0, 1.125, 2.0**-9, -0.875])
    assert torch.equal(decode(encode(x), 7, torch.float32), x)
