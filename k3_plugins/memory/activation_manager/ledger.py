"""Counts the device bytes that saved activations occupy: whole storages, each once, and their peak.

A storage counts while a saved tensor that has not been moved refers to it, while its codes lie on the device, and,
after it came back, until the backward pass has let go of it. Host buffers are not device memory, on the CPU platform
too. Memory that another mechanism has emptied counts as it is at that moment.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Ledger:
    """Of one process."""

    def __init__(self) -> None:
        self.peak = 0
        self._held: dict[int, list[int]] = {}  # storage -> [holders, bytes]
        self._held_bytes = 0
        self._restored: dict[int, tuple[StorageWeakRef, int]] = {}

    def hold(self, storage: torch.UntypedStorage) -> int:
        """Count a storage until `release` is called with the returned key as often as this."""
        key = storage._cdata
        entry = self._held.get(key)
        if entry is None:
            entry = self._held[key] = [0, storage.nbytes()]
            self._held_bytes += entry[1]
        entry[0] += 1
        self._note_peak()
        return key

    def release(self, key: int) -> None:
        """End a `hold`."""
        entry = self._held[key]
        entry[0] -= 1
        if not entry[0]:
            self._held_bytes -= entry[1]
            del self._held[key]

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Count a storage for as long as it lives."""
        self._restored[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._note_peak()

    @property
    def held(self) -> int:
        """Device bytes now without what has come back for the backward pass."""
        return self._held_bytes

    @property
    def current(self) -> int:
        """Device bytes now."""
        for key in [key for key, (storage, _) in self._restored.items() if storage.expired()]:
            del self._restored[key]
        restored = sum(size for key, (_, size) in self._restored.items() if key not in self._held)
        return self._held_bytes + restored

    def reset_peak(self) -> None:
        """Start to measure anew."""
        self.peak = self.current

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self.current)
