"""Marks in time that cost nothing while a step runs, and become seconds after it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Marks of one step.

    Args:
        cuda: mark with events on the current stream instead of with the host's clock: kernels run later than they are
            launched.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._first = self.mark()

    def mark(self) -> Any:
        """Now."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        """From the clock's making to a mark; waits for the device to get there."""
        if not self._cuda:
            return mark - self._first
        mark.synchronize()
        return self._first.elapsed_time(mark) / 1000.0
