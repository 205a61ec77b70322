"""Sends activations to lenders and has them back: the place behind policy `remote`.

One thread talks to the transport, in the order in which things were asked for, through registered staging buffers:
training waits only if all of them are in use, or if bytes that it needs are not back yet. A layer's activations lie
together in one stretch of one loan.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_plugins.memory.activation_manager.transfer import Blocked
from k3_plugins.memory.remote.engine import Engine
from k3_plugins.memory.remote.errors import RemoteError
from k3_plugins.memory.remote.region import ALIGNMENT, Region

STAGING_BUFFERS = 4


@dataclass(eq=False)
class Lease:
    """Memory of another rank that this one may use."""

    lender: int
    """Its global rank."""
    session: str
    address: int
    region: Region
    planned: int
    """Bytes that the plan counts with; the rest of the region is headroom, taken when every planned part is full."""


@dataclass(eq=False)
class Stretch:
    """A layer's part of a lease."""

    lease: Lease
    start: int
    nbytes: int
    filled: int = 0
    parcels: int = 0
    open: bool = True

    def release_if_empty(self) -> None:
        """Give it back when nobody uses it and nobody will."""
        if not self.open and self.parcels == 0:
            self.lease.region.give_back(self.start)


@dataclass(eq=False)
class RemoteParcel:
    """Bytes at a lender; see `transfer.Parcel`."""

    stretch: Stretch
    offset: int
    nbytes: int
    owner: str
    carrier: RemoteCarrier
    checksum: int | None = None
    sent: Future[None] | None = None

    @property
    def what(self) -> str:
        """For messages."""
        return f"{self.owner}, {self.nbytes} bytes at rank {self.stretch.lease.lender},"

    def discard(self) -> None:
        """The place is free once the write that was asked for has happened."""
        self.carrier.after_write(self)


@dataclass(eq=False)
class RemoteArrival:
    """A read that was asked for; see `transfer.Arrival`."""

    future: Future[Tensor]
    carrier: RemoteCarrier
    what: str

    def wait(self) -> Tensor:
        """The bytes, complete and, in the debug mode, with the checksum they left with.

        Raises:
            RemoteError: if they cannot be had.
        """
        return self.carrier.result(self.future, self.what)


class RemoteCarrier:
    """All leases of this rank.

    Args:
        engine: the transport.
        leases: in the order in which they are filled.
        staging_bytes: of each staging buffer: the largest single tensor.
        timeout: seconds after which a transfer counts as failed even if the transport does not return.
        checksums: whether to compare a CRC of every tensor.
        report: is told the text of a failure, so that other ranks can be told.
    """

    def __init__(
        self,
        engine: Engine,
        leases: Sequence[Lease],
        *,
        staging_bytes: int,
        timeout: float,
        checksums: bool = False,
        report: Callable[[str], None] = lambda text: None,
        pinned: bool = False,
    ) -> None:
        self.leases = tuple(leases)
        self.blocked = Blocked()
        self.sent_bytes = 0
        self.fetched_bytes = 0
        self._engine, self._timeout, self._checksums, self._report = engine, timeout, checksums, report
        self._thread = ThreadPoolExecutor(1, "activation-remote")
        self._staging: queue.Queue[Tensor] = queue.Queue()
        self._reading: Tensor | None = None  # of the thread alone: it must not wait for writes that are behind a read
        self._lock = threading.Lock()
        self._failure: RemoteError | None = None
        self._stretch: Stretch | None = None
        for _ in range(STAGING_BUFFERS + 1 if leases else 0):
            buffer = torch.empty(max(staging_bytes, ALIGNMENT), dtype=torch.uint8, device="cpu", pin_memory=pinned)
            engine.register(buffer)
            if self._reading is None:
                self._reading = buffer
            else:
                self._staging.put(buffer)

    # -- a layer ---------------------------------------------------------------------------------------------------

    def open_stretch(self, nbytes: int, owner: str) -> None:
        """Room for all tensors of a layer that will be sent now.

        Raises:
            RemoteError: if no lease has it.
        """
        within = [lease for lease in self.leases if lease.region.used + nbytes <= lease.planned]
        for lease in (*within, *self.leases):
            with self._lock:
                start = lease.region.take(nbytes)
            if start is not None:
                self._stretch = Stretch(lease, start, nbytes)
                return
        lent = ", ".join(f"rank {lease.lender}: {lease.region.used} of {lease.region.nbytes}" for lease in self.leases)
        raise self._failed(
            f"the memory that other ranks lend is full: {owner} needs {nbytes} bytes ({lent or 'nobody lends any'} in"
            " use); raise --activation-remote-headroom, or give fewer tensors a policy with remote"
        )

    def close_stretch(self) -> None:
        """Everything of the layer was sent."""
        stretch, self._stretch = self._stretch, None
        assert stretch is not None, "open_stretch comes first"
        with self._lock:
            stretch.open = False
            stretch.release_if_empty()

    # -- Carrier ---------------------------------------------------------------------------------------------------

    def send(self, payload: Tensor, owner: str) -> RemoteParcel:
        """See `transfer.Carrier`; the write itself happens later."""
        if self._failure is not None:
            raise self._failure
        stretch, size = self._stretch, payload.numel()
        assert stretch is not None, "open_stretch comes first"
        aligned = -(-size // ALIGNMENT) * ALIGNMENT
        if stretch.filled + aligned > stretch.nbytes:
            raise self._failed(f"{owner} does not fit into the {stretch.nbytes} bytes that its layer asked for")
        parcel = RemoteParcel(stretch, stretch.filled, size, owner, self)
        staging = self._staging_buffer(size, parcel.what)
        stretch.filled += aligned
        with self._lock:
            stretch.parcels += 1
        staging[:size].copy_(payload)
        if self._checksums:
            parcel.checksum = zlib.crc32(staging[:size].numpy())
        parcel.sent = self._thread.submit(self._write, parcel, staging)
        self.sent_bytes += size
        return parcel

    def fetch(self, parcel: RemoteParcel, into: Tensor) -> RemoteArrival:
        """See `transfer.Carrier`."""
        self.fetched_bytes += parcel.nbytes
        return RemoteArrival(self._thread.submit(self._read, parcel, into), self, parcel.what)

    def result(self, future: Future[Tensor], what: str) -> Tensor:
        """What the thread returned, within the time limit."""
        start, done = time.perf_counter(), future.done()
        try:
            return future.result(timeout=self._timeout)
        except FutureTimeout:
            raise self._failed(f"{what} did not come back within {self._timeout:g} s: the peer hangs") from None
        except RemoteError as error:
            raise self._failed(str(error)) from error
        finally:
            if not done:
                self.blocked.seconds += time.perf_counter() - start
                self.blocked.waits += 1

    def after_write(self, parcel: RemoteParcel) -> None:
        """Free a parcel's place when its write is over: one under way must not land on the next tensor."""

        def free(_: object = None) -> None:
            with self._lock:
                parcel.stretch.parcels -= 1
                parcel.stretch.release_if_empty()

        if parcel.sent is None:
            free()
        else:
            parcel.sent.add_done_callback(free)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _write(self, parcel: RemoteParcel, staging: Tensor) -> None:
        try:
            self._go_on()
            lease = parcel.stretch.lease
            address = lease.address + parcel.stretch.start + parcel.offset
            self._engine.write(lease.session, staging[: parcel.nbytes], address, parcel.what)
        except RemoteError as error:
            self._failed(str(error))
            raise
        finally:
            self._staging.put(staging)

    def _read(self, parcel: RemoteParcel, into: Tensor) -> Tensor:
        try:
            self._go_on()
            return self._read_now(parcel, into)
        except RemoteError as error:
            self._failed(str(error))
            raise

    def _go_on(self) -> None:
        """After a failure nothing is tried any more: what waits in the queue would wait for the same peer in turn."""
        if self._failure is not None:
            raise self._failure

    def _read_now(self, parcel: RemoteParcel, into: Tensor) -> Tensor:
        assert parcel.sent is not None and self._reading is not None
        parcel.sent.result()  # the same thread wrote before: raises what went wrong then
        lease, view = parcel.stretch.lease, self._reading[: parcel.nbytes]
        address = lease.address + parcel.stretch.start + parcel.offset
        self._engine.read(lease.session, view, address, parcel.what)
        if parcel.checksum is not None and zlib.crc32(view.numpy()) != parcel.checksum:
            raise RemoteError(f"{parcel.what} came back with another checksum: the memory was overwritten")
        return into.copy_(view)

    def _staging_buffer(self, size: int, what: str) -> Tensor:
        start = time.perf_counter()
        try:
            staging = self._staging.get(timeout=self._timeout)
        except queue.Empty:
            raise self._failed(f"{what} waited {self._timeout:g} s for a staging buffer: the peer hangs") from None
        if (waited := time.perf_counter() - start) > 1e-4:
            self.blocked.seconds += waited
            self.blocked.waits += 1
        if staging.numel() < size:
            self._staging.put(staging)
            raise self._failed(f"{what} is larger than a staging buffer ({staging.numel()} bytes)")
        return staging

    def _failed(self, text: str) -> RemoteError:
        error = RemoteError(text)
        if self._failure is None:
            self._failure = error
            self._report(text)
        return error
