"""State on disk and back: the same bits in the same tensors, and no failure that loses them."""

import errno
import json
import os
import resource
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from k3_plugins.memory.state_offload import collect, io, offload
from k3_plugins.memory.state_offload.collect import blocks_of, training_state
from k3_plugins.memory.state_offload.errors import StateOffloadError
from k3_plugins.memory.state_offload.offload import INDEX, StateOffload


def state():
    """All kinds of bits: NaN payloads, -0.0, views into one storage, an odd number of bytes."""
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    flat[7] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
    flat[8] = -0.0
    return {
        "flat": flat,
        "view": flat[100:3100].view(30, 100).t(),
        "half": torch.randn(333, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "bytes": torch.arange(4097, dtype=torch.int64).to(torch.uint8),
        "empty": torch.empty(0),
    }


def bits(tensors):
    # A clone: memory that was once lent to numpy cannot be resized any more.
    copies = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return {name: copy.view(-1).view(torch.uint8).numpy().tobytes() for name, copy in copies.items()}


def memory(tensors):
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors.values()}
    return sum(storages.values())


def small(folder, **options):
    return StateOffload(folder, smallest=0, **options)


@pytest.mark.parametrize("piece_bytes", [1 << 20, 999])
def test_the_same_bits_in_the_same_tensors(tmp_path, piece_bytes):
    tensors = state()
    objects, before, total = {n: id(t) for n, t in tensors.items()}, bits(tensors), memory(tensors)
    moved = small(tmp_path, piece_bytes=piece_bytes)
    assert moved.out(tensors) == total and moved.is_out
    assert memory(tensors) == 0 and tensors["view"].shape == (100, 30)
    files = list((tmp_path / "rank00000").glob("*.bin"))
    assert sum(f.stat().st_size for f in files) == total, "views were written twice, or something is missing"
    assert moved.back() == total and not moved.is_out
    assert bits(tensors) == before and {n: id(t) for n, t in tensors.items()} == objects
    assert tensors["view"].untyped_storage()._cdata == tensors["flat"].untyped_storage()._cdata
    assert not list(tmp_path.rglob("*.bin"))
    assert moved.out(tensors) == total and moved.back() == total and bits(tensors) == before  # a second time


def test_small_storages_stay(tmp_path):
    tensors = state()
    moved = StateOffload(tmp_path, smallest=5000)
    assert moved.out(tensors) == 20000
    assert tensors["half"].untyped_storage().nbytes() == 666
    moved.back()
    assert bits(tensors) == bits(state())


def test_the_index_names_every_tensor(tmp_path):
    moved = small(tmp_path)
    moved.out(state())
    index = json.loads((tmp_path / "rank00000" / INDEX).read_text())
    assert [block["name"] for block in index["blocks"]] == ["flat", "half", "bytes"]


def out_fails(tmp_path, tensors, moved, match):
    before = bits(tensors)
    with pytest.raises(StateOffloadError, match=match) as failure:
        moved.out(tensors)
    assert "stays in memory" in str(failure.value)
    assert not moved.is_out and bits(tensors) == before
    assert not list(tmp_path.rglob("*.bin")), "partial files are left"


def test_a_write_that_the_system_cuts_short(tmp_path):
    """A limit on file sizes: the kernel takes 8000 of 20000 bytes and then refuses, as a full disk does."""
    tensors, soft_hard = state(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, soft_hard[1]))
    try:
        out_fails(tmp_path, tensors, small(tmp_path), "flat.*cannot be written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    moved = small(tmp_path)
    moved.out(tensors)
    moved.back()
    assert bits(tensors) == bits(state())


@pytest.mark.parametrize("kind", ["full in the middle", "reports success", "too small from the start", "not a folder"])
def test_other_disks_that_fail(tmp_path, monkeypatch, kind):
    folder, match = tmp_path, "cannot be written"
    write = io.PlainFiles.write

    def broken(self, path, piece):
        if path.name.startswith("000001") and kind == "full in the middle":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, path, piece[:-5] if path.name.startswith("000001") and kind == "reports success" else piece)

    monkeypatch.setattr(io.PlainFiles, "write", broken)
    if kind == "reports success":
        match = "half.*661 of 666 bytes were written"
    elif kind == "too small from the start":
        monkeypatch.setattr(offload.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
        match = "100 bytes free, the state takes 24763"
    elif kind == "not a folder":
        folder, match = tmp_path / "file", "NotADirectoryError|FileExistsError"
        folder.write_text("")
    out_fails(tmp_path, state(), small(folder), match)


@pytest.mark.parametrize("damage", ["short", "long", "missing", "changed"])
def test_damaged_files_leave_the_state_on_disk(tmp_path, damage):
    tensors = state()
    moved = small(tmp_path)
    moved.out(tensors)
    path = tmp_path / "rank00000" / "000001.0000.bin"
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"short": good[:-1], "long": good + b"x", "changed": b"?" + good[1:]}[damage])
    for _ in range(2):
        with pytest.raises(StateOffloadError, match="stays on disk.*000001.0000.bin.*half"):
            moved.back()
        assert moved.is_out and memory(tensors) == 0, "half of a state in memory looks like all of it"
    path.write_bytes(good)
    moved.back()
    assert bits(tensors) == bits(state())


def test_leftovers_of_a_killed_job_are_removed(tmp_path):
    for name in (".rank00000.partial", "rank00000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "000009.0000.bin").write_bytes(b"old")
    moved, tensors = small(tmp_path), state()
    moved.out(tensors)
    assert not (tmp_path / ".rank00000.partial").exists()
    assert not (tmp_path / "rank00000" / "000009.0000.bin").exists()


def test_wrong_calls(tmp_path):
    moved, tensors = small(tmp_path), state()
    with pytest.raises(StateOffloadError, match=r"call out\(\) first"):
        moved.back()
    moved.out(tensors)
    with pytest.raises(StateOffloadError, match=r"call back\(\) first"):
        moved.out(tensors)
    with pytest.raises(StateOffloadError, match="choose one of files, deepspeed"):
        StateOffload(tmp_path, io="tape")
    with pytest.raises(StateOffloadError, match="piece_bytes=0"):
        StateOffload(tmp_path, piece_bytes=0)
    borrowed = {"from numpy": torch.from_numpy(np.ones(10000))}
    with pytest.raises(StateOffloadError, match="from numpy lies in memory that torch shares"):
        blocks_of(borrowed)


def test_a_state_that_is_out_cannot_move_again(tmp_path):
    """Neither by another object nor into its folder: either would leave nothing to come back."""
    tensors = state()
    first, second = small(tmp_path), small(tmp_path)
    first.out(tensors)
    other = {"other": torch.ones(1000)}
    with pytest.raises(StateOffloadError, match="stays in memory.*holds a state that is out now.*another folder"):
        second.out(other)
    assert torch.equal(other["other"], torch.ones(1000)) and not second.is_out
    with pytest.raises(StateOffloadError, match="stays in memory.*flat has no memory: it is out already"):
        small(tmp_path / "elsewhere").out(tensors)
    assert first.is_out and list((tmp_path / "rank00000").glob("*.bin"))
    first.back()
    assert bits(tensors) == bits(state())
    second.out(other)  # the folder is free again
    second.back()
    assert torch.equal(other["other"], torch.ones(1000))


def test_memory_that_runs_out_on_the_way_back_leaves_the_state_on_disk(tmp_path, monkeypatch):
    tensors, moved = state(), small(tmp_path)
    moved.out(tensors)
    allocate, calls = collect.Block.allocate, []

    def fails_at_the_second(block):
        calls.append(block.name)
        if len(calls) == 2:
            raise MemoryError("no memory")
        allocate(block)

    monkeypatch.setattr(collect.Block, "allocate", fails_at_the_second)
    with pytest.raises(StateOffloadError, match="stays on disk: MemoryError: no memory"):
        moved.back()
    assert calls == ["flat", "half"] and moved.is_out and memory(tensors) == 0
    moved.back()
    assert bits(tensors) == bits(state())


def test_files_that_cannot_be_removed_do_not_hide_that_the_state_is_back(tmp_path, monkeypatch):
    tensors, moved = state(), small(tmp_path)
    moved.out(tensors)
    with monkeypatch.context() as patched:

        def refuses(path):
            raise PermissionError(13, "Permission denied")

        patched.setattr(offload.shutil, "rmtree", refuses)
        with pytest.raises(StateOffloadError, match="is in memory again.*Permission denied"):
            moved.back()
    assert not moved.is_out and bits(tensors) == bits(state())
    moved.out(tensors)  # removes them
    moved.back()


def test_nothing_to_move(tmp_path):
    moved = StateOffload(tmp_path)
    assert moved.out({"small": torch.ones(3)}) == 0 and moved.back() == 0


def test_a_torch_optimizer_continues_as_if_nothing_had_happened(tmp_path):
    def train(interrupted):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(6):
            if step == 3 and interrupted:
                moved, tensors = small(tmp_path), training_state([model], optimizer)
                assert {"chunk0.1.running_mean", "optimizer0.0.exp_avg", "optimizer0.0.step"} <= tensors.keys()
                moved.out(tensors)
                assert model[0].weight.untyped_storage().nbytes() == 0
                assert optimizer.state[model[0].weight]["exp_avg"].untyped_storage().nbytes() == 0
                moved.back()
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return bits(dict(model.state_dict()))

    assert train(True) == train(False)


# -- DeepSpeed's async_io, with a stand-in that fails as the real one does ---------------------------------------------


class FakeHandle:
    """What 0.19's aio_handle was seen to do; where it aborts the process, this raises SystemError."""

    locked: list[int] = []
    """Addresses of buffers that were not given back; the real ones stay locked until the process ends."""
    lent = 0

    def new_cpu_locked_tensor(self, count, example):
        assert count > 0
        tensor = torch.empty(count, dtype=example.dtype)
        self.locked.append(tensor.data_ptr())
        FakeHandle.lent += 1
        return tensor

    def free_cpu_locked_tensor(self, tensor):
        if tensor.data_ptr() not in self.locked:
            return False
        self.locked.remove(tensor.data_ptr())
        return True

    def sync_pwrite(self, piece, path):
        if not os.path.isdir(os.path.dirname(path)):
            return -1
        whole = piece.numel() % 4096 == 0
        with open(path, "wb") as file:
            file.write(piece.numpy().tobytes() if whole else b"")
        return 1

    def sync_pread(self, piece, path):
        if os.path.getsize(path) < piece.numel():
            raise SystemError("the real one aborts here")
        piece.copy_(torch.from_numpy(np.fromfile(path, dtype=np.uint8)))
        return 1


@pytest.fixture
def deepspeed(monkeypatch):
    modules = {name: ModuleType(name) for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.op_builder")}
    handles = SimpleNamespace(aio_handle=lambda *sizes: FakeHandle())
    modules["deepspeed.ops.op_builder"].AsyncIOBuilder = lambda: SimpleNamespace(load=lambda: handles)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(io, "require", lambda module, purpose: modules[module])
    monkeypatch.setattr(FakeHandle, "locked", [])
    monkeypatch.setattr(FakeHandle, "lent", 0)
    return modules["deepspeed.ops.op_builder"]


@pytest.mark.parametrize("piece_bytes", [1 << 20, 4096])
def test_async_io_pads_to_its_block_and_checks_sizes(tmp_path, deepspeed, piece_bytes):
    tensors = state()
    moved = small(tmp_path, io="deepspeed", piece_bytes=piece_bytes)
    moved.out(tensors)
    files = list((tmp_path / "rank00000").glob("*.bin"))
    assert files and all(f.stat().st_size % 4096 == 0 for f in files)
    last = max(files)
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(StateOffloadError, match="holds 8191|holds 4095"):
        moved.back()
    last.write_bytes(last.read_bytes() + b"\0")
    moved.back()
    assert bits(tensors) == bits(state())


def test_async_io_gives_its_locked_buffers_back(tmp_path, deepspeed, monkeypatch):
    """After success and after every kind of failure: otherwise a few phases use up the host's locked memory."""
    tensors, moved = state(), small(tmp_path, io="deepspeed")
    moved.out(tensors)
    assert FakeHandle.lent == 1 and not FakeHandle.locked
    damaged = tmp_path / "rank00000" / "000001.0000.bin"
    good = damaged.read_bytes()
    damaged.write_bytes(b"?" + good[1:])
    with pytest.raises(StateOffloadError, match="is damaged"):
        moved.back()
    assert FakeHandle.lent == 2 and not FakeHandle.locked
    damaged.write_bytes(good)
    moved.back()
    assert FakeHandle.lent == 3 and not FakeHandle.locked
    monkeypatch.setattr(FakeHandle, "sync_pwrite", lambda self, piece, path: -1)
    with pytest.raises(StateOffloadError, match="async_io returned -1"):
        moved.out(tensors)
    assert FakeHandle.lent == 4 and not FakeHandle.locked
    assert bits(tensors) == bits(state())


def test_async_io_that_cannot_be_used(tmp_path, deepspeed):
    def broken():
        raise RuntimeError("Unable to JIT load the async_io op")

    deepspeed.AsyncIOBuilder = lambda: SimpleNamespace(load=broken)
    with pytest.raises(StateOffloadError, match=r"Unable to JIT load.*libaio-dev.*io='files'"):
        StateOffload(tmp_path, io="deepspeed")
    with pytest.raises(StateOffloadError, match="multiple of 4096"):
        deepspeed.AsyncIOBuilder = lambda: SimpleNamespace(load=lambda: SimpleNamespace(aio_handle=lambda *a: None))
        StateOffload(tmp_path, io="deepspeed", piece_bytes=1000)
