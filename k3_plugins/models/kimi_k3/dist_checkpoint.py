"""Megatron's distributed checkpoint (``torch_dist``), written and read one box of a tensor at a time.

The format is torch.distributed.checkpoint's: ``.distcp`` files of serialised boxes, and ``.metadata`` that says which
box of which tensor lies where. Megatron's own writer takes a whole model in memory; here each box is written when it
comes, so a checkpoint of any size is converted in the memory of its largest box. Any parallel layout loads the result.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from k3_plugins.models.kimi_k3.hf_config import ConversionError

COMMON_STATE = ShardedObject("common_state", None, (1,), (0,)).unique_key
"""Where Megatron keeps what is no tensor: the arguments, the iteration."""


@contextmanager
def quiet_load() -> Iterator[None]:
    """Without the warning that one process reads alone, which is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class BoxWriter:
    """A checkpoint folder in the making.

    Args:
        folder: existing and empty.
        max_file_bytes: a new file is begun when the current one has reached this.
    """

    def __init__(self, folder: Path, max_file_bytes: int = 4 << 30) -> None:
        self.folder, self.max_file_bytes = folder, max_file_bytes
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._filled: dict[str, int] = {}
        self._files = 0
        self._stream = self._next_file()

    def _next_file(self) -> Any:
        self._name = f"__0_{self._files}{DEFAULT_SUFFIX}"
        self._files += 1
        return open(self.folder / self._name, "wb")

    def tensor(self, key: str, whole: Sequence[int], offset: Sequence[int], box: Tensor) -> None:
        """Write one box of a tensor; boxes of a tensor may come in any order but must not overlap.

        Args:
            key: the tensor's name in the checkpoint.
            whole: its global shape.
            offset: where the box lies in it.
            box: the values, of as many dimensions.
        """
        # A slice would take its whole storage into the file.
        box = box.detach().contiguous()
        if box.untyped_storage().nbytes() != box.numel() * box.element_size():
            box = box.clone()
        if key not in self._tensors:
            properties = TensorProperties.create_from_tensor(box)
            tensor = TensorStorageMetadata(properties=properties, size=torch.Size(whole), chunks=[])
            self._entries[key] = self._tensors[key] = tensor
        chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=box.size())
        self._tensors[key].chunks.append(chunk)
        self._filled[key] = self._filled.get(key, 0) + box.numel()
        if box.dtype != self._tensors[key].properties.dtype:
            raise ConversionError(f"parts of {key} have different element types; store them in one")
        contents = io.BytesIO()
        torch.save(box, contents)
        self._append(MetadataIndex(key, chunk.offsets, len(self._tensors[key].chunks) - 1), contents)

    def object(self, unique_key: str, value: Any) -> None:
        """Write one object, as Megatron writes a ``ShardedObject``: a list of one."""
        self._entries[unique_key] = BytesStorageMetadata()
        contents = io.BytesIO()
        torch.save([value], contents)
        self._append(MetadataIndex(unique_key), contents)

    def _append(self, index: MetadataIndex, contents: io.BytesIO) -> None:
        if self._stream.tell() >= self.max_file_bytes:
            self._stream.close()
            self._stream = self._next_file()
        self._storage[index] = _StorageInfo(self._name, self._stream.tell(), contents.getbuffer().nbytes)
        self._stream.write(contents.getbuffer())

    def close(self) -> None:
        """Write the metadata that makes the folder a checkpoint.

        Raises:
            ConversionError: if the boxes of some tensor do not fill it.
        """
        self._stream.close()
        holes = [key for key, count in self._filled.items() if count != prod(self._tensors[key].size)]
        if holes:
            raise ConversionError(f"tensors that were not filled: {', '.join(holes)}")
        metadata = Metadata(self._entries, storage_data=self._storage, version=CURRENT_DCP_VERSION)
        with open(self.folder / ".metadata", "wb") as file:
            pickle.dump(metadata, file)
        save_config(CheckpointingConfig("torch_dist", 1), str(self.folder))


def check_files(folder: Path) -> None:
    """Check that every file which a checkpoint's metadata names is there and long enough.

    Raises:
        ConversionError: if it is no distributed checkpoint, or incomplete; naming the files.
    """
    if not (folder / ".metadata").is_file():
        raise ConversionError(
            f"{folder} is no distributed checkpoint (it has no .metadata): save with --ckpt-format torch_dist"
        )
    try:
        stored = FileSystemReader(str(folder)).read_metadata().storage_data.values()
    except Exception as error:  # a damaged pickle raises anything
        raise ConversionError(f"{folder / '.metadata'} is damaged ({error}): copy the checkpoint again") from error
    ends: dict[str, int] = {}
    for info in stored:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    faults = []
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size < end:
            faults.append(f"{name} has {path.stat().st_size} of {end} bytes")
    if faults:
        more = [f"... and {len(faults) - 10} more"] if len(faults) > 10 else []
        raise ConversionError(
            "\n  ".join([f"checkpoint {folder} is incomplete, copy it again or name another one:", *faults[:10], *more])
        )


class _Reader(FileSystemReader):
    """Reads the metadata of a checkpoint once, not once for every box."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


class BoxReader:
    """A distributed checkpoint, saved under any parallel layout.

    Args:
        folder: the iteration's folder, with ``.metadata`` in it.

    Raises:
        ConversionError: if it is no distributed checkpoint, or incomplete.
    """

    def __init__(self, folder: Path) -> None:
        check_files(folder)
        self._reader = _Reader(str(folder))
        entries = self._reader.read_metadata().state_dict_metadata
        tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self.shapes = {key: tuple(entry.size) for key, entry in tensors.items()}
        self.dtypes = {key: entry.properties.dtype for key, entry in tensors.items()}

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """One box of a tensor."""
        data = torch.empty(tuple(shape), dtype=self.dtypes[key])
        whole = self.shapes[key]
        box = ShardedTensor(key, data, data.dtype, tuple(shape), whole, tuple(offset), tuple(whole))
        planner = checkpoint.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        state = {key: CheckpointableShardedTensor.from_sh_ten(box)}
        with quiet_load():
            checkpoint.load(state, storage_reader=self._reader, planner=planner, no_dist=True)
        return data
