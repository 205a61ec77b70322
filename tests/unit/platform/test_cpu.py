"""The CPU platform's meaning of torch.cuda, device arguments, process groups and random draws.

The platform changes the whole process, so every test runs in a forked rank with the platform installed.
"""

import time

from tests.harness.spawn import spawn


def test_device_arguments(tmp_path):
    spawn(device_arguments, 1, tmp_path / "saved.pt")


def device_arguments(rank, world_size, path):
    import torch

    cpu = torch.device("cpu")
    spellings = ["cuda", "cuda:0", "cuda:3", 0, 2, torch.device("cuda"), torch.device("cuda", 1), torch.device(0)]
    base = torch.arange(6.0).reshape(2, 3)
    for device in spellings:
        made = [
            torch.empty(2, device=device),
            torch.zeros((2, 3), dtype=torch.int, device=device),
            torch.full((2,), 7, device=device),
            torch.tensor([1.0, 2.0], device=device),
            torch.as_tensor([1.0], device=device),
            torch.asarray([1.0], device=device),
            torch.arange(3, device=device),
            torch.randn(2, device=device),
            torch.rand_like(base, device=device),
            torch.empty_like(base, device=device),
            torch.empty(2, device=device, pin_memory=True),
            base.new_zeros((2,), device=device),
            base.new_tensor([1.0], device=device),
            base.to(device),
            base.to(device, torch.float64),
            base.to(device=device, dtype=torch.bfloat16, non_blocking=True),
            base.cuda(device),
            torch.nn.Linear(2, 2, device=device).weight,
            torch.nn.Linear(2, 2).to(device).weight,
            torch.nn.Linear(2, 2).cuda(device).weight,
        ]
        assert all(t.device == cpu for t in made), (device, [t.device for t in made])
    assert base.to("cuda") is base and base.cuda() is base  # aliases, as documented
    assert base.to(torch.float64).dtype is torch.float64
    assert base.to(torch.zeros(1, dtype=torch.int)).dtype is torch.int
    assert base.pin_memory() is base and not base.is_pinned()
    base.record_stream(torch.cuda.current_stream())
    assert torch.tensor(True).dtype is torch.bool  # True is an int, not a device

    # "meta" stays meta: in arguments and in the context, which must still know the wrapped factories.
    assert torch.empty(2, device="meta").is_meta
    with torch.device("meta"):
        assert torch.empty(2).is_meta and torch.nn.Linear(2, 2).weight.is_meta
    with torch.device("cuda"):
        assert torch.ones(2).device == cpu
    module = torch.nn.Linear(2, 2, device="meta").to_empty(device=torch.device("cuda"))
    assert module.weight.device == cpu

    # What Megatron's optimizers ask.
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)).type() == "torch.cuda.BFloat16Tensor"
    assert base.type(torch.cuda.HalfTensor).dtype is torch.half
    assert base.type("torch.cuda.DoubleTensor").dtype is torch.double
    assert base.type(torch.int32).dtype is torch.int32

    torch.save({"t": base}, path)
    for location in (None, "cuda", torch.device("cuda", 1), {"cuda:0": "cuda:1"}, lambda storage, _: storage):
        assert torch.equal(torch.load(path, map_location=location)["t"], base)
    assert torch.equal(torch.load(path, "cuda", weights_only=False)["t"], base)


def test_torch_cuda():
    spawn(torch_cuda, 1)


def torch_cuda(rank, world_size):
    import pytest
    import torch

    from k3_plugins.platform import PlatformError

    cuda = torch.cuda
    assert cuda.is_available() and cuda.is_initialized() and cuda.device_count() == 1 and cuda.current_device() == 0
    cuda.set_device(5)
    cuda.init()
    assert not torch.accelerator.is_available() and torch.accelerator.current_accelerator() is None
    assert cuda.get_device_capability() == (0, 0)
    properties = cuda.get_device_properties(torch.device("cuda:0"))
    assert properties.major == 0 and properties.total_memory > 2**30 and "CPU" in properties.name

    # Streams keep the interface and the order.
    outer = cuda.current_stream()
    side = cuda.Stream(device="cuda", priority=-1)
    side.wait_stream(outer)
    with cuda.stream(side):
        assert cuda.current_stream() is side
        with cuda.stream(None):
            assert cuda.current_stream() is side
        event = side.record_event()
    assert cuda.current_stream() is outer
    outer.wait_event(event)
    assert event.query() and side.query()
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert 20 <= start.elapsed_time(end) < 20_000  # milliseconds
    cuda.synchronize()

    # Memory figures are the process's own: 64 MiB more are seen, and a new peak can be started.
    before = cuda.memory_allocated()
    block = torch.ones(2**24)
    assert cuda.memory_allocated() - before > 0.9 * 2**26
    assert cuda.max_memory_allocated() >= cuda.memory_allocated() - 2**22
    high = cuda.max_memory_allocated()
    del block
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() < high
    stats = cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] - 2**22 > 0
    assert cuda.memory.memory_allocated is cuda.memory_allocated
    free, total = cuda.mem_get_info()
    assert 0 < free < total
    cuda.empty_cache()

    for sensor in (cuda.utilization, cuda.temperature, cuda.power_draw, cuda.clock_rate):
        with pytest.raises(PlatformError, match="GPU sensor"):
            sensor()

    # The "GPU's" generator is the CPU's, through every door Megatron uses.
    cuda.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    assert torch.equal(torch.rand(3), expected)
    cuda.manual_seed_all(11)
    state = cuda.get_rng_state()
    assert torch.equal(torch.rand(3), expected)
    cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), expected)
    cuda.random.set_rng_state(state, "cuda:0")
    assert torch.equal(torch.rand(3, device="cuda"), expected)

    # torch's own code asks for the generator of "the accelerator" here.
    with torch.random.fork_rng():
        torch.rand(1)
    torch.manual_seed(3)
    layer = torch.nn.Dropout(0.5)
    data = torch.ones(64, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(layer, data, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(data.grad, out.detach())  # the recomputed mask is the first one


def test_process_groups():
    results = spawn(process_groups, 2)
    assert results == [[0.0, 10.0], [1.0, 11.0, 12.0]]


def process_groups(rank, world_size):
    import numpy
    import torch
    import torch.distributed as dist

    assert dist.get_backend() == "gloo"
    group = dist.new_group([0, 1], backend="nccl", pg_options=dist.ProcessGroupNCCL.Options())
    assert dist.get_backend(group) == "gloo"
    mixed = dist.new_group(backend="cpu:gloo,cuda:nccl")
    dist.barrier(mixed, device_ids=[rank])
    sub, _ = dist.new_subgroups_by_enumeration([[0], [1]], backend="nccl")
    assert dist.get_backend(sub) == "gloo" and dist.get_world_size(sub) == 1

    average = torch.full((4,), float(rank), device="cuda", dtype=torch.bfloat16)
    dist.all_reduce(average, op=dist.ReduceOp.AVG, group=group)
    assert average.tolist() == [0.5] * 4
    shard = torch.empty(2)
    dist.reduce_scatter_tensor(shard, torch.arange(4.0), group=group)
    assert shard.tolist() == [4.0 * rank, 4.0 * rank + 2]

    # Megatron gathers and scatters the bf16 and the fp32 buffer of a chunk in one batch.
    pieces = [torch.full((2,), 1.5 + rank, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)]
    wholes = [torch.empty(4, dtype=piece.dtype) for piece in pieces]
    with dist._coalescing_manager(group, async_ops=True) as batch:
        for whole, piece in zip(wholes, pieces, strict=True):
            dist.all_gather_into_tensor(whole, piece, group=group)
    batch.wait()
    assert [whole.tolist() for whole in wholes] == [[1.5, 1.5, 2.5, 2.5]] * 3
    with dist._coalescing_manager(group):
        for whole, piece in zip(wholes, pieces, strict=True):
            dist.reduce_scatter_tensor(piece, whole, group=group)
    assert [piece.tolist() for piece in pieces] == [[3.0 + 2 * rank] * 2] * 3

    # Uneven splits as NumPy and tensor elements: rank 0 keeps 1 of 2 values, rank 1 keeps 2 of 3.
    send = torch.arange(2.0 + rank) + 10 * rank
    send_splits = numpy.array([1, 1 + rank])
    receive_splits = torch.tensor([1, 1]) if rank == 0 else torch.tensor([1, 2])
    out = torch.empty(int(receive_splits.sum()))
    dist.all_to_all_single(out, send, receive_splits, send_splits, group=group)
    return out.tolist()


def test_random_draws():
    first, second = spawn(random_draws, 2)
    assert first == second  # rank 0 had a loader, rank 1 had none


def random_draws(rank, world_size):
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(5)
    orders = []
    if rank == 0:
        for _ in range(2):
            loader = DataLoader(range(8), batch_size=2, shuffle=True, pin_memory=True, num_workers=0)
            orders.append([batch.tolist() for batch in loader])
            assert not loader.pin_memory
        assert orders[0] != orders[1], "two loaders must not shuffle alike"
        own = torch.Generator().manual_seed(1)
        assert DataLoader(range(8), shuffle=True, generator=own).generator is own
    return torch.rand(4).tolist()
