"""What our code does around fla's kernel, with the kernel replaced by the recurrence (it needs a GPU).

The stand-in keeps the kernel's habits: it asks for contiguous fp32 states [N, HV, K, V], writes no row behind the last
boundary, and must be given no empty sequence.
"""

import itertools

import pytest
import torch

from k3_plugins.transformer.kda.ops import fla
from k3_plugins.transformer.kda.ops.inputs import check_inputs
from k3_plugins.transformer.kda.ops.naive import kda_naive
from tests.unit.transformer.kda.ops.kda_cases import make_inputs, relative_error


@pytest.fixture
def calls(monkeypatch):
    """Replace the kernel; the list of the keyword arguments that it got."""
    seen = []

    def chunk_kda(q, k, v, g, beta, *, scale, initial_state=None, output_final_state=False, cu_seqlens=None, **options):
        assert initial_state is None or initial_state.dtype == torch.float32
        cu = None if cu_seqlens is None else cu_seqlens.tolist()
        if cu is not None:
            assert all(b > a for a, b in itertools.pairwise(cu)) and cu[-1] == q.shape[1]
        seen.append(options | {"cu": cu})
        return kda_naive(inputs_of([q, k, v, g, beta], scale, initial_state, output_final_state, cu))

    monkeypatch.setattr("fla.ops.kda.chunk_kda", chunk_kda)
    return seen


def inputs_of(tensors, scale=None, initial_state=None, output_final_state=True, cu=None, lower_bound=None):
    return check_inputs(
        *tensors,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu,
        gate_lower_bound=lower_bound,
        sequence_parts=None,
    )


@pytest.mark.parametrize("cu", (None, [0, 6, 16, 16, 50], [0, 0, 20, 60], [0, 0]), ids=str)
@pytest.mark.parametrize("with_state", (True, False))
def test_arguments_and_results(calls, cu, with_state):
    inputs = [x.float() for x in make_inputs(60, hv=4, states=None if cu is None else len(cu) - 1)]
    leaves = [x.requires_grad_() for x in inputs[:5]]
    x = inputs_of(leaves, initial_state=inputs[5] if with_state else None, cu=cu)
    o, final = fla.kda_fla(x)
    want, want_final = kda_naive(x)
    assert relative_error(o, want) <= 1e-6 and relative_error(final, want_final) <= 1e-6
    if cu is not None:
        assert (o[:, cu[-1] :] == 0).all()
        if cu[-1]:
            grads = torch.autograd.grad(o.sum(), leaves)
            assert all((d[:, cu[-1] :] == 0).all() for d in grads)
    assert len(calls) == (0 if cu is not None and cu[-1] == 0 else 1)


def test_dense_tiles_only_for_a_true_promise(calls):
    tensors = [x.float() for x in make_inputs(20)[:5]]
    for lower_bound, safe in ((None, False), (-5.0, True), (-8.0, False)):
        fla.kda_fla(inputs_of(tensors, lower_bound=lower_bound))
        assert calls[-1]["safe_gate"] is safe and calls[-1]["lower_bound"] == (lower_bound if safe else None)
    tensors[3][0, 3] = -6.0
    with pytest.raises(ValueError, match="promised but g goes down to -6"):
        fla.kda_fla(inputs_of(tensors, lower_bound=-5.0))


def test_reasons_against():
    assert "needs a CUDA device; the tensors are on 'cpu'" in fla.reason_against(torch.device("cpu"), None)
    wide = [torch.zeros(1, 2, 1, 300), torch.zeros(1, 2, 1, 300), torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 300)]
    with pytest.raises(ValueError, match="key dims up to 256, got 300"):
        fla.kda_fla(inputs_of([*wide, torch.zeros(1, 2, 1)]))
