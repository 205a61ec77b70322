"""`torch.cuda` on a machine without CUDA: one device, which is this process.

Execution is in program order, so streams and events have nothing to order; they keep the interface, and
events keep time. Memory figures are the process's own (resident set and its peak), not zeros: Megatron logs
them. Sensors that a CPU does not have are errors, not invented numbers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from k3_plugins.platform import PlatformError


class Event:
    """torch.cuda.Event: everything before it has happened when it is recorded; elapsed_time is wall-clock, in ms."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._recorded_at: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        if self._recorded_at is None or end_event._recorded_at is None:
            raise RuntimeError("elapsed_time needs two recorded events")
        return (end_event._recorded_at - self._recorded_at) * 1000.0


class Stream:
    """torch.cuda.Stream: work "on" any stream runs at once, in program order."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any):
        self.device = torch.device("cpu")
        self.priority = priority
        self.cuda_stream = 0
        self._outer: list[Stream] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Stream:
        self._outer.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        set_stream(self._outer.pop())


class ExternalStream(Stream):
    """torch.cuda.ExternalStream."""

    def __init__(self, stream_ptr: int = 0, device: Any = None, **kwargs: Any):
        super().__init__(device)


class StreamContext:
    """`with torch.cuda.stream(s)`; None is allowed and changes nothing, as in torch."""

    def __init__(self, stream: Stream | None):
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *exc: Any) -> None:
        if self._stream is not None:
            self._stream.__exit__(*exc)


class DeviceContext:
    """`with torch.cuda.device(i)`: there is one device."""

    def __init__(self, device: Any):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: Any) -> None:
        pass


class DeviceOfContext(DeviceContext):
    """`with torch.cuda.device_of(tensor)`."""


class DeviceProperties:
    """torch.cuda.get_device_properties. Compute capability 0.0: no kernel's demand is met by claim."""

    def __init__(self):
        self.name = "CPU (k3_plugins CPU platform)"
        self.major = 0
        self.minor = 0
        self.multi_processor_count = os.cpu_count() or 1
        self.total_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.warp_size = 1


_default_stream = Stream()
_streams = threading.local()


def current_stream(device: Any = None) -> Stream:
    return getattr(_streams, "current", _default_stream)


def set_stream(stream: Stream) -> None:
    _streams.current = stream


def memory_allocated(device: Any = None) -> int:
    """Resident set of this process, in bytes: the whole process, Python and libraries included."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def max_memory_allocated(device: Any = None) -> int:
    """Highest resident set since the start or the last reset_peak_memory_stats(), in bytes."""
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return memory_allocated()  # a kernel without the high-water mark (some sandboxes)


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start a new peak. Where the kernel forbids it the peak stays that of the whole run."""
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    except OSError:
        pass


def memory_stats(device: Any = None) -> dict[str, int]:
    """The entries Megatron logs. Counts of allocator blocks do not exist here and are 0."""
    now, peak = memory_allocated(), max_memory_allocated()
    stats = {}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{kind}.all.current"] = now
        stats[f"{kind}.all.peak"] = peak
    for key in ("allocation.all.current", "allocation.all.peak", "num_alloc_retries", "num_ooms"):
        stats[key] = 0
    return stats


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) memory of the machine, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _constant(value: Any) -> Callable:
    """A function that answers `value`. Each name gets its own: torch._dynamo keys its rules by function object."""

    def constant(*args: Any, **kwargs: Any) -> Any:
        return value

    return constant


def _nothing() -> Callable:
    """A request that is already fulfilled on the CPU."""
    return _constant(None)


def _same(function: Callable) -> Callable:
    """The same answer under a second name."""

    def same(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return same


def _no_sensor(name: str) -> Callable:
    def sensor(*args: Any, **kwargs: Any) -> NoReturn:
        raise PlatformError(f"torch.cuda.{name} reads a GPU sensor, and the CPU platform has none.")

    return sensor


def install() -> None:
    """Replace the functions and classes in `torch.cuda` and in the submodules that bound them by name."""
    replacements = {
        # One device per process, ready for use. Megatron asserts it, and counts devices to decide whether to
        # initialise model parallelism and seeds at all.
        "is_available": _constant(True),
        "is_initialized": _constant(True),
        "device_count": _constant(1),
        "current_device": _constant(0),
        "set_device": _nothing(),
        "device": DeviceContext,
        "device_of": DeviceOfContext,
        "get_device_name": _constant(DeviceProperties().name),
        "get_device_capability": _constant((0, 0)),
        "get_device_properties": _constant(DeviceProperties()),
        "can_device_access_peer": _constant(False),
        "is_bf16_supported": _constant(True),
        # torch.optim asks before every step.
        "is_current_stream_capturing": _constant(False),
        # Order: a CPU operator has finished when it returns.
        "synchronize": _nothing(),
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": _constant(_default_stream),
        "set_stream": set_stream,
        # "The GPU's generator" is the CPU's: dropout on a CPU tensor draws from it. Megatron's RNG tracker
        # reads and writes its state through this tuple.
        "default_generators": (torch.default_generator,),
        "empty_cache": _nothing(),
        "ipc_collect": _nothing(),
        "memory_allocated": memory_allocated,
        "memory_reserved": _same(memory_allocated),
        "device_memory_used": _same(memory_allocated),
        "max_memory_allocated": max_memory_allocated,
        "max_memory_reserved": _same(max_memory_allocated),
        "reset_peak_memory_stats": reset_peak_memory_stats,
        "reset_max_memory_allocated": _same(reset_peak_memory_stats),
        "memory_stats": memory_stats,
        "mem_get_info": mem_get_info,
    }
    for sensor in ("utilization", "temperature", "power_draw", "clock_rate"):
        replacements[sensor] = _no_sensor(sensor)

    # Submodules have `from . import current_device, ...`: replacing the attribute of torch.cuda alone misses
    # them.
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams, torch.cuda.graphs):
        for name, replacement in replacements.items():
            if module is torch.cuda or name in vars(module):
                setattr(module, name, replacement)

    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, _nothing())  # the profiler's C library is absent from CPU builds

    # torch.accelerator answers from torch.cuda's compile-time flags; pinning loaders, FSDP and serialization
    # would start a CUDA context from it.
    torch.accelerator.is_available = _constant(False)
    torch.accelerator.device_count = _constant(0)
    torch.accelerator.current_accelerator = _constant(None)
