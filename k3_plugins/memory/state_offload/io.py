"""Writing and reading one piece of memory: plain files, or DeepSpeed's asynchronous I/O with O_DIRECT.

A piece is a file of its own. Both kinds get and give page-aligned uint8 buffers in host memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch

from k3_plugins.compat.optional import require
from k3_plugins.memory.state_offload.errors import StateOffloadError


class PieceIO(Protocol):
    """One way to write and read files."""

    granule: int
    """Files hold a multiple of so many bytes; the rest of the last granule is padding."""

    def buffer(self, nbytes: int) -> AbstractContextManager[torch.Tensor]:
        """`[nbytes]` uint8 in host memory that pieces are written from and read into, until the context ends."""

    def write(self, path: Path, piece: torch.Tensor) -> None:
        """Write all of `piece` and make it durable. Raises OSError."""

    def read(self, path: Path, piece: torch.Tensor) -> None:
        """Fill all of `piece` from a file of exactly that size. Raises OSError."""


class PlainFiles:
    """Python's files. The page cache is dropped behind, so that the state does not come back into memory that way."""

    granule = 1

    @contextmanager
    def buffer(self, nbytes: int) -> Iterator[torch.Tensor]:
        yield torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def write(self, path: Path, piece: torch.Tensor) -> None:
        with open(path, "wb", buffering=0) as file:
            view = memoryview(piece.numpy())
            while view:  # a single write stops after 2 GiB, and short of a full disk
                view = view[file.write(view) :]
            os.fsync(file.fileno())
            _forget(file.fileno())

    def read(self, path: Path, piece: torch.Tensor) -> None:
        with open(path, "rb", buffering=0) as file:
            view = memoryview(piece.numpy())
            while view:
                count = file.readinto(view)
                if not count:
                    raise OSError(f"{path} ended {len(view)} bytes early")
                view = view[count:]
            _forget(file.fileno())


def _forget(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class DeepSpeedFiles:
    """DeepSpeed's async_io, compiled at first use; it needs libaio and its headers.

    It aborts the process when a file is shorter than the buffer, answers -1 for a missing folder, and writes nothing
    but reports success for a size that is no multiple of its block: pieces are padded, and sizes compared before a read
    and after a write.

    Raises:
        FeatureError: if DeepSpeed is missing.
        StateOffloadError: if async_io cannot be compiled or loaded.
    """

    granule = 4096

    def __init__(self, block_size: int = 1 << 20, queue_depth: int = 128):
        require("deepspeed", "state offload with io='deepspeed'")
        from deepspeed.ops.op_builder import AsyncIOBuilder

        try:
            module = AsyncIOBuilder().load()
        except Exception as error:
            raise StateOffloadError(
                f"DeepSpeed's async_io cannot be built ({type(error).__name__}: {error}): install libaio with its "
                "headers (libaio-dev) and a C++ compiler, or use io='files'"
            ) from error
        self._handle = module.aio_handle(block_size, queue_depth, False, True, 1)

    @contextmanager
    def buffer(self, nbytes: int) -> Iterator[torch.Tensor]:
        locked = self._handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        try:
            yield locked
        finally:
            # The tensor does not own its memory: without this it stays locked until the process ends.
            self._handle.free_cpu_locked_tensor(locked)

    def write(self, path: Path, piece: torch.Tensor) -> None:
        done = self._handle.sync_pwrite(piece, str(path))
        written = path.stat().st_size if path.exists() else 0
        if done < 0 or written != piece.numel():
            raise OSError(f"{path}: {written} of {piece.numel()} bytes were written (async_io returned {done})")

    def read(self, path: Path, piece: torch.Tensor) -> None:
        if (size := path.stat().st_size) != piece.numel():
            raise OSError(f"{path} holds {size} bytes instead of {piece.numel()}")
        if (done := self._handle.sync_pread(piece, str(path))) < 0:
            raise OSError(f"{path} could not be read (async_io returned {done})")


KINDS: dict[str, Callable[[], PieceIO]] = {"files": PlainFiles, "deepspeed": DeepSpeedFiles}
