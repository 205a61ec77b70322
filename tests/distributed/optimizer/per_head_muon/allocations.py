"""Counts the memory that torch operations allocate: the largest single storage and the peak of those alive together."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Within it, every storage that an operation returns and that did not exist before is counted, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = 0
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs or {})):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.alive:
                self.known.add(tensor.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.known or key in self.alive:
                continue
            self.alive[key] = StorageWeakRef(storage), storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result
