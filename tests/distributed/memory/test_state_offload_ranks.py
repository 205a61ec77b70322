"""State offload of a Megatron model on several ranks: all of them move, or none."""

import pytest
import torch

from k3_plugins.distributed.pipeline_zero2.config import PipelineZeRO2Config
from k3_plugins.memory.state_offload.collect import training_state
from k3_plugins.memory.state_offload.errors import StateOffloadError
from k3_plugins.memory.state_offload.io import PlainFiles
from k3_plugins.memory.state_offload.offload import StateOffload
from tests.harness.spawn import spawn

SMALLEST = 2048  # step counts and biases stay: every file is synchronised with the disk


def memory_is_free(tensors):
    left = [t.untyped_storage().nbytes() for t in tensors.values()]
    return left.count(0) > len(left) // 10 and all(size < SMALLEST for size in left)


def snapshot(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same_bits(tensors, before):
    assert tensors.keys() == before.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.detach().view(-1).view(torch.uint8), before[name].view(-1).view(torch.uint8)), name


def move_and_train(rank, world_size, folder):
    """PP 2: train, move out and back, train on; the same with a rank whose disk fails, in both directions."""
    from benchmarks.pipeline_zero2 import Shape, build

    shape = Shape(pipeline=2, virtual=1, micro_batches=2, hidden=32)
    for config in (None, PipelineZeRO2Config(zero2_optimizer_device="cpu")):
        reference = build(shape, config)
        expected = [reference.step(number) for number in range(4)]
        training = build(shape, config)
        found = [training.step(0), training.step(1)]
        tensors = training_state(training.chunks, training.optimizer)
        before = snapshot(tensors)
        offload = StateOffload(folder, smallest=SMALLEST)
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors.values()}
        assert offload.out(tensors) == sum(size for size in sizes.values() if size >= SMALLEST)
        assert memory_is_free(tensors)
        assert all(p.untyped_storage().nbytes() == 0 for c in training.chunks for p in c.parameters())
        offload.back()
        same_bits(tensors, before)
        found += [training.step(2), training.step(3)]
        assert found == expected

    tensors = training_state(training.chunks, training.optimizer)
    before = snapshot(tensors)
    write, read = PlainFiles.write, PlainFiles.read
    if rank == 1:
        PlainFiles.write = fails
    with pytest.raises(StateOffloadError, match="stays in memory, unchanged: rank 1: .*No space left"):
        offload.out(tensors)
    same_bits(tensors, before)
    PlainFiles.write = write
    offload.out(tensors)
    if rank == 0:
        PlainFiles.read = fails
    with pytest.raises(StateOffloadError, match="stays on disk: rank 0: .*No space left"):
        offload.back()
    assert offload.is_out and memory_is_free(tensors)
    PlainFiles.read = read
    offload.back()
    same_bits(tensors, before)


def fails(self, path, piece):
    raise OSError(28, "No space left on device")


def test_state_offload_on_two_ranks(tmp_path):
    spawn(move_and_train, 2, str(tmp_path))
    assert not list(tmp_path.rglob("*.bin"))
