"""Moves bytes between the device and host buffers, so that fetching overlaps with computing.

Device memory on a GPU is copied on a stream of its own; on the CPU platform, where "device" and host are the same
memory, a thread copies. A `Parcel` is bytes that wait elsewhere; an `Arrival` is a fetch under way.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from k3_plugins.memory.activation_manager.host_pool import HostBuffer, HostPool


class Parcel(Protocol):
    """Bytes that left the device."""

    nbytes: int

    def discard(self) -> None:
        """Nobody will fetch it any more."""


class Arrival(Protocol):
    """A fetch that was started."""

    def wait(self) -> Tensor:
        """The bytes on the device, complete."""


class Carrier[P: Parcel](Protocol):
    """One place outside of the device."""

    def send(self, payload: Tensor, owner: str) -> P:
        """Copy uint8 ``[n]`` away; the payload may be freed when this returns."""

    def fetch(self, parcel: P, into: Tensor) -> Arrival:
        """Start to fill uint8 ``[n]`` on the device."""


@dataclass
class Blocked:
    """Time that the backward pass waited for arrivals."""

    seconds: float = 0.0
    waits: int = 0
    """Arrivals that were not complete when they were needed."""


@dataclass(eq=False)
class HostParcel:
    """In a buffer of the pool."""

    pool: HostPool
    buffer: HostBuffer
    nbytes: int
    ready: torch.cuda.Event | None = None
    """When the copy to the host ends, on a GPU."""

    def discard(self) -> None:
        """See `Parcel`."""
        if self.ready is not None:
            self.ready.synchronize()  # the next user of the buffer writes from another stream
        self.pool.give_back(self.buffer)


@dataclass(eq=False)
class ThreadArrival:
    """A fetch by a thread."""

    future: Future[Tensor]
    blocked: Blocked

    def wait(self) -> Tensor:
        """See `Arrival`; raises what the thread raised."""
        if self.future.done():
            return self.future.result()
        start = time.perf_counter()
        try:
            return self.future.result()
        finally:
            self.blocked.seconds += time.perf_counter() - start
            self.blocked.waits += 1


class HostCarrier:
    """Device memory that is host memory: a thread copies what is fetched."""

    def __init__(self, pool: HostPool, blocked: Blocked) -> None:
        self._pool, self._blocked = pool, blocked
        self._thread = ThreadPoolExecutor(1, "activation-fetch")

    def send(self, payload: Tensor, owner: str) -> HostParcel:
        """See `Carrier`."""
        buffer = self._pool.take(payload.numel(), pinned=False, owner=owner)
        buffer.bytes.copy_(payload)
        return HostParcel(self._pool, buffer, payload.numel())

    def fetch(self, parcel: HostParcel, into: Tensor) -> ThreadArrival:
        """See `Carrier`."""
        return ThreadArrival(self._thread.submit(into.copy_, parcel.buffer.bytes), self._blocked)


@dataclass(eq=False)
class StreamArrival:
    """A fetch on the copy stream."""

    into: Tensor
    done: torch.cuda.Event
    timings: list[tuple[torch.cuda.Event, torch.cuda.Event]]

    def wait(self) -> Tensor:
        """See `Arrival`; the compute stream waits, the host does not."""
        stream = torch.cuda.current_stream(self.into.device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(self.done)
        after.record(stream)
        self.into.record_stream(stream)
        self.timings.append((before, after))
        return self.into


class StreamCarrier:
    """A GPU and pinned host buffers."""

    def __init__(self, pool: HostPool, blocked: Blocked, device: torch.device) -> None:
        self._pool, self._blocked = pool, blocked
        self._stream = torch.cuda.Stream(device)
        self._timings: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def send(self, payload: Tensor, owner: str) -> HostParcel:
        """See `Carrier`."""
        buffer = self._pool.take(payload.numel(), pinned=True, owner=owner)
        self._stream.wait_stream(torch.cuda.current_stream(payload.device))
        with torch.cuda.stream(self._stream):
            buffer.bytes.copy_(payload, non_blocking=True)
        payload.record_stream(self._stream)
        return HostParcel(self._pool, buffer, payload.numel(), self._stream.record_event())

    def fetch(self, parcel: HostParcel, into: Tensor) -> StreamArrival:
        """See `Carrier`."""
        self._stream.wait_stream(torch.cuda.current_stream(into.device))  # `into` may reuse memory still being read
        with torch.cuda.stream(self._stream):
            into.copy_(parcel.buffer.bytes, non_blocking=True)
        into.record_stream(self._stream)
        return StreamArrival(into, self._stream.record_event(), self._timings)

    def settle(self) -> None:
        """Add up the waits of the step that ended; waits for the device."""
        for before, after in self._timings:
            after.synchronize()
            self._blocked.seconds += before.elapsed_time(after) / 1000
            self._blocked.waits += 1
        self._timings.clear()
