"""Backend choice and argument checks: named backends are obeyed or refused, bad shapes name the argument."""

import logging

import pytest
import torch

from k3_plugins.transformer.kda.ops import KDABackendError, dispatch, kda, resolve_backend
from tests.unit.transformer.kda.ops.kda_cases import make_inputs


def test_auto_on_cpu_says_why():
    chosen, rejected = resolve_backend("auto", "cpu")
    assert chosen == "torch"
    assert "needs a CUDA device" in rejected["fla"] and "oracle" in rejected["naive"]


def test_auto_logs_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_announced", set())
    inputs = make_inputs(3)[:5]
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        kda(*inputs)
        kda(*inputs)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "torch" in lines[0] and "fla rejected: fla needs a CUDA device" in lines[0]


def test_named_backend_is_refused_with_the_reason():
    with pytest.raises(KDABackendError, match="'fla' cannot run: fla needs a CUDA device.*'cpu'"):
        kda(*make_inputs(3)[:5], backend="fla")
    with pytest.raises(ValueError, match="unknown KDA backend 'triton': choose auto, fla, torch, naive"):
        resolve_backend("triton", "cpu")


@pytest.mark.parametrize("name", ("torch", "naive"))
def test_named_backend_is_obeyed(name):
    assert resolve_backend(name, "cpu") == (name, {})


def _with(**changes):
    tensors = dict(zip(("q", "k", "v", "g", "beta"), make_inputs(6, h=2, hv=4, k=8, v=4)[:5], strict=True))
    return {name: changes.get(name, value) for name, value in tensors.items()}


@pytest.mark.parametrize(
    "arguments, message",
    (
        (_with(q=torch.zeros(6, 2, 8)), "q must have 4 dimensions"),
        (_with(q=torch.zeros(1, 6, 2, 4).double()), "q and k must have one shape"),
        (_with(v=torch.zeros(1, 5, 4, 4).double()), "v must be"),
        (_with(v=torch.zeros(1, 6, 3, 4).double()), "3 value heads must be a multiple of the 2"),
        (_with(g=torch.zeros(1, 6, 2, 8).double()), "g must be"),
        (_with(beta=torch.zeros(1, 6, 2).double()), "beta must be"),
        (_with(g=torch.zeros(1, 6, 4, 8)), "all in fp64"),
        (_with(beta=torch.zeros(1, 6, 4, dtype=torch.long)), "floating-point"),
        ({**_with(), "initial_state": torch.zeros(1, 4, 4, 8)}, "initial_state must be"),
        (
            {**_with(), "initial_state": torch.zeros(1, 4, 8, 4), "cu_seqlens": [0, 3, 6]},
            "initial_state must be",
        ),
        ({**_with(), "cu_seqlens": [1, 6]}, "must start with 0"),
        ({**_with(), "cu_seqlens": [0]}, "at least one end"),
        ({**_with(), "cu_seqlens": [0, 4, 3]}, "must not decrease"),
        ({**_with(), "cu_seqlens": [0, 7]}, "only 6 rows"),
        ({**_with(), "gate_lower_bound": 5.0}, "gate_lower_bound must be negative"),
        ({**_with(), "sequence_parts": 0}, "sequence_parts must be at least 1"),
        ({**_with(), "sequence_parts": 2, "backend": "naive"}, "needs backend='torch'"),
    ),
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        kda(**arguments)


def test_packed_needs_one_batch_entry():
    with pytest.raises(ValueError, match="batch of 1, got 2"):
        kda(*make_inputs(6, b=2)[:5], cu_seqlens=[0, 6])
