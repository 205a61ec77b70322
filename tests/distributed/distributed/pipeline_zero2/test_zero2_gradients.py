"""Gradients of pipeline-zero2 on Megatron's schedules: memory, counts, and faults.

Others shipped: gradients doubled per micro-batch at DP 1; ZeRO-2 with a pipeline that counted gradients twice; a buffer
reused while it was still being copied out; an unused parameter that broke the buckets.
"""

import argparse
import time

import pytest
import torch

from k3_plugins.distributed.pipeline_zero2.config import PipelineZeRO2Config
from k3_plugins.distributed.pipeline_zero2.validate import REFUSALS
from tests.harness.spawn import spawn

STEPS = 3
CONFIG = PipelineZeRO2Config()
# Some gradients are 0 but for rounding (a key bias shifts all logits of a softmax); AdamW with its usual eps would move
# such an element by the learning rate in a direction that rounding decides.
SMALL = {"hidden": 32, "adam_eps": 1e-4}


def trajectory(training, steps=STEPS):
    """Losses and norms of all steps, and the parameters after them."""
    seen = [training.step(number) for number in range(steps)]
    parameters = [p.detach().clone() for chunk in training.chunks for p in chunk.parameters()]
    return [loss for losses, _ in seen for loss in losses], [norm for _, norm in seen], parameters


def same(mine, his, tolerance):
    for a, b in zip(mine[0] + mine[1], his[0] + his[1], strict=True):
        assert abs(a - b) <= tolerance * abs(b), (a, b)
    for a, b in zip(mine[2], his[2], strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-2)


def memory(training):
    """Check device memory whenever a chunk's backward is over; the formula is 2 * 4N/V, N with Megatron's padding."""
    report = training.zero2.report()
    chunks = training.zero2.chunks
    sizes = [4 * sum(buffer.numel for buffer in chunk.ddp.buffers) for chunk in chunks]
    expected = 2 * max(sizes) if len(chunks) > 2 else sum(sizes)
    assert training.gradient_bytes() == report.device_bytes == expected
    seen = []
    for chunk in chunks:
        original = chunk._after_backward

        def watched(original=original):
            original()
            seen.append(training.gradient_bytes())

        chunk._after_backward = watched
    return report, seen


def four_chunks(rank, world_size):
    """PP 2 VPP 4, DP world/2: the middle chunks are equal, so without the ends this is exactly 2 * 4N/V."""
    # The benchmark installs the CPU platform, which is for the ranks only.
    from benchmarks.pipeline_zero2 import Shape, Volume, build

    shape = Shape(pipeline=2, virtual=4, micro_batches=8, vocabulary=16, **SMALL)
    with Volume() as stock_volume:
        reference = trajectory(build(shape, None))
    with Volume() as volume:
        training = build(shape, CONFIG)
        report, seen = memory(training)
        found = trajectory(training)
    same(found, reference, 1e-6)
    assert set(seen) == {report.device_bytes} and len(seen) == STEPS * 4 * 8
    data = world_size // 2
    assert report.host_bytes * data == report.stock_device_bytes
    assert report.device_bytes < 0.6 * report.stock_device_bytes
    report = training.zero2.report()
    assert report.reductions == (4, 4, 4, 4) and report.micro_batches == (8, 8, 8, 8)
    assert volume.bytes == 4 * stock_volume.bytes == STEPS * report.reduced_bytes
    # The shards of the step fit into the idle slots from D = V/2 on.
    assert (report.borrowed_beyond == 0) == (data > 1)

    # Whole batches in two slots for four chunks: the chunk that waited longest hands in early.
    training = build(shape, PipelineZeRO2Config(zero2_group=8))
    same(trajectory(training), reference, 1e-6)
    assert min(training.zero2.report().reductions) > 1

    on_cpu = build(shape, PipelineZeRO2Config(zero2_optimizer_device="cpu"))
    same(trajectory(on_cpu), reference, 1e-6)
    host = {c.host.untyped_storage().data_ptr() for c in on_cpu.zero2.chunks}
    device = {b.param_data.untyped_storage().data_ptr() for c in on_cpu.chunks for b in c.buffers}
    for part in on_cpu.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                assert main.grad.untyped_storage().data_ptr() in host, "the gradient was copied"
                assert main.untyped_storage().data_ptr() not in device, "the master weight is the model's"


@pytest.mark.parametrize("nprocs", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_four_chunks(nprocs):
    spawn(four_chunks, nprocs)


def one_process(rank, world_size):
    """DP 1, no pipeline: everything that can be seen without peers."""
    from benchmarks.pipeline_zero2 import Shape, build

    shape = Shape(pipeline=1, virtual=1, micro_batches=4, **SMALL)
    reference = trajectory(build(shape, None))

    # The gradient of a batch does not grow with the number of reductions.
    for group in (None, 1, 2, 3):
        training = build(shape, PipelineZeRO2Config(zero2_group=group))
        report, seen = memory(training)
        same(trajectory(training), reference, 0 if group is None else 1e-6)
        assert report.device_bytes == report.stock_device_bytes == report.host_bytes and len(seen) == STEPS * 4
        assert training.zero2.report().reductions == ({None: 1, 1: 4, 2: 2, 3: 2}[group],)

    for elements in (7, 1):
        unused_parameter(shape, build, elements)
    counted_zeros(shape, build)
    moved_once(shape, build)
    slow_and_broken_drains(shape, build)
    misuse(shape, build)
    refused_flags_exist()


def unused_parameter(shape, build, elements):
    trajectories = []
    for config in (None, PipelineZeRO2Config(zero2_group=1)):
        training = build(shape, config, unused=elements)
        trajectories.append(trajectory(training))
        unused = training.chunks[0].module.unused
        assert unused.grad is None and not unused.isnan().any()
    same(trajectories[1], trajectories[0], 1e-6)


def counted_zeros(shape, build):
    """--log-num-zeros-in-grad: rows of the embedding that no token uses, and a parameter without a gradient."""
    found = {}
    for device in ("stock", "device", "cpu"):
        training = build(
            shape, None if device == "stock" else PipelineZeRO2Config(zero2_optimizer_device=device), unused=7
        )
        step, counts = training.optimizer.step, []
        for part in training.optimizer.chained_optimizers:
            part.config.log_num_zeros_in_grad = True

        def counted(step=step, counts=counts):
            counts.append(step())
            return counts[-1]

        training.optimizer.step = counted
        training.step(0)
        found[device] = counts[0][2]
    assert found["stock"] == found["device"] == found["cpu"] > 7, found


def moved_once(shape, build):
    """Moments that exist would be lost, and a second move would take the first one's masters for the model's."""
    from k3_plugins.distributed.pipeline_zero2.host_step import move_to_host

    (part,) = build(shape, PipelineZeRO2Config(zero2_optimizer_device="cpu")).optimizer.chained_optimizers
    with pytest.raises(RuntimeError, match="steps in host memory already"):
        move_to_host(part, "torch", [])
    training = build(shape, None)
    training.step(0)
    (part,) = training.optimizer.chained_optimizers
    inner, masters = part.optimizer, [p.data_ptr() for group in part.optimizer.param_groups for p in group["params"]]
    with pytest.raises(RuntimeError, match="move it to host memory before that"):
        move_to_host(part, "torch", [])
    assert part.optimizer is inner
    assert [p.data_ptr() for group in inner.param_groups for p in group["params"]] == masters


def slow_and_broken_drains(shape, build):
    """The buffer of a group must not be touched while its shard is on the way to the host shards."""
    from k3_plugins.distributed.pipeline_zero2 import slots

    config = PipelineZeRO2Config(zero2_group=1)
    original, expected = slots._add_to_host, trajectory(build(shape, config))

    def slow(event, copies, first):
        time.sleep(0.02)
        original(event, copies, first)

    def broken(event, copies, first):
        raise MemoryError("no page-locked memory")

    try:
        slots._add_to_host = slow
        same(trajectory(build(shape, config)), expected, 0)
        slots._add_to_host = broken
        with pytest.raises(MemoryError, match="page-locked"):
            build(shape, config).step(0)
    finally:
        slots._add_to_host = original


def misuse(shape, build):
    training = build(shape, CONFIG)
    training.step(0)
    chunk = training.zero2.chunks[0]
    param = next(training.chunks[0].parameters())
    with pytest.raises(RuntimeError, match="must match"):  # a gradient outside the hooks
        param.main_grad.add_(torch.ones_like(param))
    single = build(shape, CONFIG, unused=1)
    for gradient in (torch.ones(1), torch.ones(()), torch.ones(1, 1)):  # it would broadcast to no element at all
        with pytest.raises(RuntimeError, match="single memory location|must match"):
            single.chunks[0].module.unused.main_grad.add_(gradient)
    single.step(0)
    with pytest.raises(RuntimeError, match="single memory location|must match"):
        single.chunks[0].module.unused.main_grad.add_(torch.ones(1))
    with pytest.raises(RuntimeError, match="save-wgrads-interval"):
        chunk.finish(force_all_reduce=True)
    chunk.begin_step()
    training.zero2.pool.take(chunk)
    with pytest.raises(RuntimeError, match="while gradients are accumulated"):
        training.zero2.pool.borrow(8)
    # A backward that was given up half way (a rerun) leaves nothing behind.
    again = build(shape, CONFIG)
    again.zero2.pool.take(again.zero2.chunks[0])
    again.zero2.chunks[0]._in_backward = True
    same(trajectory(again), trajectory(build(shape, None)), 0)


def refused_flags_exist():
    """A flag that Megatron renamed must not be let through."""
    from megatron.training.arguments import add_megatron_arguments

    known = {action.dest for action in add_megatron_arguments(argparse.ArgumentParser())._actions}
    assert not {refusal.field for refusal in REFUSALS} - known


def test_one_process():
    spawn(one_process, 1)
