"""Moves training state to a disk and back.

    offload = StateOffload("/local_nvme/state")
    offload.out(training_state(model_chunks, optimizer))     # memory is free; the tensors are still the same objects
    ...another phase: generation, evaluation of a large model...
    offload.back()                                           # the same bits in the same tensors

Everything is written and checked before anything is freed, and everything is checked before anything is allocated.
Ranks agree at each of these points, so that either all of them have moved or none has. Every rank writes a folder of
its own, which appears under its name when it is complete.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k3_plugins.memory.state_offload.collect import Block, blocks_of
from k3_plugins.memory.state_offload.errors import StateOffloadError
from k3_plugins.memory.state_offload.io import KINDS

INDEX = "index.json"


@dataclass(frozen=True)
class Piece:
    """Part of a block, and the file it is in."""

    file: str
    start: int
    nbytes: int
    file_bytes: int
    """With the padding."""
    crc32: int


class StateOffload:
    """Holds one training state, in memory or on disk.

    Args:
        folder: on a local disk; every rank uses a folder of its own in it. All ranks of `group` must use the object
            together.
        io: 'files', or 'deepspeed' for asynchronous I/O with O_DIRECT.
        piece_bytes: largest file, and the size of the host buffer through which device memory passes.
        group: torch.distributed group of the ranks that move together; the whole world by default, where there is one.
        smallest: storages of fewer bytes (step counts, norm weights) stay in memory: a file for each costs more than
            it frees.

    Raises:
        StateOffloadError: for an unknown `io`.
        FeatureError: if DeepSpeed is asked for and missing.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        io: str = "files",
        piece_bytes: int = 256 << 20,
        group: Any = None,
        smallest: int = 64 << 10,
    ):
        if io not in KINDS:
            raise StateOffloadError(f"io={io!r} is unknown: choose one of {', '.join(KINDS)}")
        self._io = KINDS[io]()
        if piece_bytes < 1 or piece_bytes % self._io.granule:
            raise StateOffloadError(f"piece_bytes={piece_bytes} must be a positive multiple of {self._io.granule}")
        self._piece_bytes = piece_bytes
        self._group = group
        self._smallest = smallest
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.folder = Path(folder) / f"rank{self._rank:05d}"
        self.is_out = False
        """Whether the state is on disk and its memory is free."""
        self._blocks: list[Block] = []
        self._pieces: list[list[Piece]] = []
        self._lock: int | None = None

    def out(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write the tensors' memory to disk and free it.

        Returns:
            The bytes that were freed on this rank.

        Raises:
            StateOffloadError: on every rank, if one of them cannot; the state is in memory and untouched then.
        """
        if self.is_out:
            raise StateOffloadError(f"the state is on disk already ({self.folder}): call back() first")
        blocks: list[Block] = []
        pieces: list[list[Piece]] = []
        partial = self.folder.with_name(f".{self.folder.name}.partial")

        def write() -> None:
            self._take_folder()
            blocks.extend(block for block in blocks_of(tensors) if block.nbytes >= self._smallest)
            for old in (partial, self.folder):  # of a job that died; what it holds belongs to no memory any more
                if old.exists():
                    shutil.rmtree(old)
            partial.mkdir(parents=True)
            self._check_space(sum(block.nbytes for block in blocks))
            pieces.extend(self._write(partial, blocks))
            self._write_index(partial, blocks, pieces)
            os.replace(partial, self.folder)
            _make_durable(self.folder.parent)

        error = self._together(write)
        if error:
            if self._lock is not None:  # otherwise the folder is another's
                shutil.rmtree(partial, ignore_errors=True)
                shutil.rmtree(self.folder, ignore_errors=True)
                self._give_folder_back()
            raise StateOffloadError(f"the state stays in memory, unchanged: {error}")
        for block in blocks:
            block.release()
        self._blocks, self._pieces, self.is_out = blocks, pieces, True
        return sum(block.nbytes for block in blocks)

    def back(self) -> int:
        """Fill the tensors again and remove the files.

        Returns:
            The bytes that were read on this rank.

        Raises:
            StateOffloadError: on every rank, if one of them cannot; the state is on disk, and nothing of it in memory,
                so that the call can be repeated once the files are repaired.
        """
        if not self.is_out:
            raise StateOffloadError("the state is in memory: call out() first")
        if error := self._together(self._check_files):
            raise StateOffloadError(f"the state stays on disk: {error}")
        if error := self._together(self._read):
            for block in self._blocks:
                block.release()
            raise StateOffloadError(f"the state stays on disk: {error}")
        total = sum(block.nbytes for block in self._blocks)
        self._blocks, self._pieces, self.is_out = [], [], False
        error = self._together(functools.partial(shutil.rmtree, self.folder))
        self._give_folder_back()
        if error:
            raise StateOffloadError(f"the state is in memory again, but its files could not be removed: {error}")
        return total

    # -- the folder --------------------------------------------------------------------------------------------------

    def _take_folder(self) -> None:
        """What lies in a folder that nobody holds belongs to no memory any more: its process has ended."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder.with_name(f".{self.folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise StateOffloadError(
                f"{self.folder} holds a state that is out now, of another StateOffload or process ({error}): name "
                "another folder"
            ) from error
        self._lock = lock

    def _give_folder_back(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # forks of this process hold the descriptor too
            os.close(self._lock)
            self._lock = None

    # -- writing -----------------------------------------------------------------------------------------------------

    def _check_space(self, nbytes: int) -> None:
        free = shutil.disk_usage(self.folder.parent).free
        if free < nbytes:
            raise StateOffloadError(
                f"{self.folder.parent} has {free} bytes free, the state takes {nbytes}: name another folder"
            )

    def _write(self, folder: Path, blocks: list[Block]) -> Iterator[list[Piece]]:
        if not blocks:
            return
        largest = _padded(min(self._piece_bytes, max(block.nbytes for block in blocks)), self._io)
        with self._io.buffer(largest) as staging:
            for number, block in enumerate(blocks):
                yield [
                    self._write_piece(folder / f"{number:06d}.{index:04d}.bin", block, start, staging)
                    for index, start in enumerate(range(0, block.nbytes, self._piece_bytes))
                ]

    def _write_piece(self, path: Path, block: Block, start: int, staging: torch.Tensor) -> Piece:
        size = min(self._piece_bytes, block.nbytes - start)
        staged = staging[: _padded(size, self._io)]
        staged[:size].copy_(block.bytes()[start : start + size])
        staged[size:].zero_()
        try:
            self._io.write(path, staged)
        except OSError as error:
            raise StateOffloadError(f"{path} ({block.name}) cannot be written: {error}") from error
        if (found := path.stat().st_size) != staged.numel():
            raise StateOffloadError(f"{path} ({block.name}): {found} of {staged.numel()} bytes were written")
        return Piece(path.name, start, size, staged.numel(), zlib.crc32(staged[:size].numpy()))

    def _write_index(self, folder: Path, blocks: list[Block], pieces: list[list[Piece]]) -> None:
        """For people and tools that find the folder; `back` relies on what this process remembers."""
        listing = [
            {"name": block.name, "nbytes": block.nbytes, "pieces": [vars(piece) for piece in of_block]}
            for block, of_block in zip(blocks, pieces, strict=True)
        ]
        with open(folder / INDEX, "w") as file:
            json.dump({"format": 1, "rank": self._rank, "blocks": listing}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _make_durable(folder)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _check_files(self) -> None:
        for block, pieces in zip(self._blocks, self._pieces, strict=True):
            for piece in pieces:
                path = self.folder / piece.file
                found = path.stat().st_size if path.exists() else None
                if found != piece.file_bytes:
                    what = "is missing" if found is None else f"holds {found} bytes instead of {piece.file_bytes}"
                    raise StateOffloadError(f"{path} ({block.name}) {what}")

    def _read(self) -> None:
        largest = max((piece.file_bytes for pieces in self._pieces for piece in pieces), default=0)
        if not largest:
            return
        with self._io.buffer(largest) as staging:
            for block, pieces in zip(self._blocks, self._pieces, strict=True):
                block.allocate()
                for piece in pieces:
                    self._read_piece(block, piece, staging[: piece.file_bytes])

    def _read_piece(self, block: Block, piece: Piece, staged: torch.Tensor) -> None:
        path = self.folder / piece.file
        try:
            self._io.read(path, staged)
        except OSError as error:
            raise StateOffloadError(f"{path} ({block.name}) cannot be read: {error}") from error
        if zlib.crc32(staged[: piece.nbytes].numpy()) != piece.crc32:
            raise StateOffloadError(f"{path} ({block.name}) is damaged: its checksum differs")
        block.bytes()[piece.start : piece.start + piece.nbytes].copy_(staged[: piece.nbytes])

    # -- over ranks --------------------------------------------------------------------------------------------------

    def _together(self, action: Any) -> str | None:
        """Run `action` on every rank; the first error of any rank, or None if all of them succeeded."""
        error = None
        try:
            action()
        except StateOffloadError as failure:
            error = str(failure)
        except Exception as failure:  # reported on every rank; raised here alone it would leave the others waiting
            error = f"{type(failure).__name__}: {failure}"
        if not dist.is_initialized():
            return error
        errors: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(errors, error, group=self._group)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), None)


def _padded(nbytes: int, io: Any) -> int:
    return -(-nbytes // io.granule) * io.granule


def _make_durable(folder: Path) -> None:
    """A rename or a new file is durable when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
