"""One pool of host buffers that are used again and again, pinned where the activations come from a GPU.

Allocating pinned memory takes milliseconds, and every step needs the same sizes: a returned buffer waits for the next
taker of its size class (eighths of a power of two, so that at most a ninth of a buffer is unused).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_plugins.memory.activation_manager.errors import ActivationError

_SMALLEST = 4096


@dataclass(eq=False)
class HostBuffer:
    """A buffer on loan."""

    memory: Tensor
    """uint8, at least ``nbytes`` long."""
    nbytes: int
    pinned: bool

    @property
    def bytes(self) -> Tensor:
        """The part that is in use."""
        return self.memory[: self.nbytes]


def size_class(nbytes: int) -> int:
    """The size of the buffer that serves ``nbytes``."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step


class HostPool:
    """Host memory for activations of one process.

    Args:
        limit: most bytes that may be on loan at a time; None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used = 0
        """Bytes on loan now (whole buffers)."""
        self.peak = 0
        self.allocated = 0
        """Bytes the pool owns, on loan or waiting."""
        self._free: dict[tuple[int, bool], list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, nbytes: int, *, pinned: bool, owner: str) -> HostBuffer:
        """A buffer with uninitialised contents.

        Args:
            owner: name of the tensor, for the message.

        Raises:
            ActivationError: if the limit does not allow it.
        """
        size = size_class(nbytes)
        with self._lock:
            if self.limit is not None and self.used + size > self.limit:
                raise ActivationError(
                    f"the host pool is full: {owner} needs {size} bytes and {self.used} of {self.limit} are in use; "
                    "raise --activation-host-pool-mib, or give fewer tensors a policy with cpu"
                )
            waiting = self._free[size, pinned]
            if waiting:
                memory = waiting.pop()
            else:
                memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                self.allocated += size
            self.used += size
            self.peak = max(self.peak, self.used)
        return HostBuffer(memory, nbytes, pinned)

    def give_back(self, buffer: HostBuffer) -> None:
        """Return a buffer; nobody may look into it any more."""
        size = buffer.memory.numel()
        with self._lock:
            self.used -= size
            self._free[size, buffer.pinned].append(buffer.memory)
