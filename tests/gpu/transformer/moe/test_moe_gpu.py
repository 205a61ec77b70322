"""Experts, planner and exchanges on CUDA devices: against the token loop and the host planner, without a host read.

Written without a GPU at hand: NOT RUN yet.
"""

import os
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist

from k3_plugins.transformer.moe.moonep import planner, planner_torch
from k3_plugins.transformer.moe.moonep.exchange import CollectiveExchange
from k3_plugins.transformer.moe.moonep.loads import SHAPES
from k3_plugins.transformer.moe.moonep.transport import AllToAll
from k3_plugins.transformer.moe.ops import segment_gemm
from tests.distributed.transformer.moe import flight_cases
from tests.distributed.transformer.moe.flight_cases import FlightCase

pytestmark = pytest.mark.gpu

# bf16: 2^-8 for each of the rows, hidden layer, activation and output, relative to the largest entry.
BF16 = 0.03
FP32 = 2e-5
CASES = (
    FlightCase(T=256, k=4, E=16, l=128, f=128, load="zipf", dtype=torch.bfloat16, device="cuda"),
    FlightCase(T=256, k=4, E=16, l=128, f=128, load="single_hot", dtype=torch.bfloat16, device="cuda"),
)


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 0.01), (torch.float32, FP32)])
def test_grouped_gemm_with_empty_segments_and_slack(dtype, tolerance):
    assert not torch.backends.cuda.matmul.allow_tf32
    torch.manual_seed(0)
    sizes = [0, 5, 0, 17, 64, 0]
    n, ends = sum(sizes), torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, y = (torch.randn(n + 9, w).to(dtype) for w in (64, 96))
    x[n:], y[n:] = float("nan"), float("nan")
    w = torch.randn(len(sizes), 96, 64).to(dtype)
    rows = segment_gemm.multiply(x.cuda(), w.cuda(), ends.cuda()).cpu()
    assert (rows[n:] == 0).all()
    want = segment_gemm.multiply(x.double(), w.double(), ends)
    torch.testing.assert_close(rows.double(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())
    outer = segment_gemm.outer(y.cuda(), x.cuda(), ends.cuda()).cpu()
    want = segment_gemm.outer(y.double(), x.double(), ends)
    torch.testing.assert_close(outer.double(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("size", [(64, 8), (896, 64)])
def test_the_device_planner_never_waits_and_agrees_with_the_host(size):
    for shape in SHAPES.values():
        counts = shape(np.random.default_rng(1), *size, 4096)
        on_device = torch.from_numpy(counts).cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan = planner_torch.plan(on_device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        host, device = planner.plan(counts), plan.to_host()
        np.testing.assert_array_equal(host.assignment, device.assignment)
        np.testing.assert_array_equal(host.slots, device.slots)


def _rank(rank, size, port, transport):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    group = dist.group.WORLD
    if transport == "moonep":
        from k3_plugins.transformer.moe.moonep.package import PackageExchange

        exchange = PackageExchange(group)
    else:
        exchange = CollectiveExchange(AllToAll(group))
    for case in CASES:
        want = flight_cases.expected(case)
        for memory_efficient in (True, False):
            got, flight = flight_cases.run(case, exchange, memory_efficient)
            flight_cases.compare(got, want, BF16, (case, memory_efficient))
            assert int(flight.report.rows) == int(flight.report.share) == case.T * case.k
            assert int(flight.report.slots_anywhere) > 0
    dist.destroy_process_group()


def _start(size, transport):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices, and there are {torch.cuda.device_count()}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (size, port, transport), nprocs=size)


@pytest.mark.parametrize("size", (2, 4))
def test_nccl_exchange_equals_the_token_loop(size):
    _start(size, "torch")


@pytest.mark.parametrize("size", (2, 4, 8))
def test_package_exchange_equals_the_token_loop(size):
    pytest.importorskip("moonep", reason="the moonep package is not installed")
    _start(size, "moonep")
