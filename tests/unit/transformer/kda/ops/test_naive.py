"""The single-token form of the recurrence, as generation uses it."""

import pytest
import torch

from k3_plugins.transformer.kda.ops import kda, kda_step
from tests.unit.transformer.kda.ops.kda_cases import make_inputs, relative_error


@pytest.mark.parametrize("with_state", (True, False))
def test_steps_equal_whole_sequence(with_state):
    *tensors, state = make_inputs(70, b=2, h=2, hv=4, v=24)
    state = state if with_state else None
    want, want_state = kda(*tensors, initial_state=state, output_final_state=True, backend="torch", scale=0.3)
    for t in range(tensors[0].shape[1]):
        o, state = kda_step(*(x[:, t] for x in tensors), state, scale=0.3)
        assert relative_error(o, want[:, t]) <= 1e-12
    assert relative_error(state, want_state) <= 1e-12


def test_a_prompt_in_chunks_then_tokens():
    """The state of the chunkwise form continues token by token, and the other way round."""
    *tensors, _ = make_inputs(100)
    want, _ = kda(*tensors, backend="naive")
    o, state = kda(*(x[:, :67] for x in tensors), output_final_state=True, backend="torch")
    step, state = kda_step(*(x[:, 67] for x in tensors), state)
    rest, _ = kda(*(x[:, 68:] for x in tensors), initial_state=state, backend="torch")
    assert relative_error(torch.cat((o, step.unsqueeze(1), rest), dim=1), want) <= 1e-12


def test_state_stays_fp32_in_bf16():
    *tensors, _ = (x.bfloat16() for x in make_inputs(3))
    o, state = kda_step(*(x[:, 0] for x in tensors), None)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
