"""fla's kernels through our interface against the token recurrence in fp64, on a CUDA device.

bf16 inputs, fp32 gates and states. The kernels multiply in bf16 or tf32, so errors are compared as a ratio of root mean
squares with limits near those of fla's own tests (0.5 % for outputs, 1 to 2 % for gradients).
"""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from k3_plugins.transformer.kda.context_parallel import kda_cp
from k3_plugins.transformer.kda.ops import kda, resolve_backend
from tests.unit.transformer.kda.ops.kda_cases import NAMES, cotangents, make_inputs

pytestmark = pytest.mark.gpu

LIMITS = dict(zip(NAMES, (0.005, 0.005, 0.01, 0.01, 0.01, 0.02, 0.02, 0.01), strict=True))


def rounded(inputs):
    """bf16 q, k, v and beta; fp32 g and state."""
    q, k, v, g, beta, state = (x.cuda() for x in inputs)
    return [q.bfloat16(), k.bfloat16(), v.bfloat16(), g.float(), beta.bfloat16(), state.float()]


def run(tensors, backend, gradients, **options):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    o, final = kda(*leaves[:5], initial_state=leaves[5], output_final_state=True, backend=backend, **options)
    loss = (o * gradients[0].to(o)).sum() + (final * gradients[1].to(final)).sum()
    return dict(zip(NAMES, (o, final, *torch.autograd.grad(loss, leaves)), strict=True))


def assert_close(got, want):
    for name, reference in want.items():
        assert torch.isfinite(got[name]).all(), name
        difference = (got[name].double() - reference.double()).square().mean().sqrt()
        ratio = (difference / reference.double().square().mean().sqrt()).item()
        assert ratio <= LIMITS[name], f"{name}: {ratio:.4f}"


@pytest.mark.parametrize("backend", ("fla", "torch"))
@pytest.mark.parametrize("lower_bound", (-5.0, None))
@pytest.mark.parametrize("t, hv", ((1, 2), (63, 2), (200, 4), (1024, 2)))
def test_equals_recurrence(backend, lower_bound, t, hv):
    inputs = make_inputs(t, b=2, h=2, hv=hv, k=64, v=64, lower_bound=lower_bound)
    tensors, gradients = rounded(inputs), [x.cuda() for x in cotangents(inputs)]
    got = run(tensors, backend, gradients, gate_lower_bound=lower_bound)
    assert_close(got, run([x.double() for x in tensors], "naive", gradients))


@pytest.mark.parametrize("backend", ("fla", "torch"))
@pytest.mark.parametrize("lower_bound", (-5.0, None))
def test_packed(backend, lower_bound):
    """Odd and empty sequences, and padding rows that must be exact zeros in outputs and gradients."""
    cu = [0, 6, 16, 16, 80, 145, 300]
    inputs = make_inputs(320, h=2, k=64, v=64, states=len(cu) - 1, lower_bound=lower_bound)
    tensors, gradients = rounded(inputs), [x.cuda() for x in cotangents(inputs)]
    boundaries = torch.tensor(cu, device="cuda")
    got = run(tensors, backend, gradients, gate_lower_bound=lower_bound, cu_seqlens=boundaries)
    assert_close(got, run([x.double() for x in tensors], "naive", gradients, cu_seqlens=cu))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (got[name][:, cu[-1] :] == 0).all(), name


def test_auto_chooses_fla():
    assert resolve_backend("auto", "cuda", torch.bfloat16)[0] == "fla"
    assert resolve_backend("auto", "cuda", torch.float64)[0] == "torch"


def test_broken_gate_promise_is_refused():
    tensors = rounded(make_inputs(70, k=64, v=64, lower_bound=None))
    tensors[3][:] = -30.0
    with pytest.raises(ValueError, match="was promised but g goes down to -30"):
        kda(*tensors[:5], backend="fla", gate_lower_bound=-5.0)


def _context_parallel_rank(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    cu = [0, 30, 100, 190]
    inputs = make_inputs(256, h=2, k=64, v=64)
    tensors, gradients = rounded(inputs)[:5], cotangents(inputs)[0].cuda()
    whole = [x.double().requires_grad_() for x in tensors]
    o = kda(*whole, backend="naive", cu_seqlens=cu)[0]
    want = dict(zip(NAMES, (o, None, *torch.autograd.grad(o, whole, gradients)), strict=False))
    rows = slice(rank * 256 // size, (rank + 1) * 256 // size)
    for backend in ("fla", "torch"):
        leaves = [x[:, rows].clone().requires_grad_() for x in tensors]
        o = kda_cp(*leaves, group=dist.group.WORLD, cu_seqlens=cu, backend=backend, gate_lower_bound=-5.0)
        got = dict(zip(NAMES, (o, None, *torch.autograd.grad(o, leaves, gradients[:, rows].to(o))), strict=False))
        assert_close(
            {n: x for n, x in got.items() if x is not None},
            {n: x[:, rows] for n, x in want.items() if x is not None},
        )
    dist.destroy_process_group()


@pytest.mark.parametrize("size", (2, 4))
def test_context_parallel(size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices, and there are {torch.cuda.device_count()}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_context_parallel_rank, (size, port), nprocs=size)
