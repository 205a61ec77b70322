"""Buffers are used again, sizes waste little, and a full pool names the tensor."""

import pytest

from k3_plugins.memory.activation_manager.errors import ActivationError
from k3_plugins.memory.activation_manager.host_pool import HostPool, size_class
from tests.unit.memory.activation_manager.toy import step


def test_buffers_are_used_again():
    pool = HostPool()
    first = pool.take(10_000, pinned=False, owner="a")
    assert first.bytes.numel() == 10_000
    pool.give_back(first)
    second = pool.take(10_100, pinned=False, owner="b")  # of the same class
    assert second.memory.data_ptr() == first.memory.data_ptr()
    assert pool.allocated == pool.used == pool.peak == size_class(10_000)
    pool.take(10_000, pinned=False, owner="c")
    assert pool.allocated == 2 * size_class(10_000)


def test_size_classes():
    sizes = [size_class(n) for n in range(1, 200_000, 37)]
    assert all(n <= size <= max(n * 9 / 8, 4096) for n, size in zip(range(1, 200_000, 37), sizes, strict=True))
    assert len(set(sizes)) < 60


def test_a_full_pool_names_the_tensor():
    with pytest.raises(ActivationError, match=r"pool is full: mlp.* \(layer 1\) needs .*--activation-host-pool-mib"):
        step("mlp=cpu", pool_limit=20_000)
