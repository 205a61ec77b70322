"""The carrier over a stand-in that fails in every way, and the real engine's return codes turned into errors."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from k3_plugins.feature import FeatureError
from k3_plugins.memory.remote import engine as engine_module
from k3_plugins.memory.remote.carrier import Lease, RemoteCarrier
from k3_plugins.memory.remote.errors import RemoteError
from k3_plugins.memory.remote.region import Region
from tests.unit.memory.activation_manager.toy import ToyModel, attach


class Memory:
    """A lender in this process: addresses are places in one tensor. `fault` is called before each transfer."""

    def __init__(self, nbytes=1 << 22):
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.fault = lambda kind, what: None

    def register(self, memory):
        pass

    def write(self, session, source, address, what):
        self.fault("write", what)
        self.bytes[address : address + source.numel()] = source

    def read(self, session, into, address, what):
        self.fault("read", what)
        into.copy_(self.bytes[address : address + into.numel()])


def carrier_over(memory, room=1 << 21, leases=None, **options):
    told = []
    leases = leases or [Lease(3, "here", 64, Region(room), room), Lease(5, "there", 64 + room, Region(room), room)]
    options = {"staging_bytes": 1 << 20, "timeout": 2.0, "report": told.append, **options}
    return RemoteCarrier(memory, leases, **options), told


def toy_step(memory, level=0, rules="*=remote", **options):
    """One step of the toy model whose tensors go away."""
    torch.manual_seed(0)
    model = ToyModel()
    manager, _ = attach(model, rules)
    manager.remote, told = carrier_over(memory, **options)
    manager.level = level
    model(torch.randn(32, 4, 64)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}, manager, told


def test_gradients_keep_their_bits_and_places_are_free_again():
    expected = toy_step(Memory(), level=1 << 40)[0]
    for checksums in (False, True):
        gradients, manager, told = toy_step(Memory(), checksums=checksums)
        assert all(torch.equal(gradients[name], value) for name, value in expected.items())
        carrier = manager.remote
        assert carrier.sent_bytes == carrier.fetched_bytes > 0 and not told
        manager.remote._thread.shutdown(wait=True)
        assert [lease.region.used for lease in carrier.leases] == [0, 0]
        assert manager.bytes_by_policy()["remote"] == carrier.sent_bytes


def test_below_its_level_a_rank_keeps_its_tensors():
    _, manager, _ = toy_step(Memory(), level=1 << 40)
    assert manager.remote.sent_bytes == 0 and set(manager.bytes_by_policy()) == {"keep"}
    whole = manager.ledger.peak
    _, manager, _ = toy_step(Memory(), level=whole // 2)
    assert 0 < manager.remote.sent_bytes < whole and manager.ledger.held == 0


def test_before_the_plan_remote_tensors_wait_in_host_buffers():
    torch.manual_seed(0)
    model = ToyModel()
    manager, _ = attach(model, "*=fp8+remote")
    model(torch.randn(32, 4, 64)).square().mean().backward()
    assert manager.pool.peak > 0 and manager.pool.used == 0
    assert {row.policy for row in manager.rows[0]} == {"fp8+remote", "remote"}


def test_a_full_lease_is_an_error_that_names_lender_and_layer():
    with pytest.raises(RemoteError, match=r"ranks lend is full: before the layers needs .*rank 3: .*headroom"):
        toy_step(Memory(), room=4096)


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_failed_transfer_ends_the_step_and_is_told(kind):
    memory = Memory()

    def fault(now, what):
        if now == kind:
            raise RemoteError(f"{what} could not be moved")

    memory.fault = fault
    with pytest.raises(RemoteError, match=r"\), \d+ bytes at rank 3, could not be moved"):
        toy_step(memory)


def test_bytes_that_changed_at_the_lender_are_noticed():
    memory = Memory()
    memory.fault = lambda kind, what: memory.bytes.fill_(7) if kind == "read" else None
    with pytest.raises(RemoteError, match="another checksum"):
        toy_step(memory, checksums=True)


def test_a_peer_that_hangs_is_given_up():
    memory, release = Memory(), threading.Event()
    memory.fault = lambda kind, what: release.wait(30) if kind == "read" else None
    start = time.monotonic()
    with pytest.raises(RemoteError, match="the peer hangs"):
        toy_step(memory, timeout=0.5)
    assert time.monotonic() - start < 5
    release.set()


def test_without_the_library_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(engine_module.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(FeatureError, match="libibverbs1"):
        engine_module.load()


@pytest.mark.mooncake
def test_the_engines_return_codes_become_errors():
    """Two engines of this process over tcp: right transfers, then every wrong one."""
    mine, theirs = (engine_module.Engine("127.0.0.1", "tcp", 5) for _ in range(2))
    lent = torch.zeros(1 << 16, dtype=torch.uint8)
    local = torch.randint(256, (1 << 16,), dtype=torch.uint8)
    back = torch.zeros_like(local)
    theirs.register(lent)
    for buffer in (local, back):
        mine.register(buffer)
    mine.write(theirs.session, local, lent.data_ptr(), "x")
    mine.read(theirs.session, back, lent.data_ptr(), "x")
    assert torch.equal(lent, local) and torch.equal(back, local)
    unregistered = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(RemoteError, match="local buffer is not registered"):
        mine.write(theirs.session, unregistered, lent.data_ptr(), "x")
    with pytest.raises(RemoteError, match="cannot register"):
        mine.register(local)
    for session, address in (
        (theirs.session, unregistered.data_ptr()),
        (theirs.session, lent.data_ptr() + 64),
        ("127.0.0.1:1", lent.data_ptr()),
        (mine.session, lent.data_ptr()),
    ):
        for transfer in (mine.write, mine.read):
            with pytest.raises(RemoteError, match="tensor t at rank 3 could not be .* Start again from the last"):
                transfer(session, back, address, "tensor t at rank 3")


LENDER = """
import ctypes, sys, torch
from k3_plugins.memory.remote.engine import Engine
engine, lent = Engine("127.0.0.1", "tcp", 5), torch.zeros(1 << 21, dtype=torch.uint8)
engine.register(lent)
print(engine.session, lent.data_ptr(), flush=True)
for _ in sys.stdin:
    lent.fill_(7)
    print("damaged", flush=True)
"""


@contextmanager
def lender_process():
    """Another process that lends 2 MiB over Mooncake's tcp; gives it and its lease. A line on its stdin damages all."""
    process = subprocess.Popen(
        [sys.executable, "-c", LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        for line in process.stdout:  # the engine writes lines of its own
            session, _, address = line.strip().rpartition(" ")
            if address.isdigit() and session.startswith("127.0.0.1:"):
                break
        yield process, lambda room=1 << 21: [Lease(3, session, int(address), Region(room), room)]
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


class Between:
    """The real engine; `action` is called once, before the first read: everything was written by then."""

    def __init__(self, engine, action=lambda: None):
        self._engine, self._actions = engine, [action]
        self.register, self.write = engine.register, engine.write

    def read(self, *arguments):
        if self._actions:
            self._actions.pop()()
        self._engine.read(*arguments)


@pytest.mark.mooncake
def test_a_step_over_the_real_transport_and_every_fault_of_its_lender():
    """The same bits; a loan that is full, damaged bytes, and a lender stopped or killed between writing and reading."""
    engine = engine_module.Engine("127.0.0.1", "tcp", 5)
    expected = toy_step(Memory(), level=1 << 40)[0]
    options = {"checksums": True, "staging_bytes": 1 << 18, "timeout": 10.0}
    gone = r"could not be read from .* \(code -?\d+\): the peer died or hangs"
    with lender_process() as (lender, leases):
        gradients, manager, told = toy_step(Between(engine), leases=leases(), **options)
        assert all(torch.equal(gradients[name], value) for name, value in expected.items())
        assert manager.remote.sent_bytes == manager.remote.fetched_bytes > 0 and not told

        with pytest.raises(RemoteError, match=r"ranks lend is full: before the layers needs .*rank 3: .*headroom"):
            toy_step(Between(engine), leases=leases(4096), **options)

        def damage():
            lender.stdin.write("\n")
            while "damaged" not in lender.stdout.readline():
                pass

        with pytest.raises(RemoteError, match="another checksum: the memory was overwritten"):
            toy_step(Between(engine, damage), leases=leases(), **options)

        def stop():
            os.kill(lender.pid, signal.SIGSTOP)
            os.waitpid(lender.pid, os.WUNTRACED)  # until all its threads stand

        start = time.monotonic()
        with pytest.raises(RemoteError, match=gone):
            toy_step(Between(engine, stop), leases=leases(), **options)
        assert time.monotonic() - start < 15

    with lender_process() as (lender, leases):
        start = time.monotonic()
        with pytest.raises(RemoteError, match=gone):
            toy_step(Between(engine, lambda: (lender.kill(), lender.wait())), leases=leases(), **options)
        assert time.monotonic() - start < 15
