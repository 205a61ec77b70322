"""Hugging Face weight folders, read and written one tensor at a time.

    weights = Weights(folder, dtype)      # single file or shards with an index; MXFP4 pairs appear as one tensor
    weights.shape(name), weights.read(name)
    writer = ShardWriter(folder, max_bytes); writer.add(name, tensor); writer.close()
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3_plugins.models.kimi_k3 import mxfp4
from k3_plugins.models.kimi_k3.hf_config import ConversionError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

PACKED, SCALE = "_packed", "_scale"
"""Endings that MXFP4 puts behind ``weight``."""

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

_OPEN_FILES = 2
"""A packed tensor and its scales may lie in neighbouring shards."""


class Weights:
    """The tensors of a folder; nothing is read before it is asked for.

    Args:
        folder: holds ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        dtype: element type that packed tensors are unpacked to.

    Raises:
        ConversionError: no weights, an index that does not fit the files, or a damaged file.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._files = self._locate()
        self.packed = {name.removesuffix(PACKED) for name in self._files if name.endswith(f".weight{PACKED}")}

    def _locate(self) -> dict[str, str]:
        """Stored name -> file, checked against what the files hold."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                listed: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError) as error:
                raise ConversionError(f"{index} cannot be read ({error}): copy it again") from error
        elif (self.folder / SINGLE).is_file():
            listed = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise ConversionError(f"{self.folder} holds neither {SINGLE} nor {INDEX}: name a folder with safetensors")
        faults = []
        for file in sorted(set(listed.values())):
            if not (self.folder / file).is_file():
                faults.append(f"{file} is missing")
                continue
            held = set(self._file(file).keys())
            named = {name for name, place in listed.items() if place == file}
            faults += [f"{file} lacks {name}, which the index names" for name in sorted(named - held)]
            faults += [f"{file} holds {name}, which the index does not name" for name in sorted(held - named)]
        if faults:
            raise ConversionError(f"{INDEX} does not fit the files:\n" + "\n".join(f"  {fault}" for fault in faults))
        return listed

    def _file(self, name: str) -> Any:
        """An open file; a few are kept open."""
        if name not in self._open:
            while len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConversionError(
                    f"{self.folder / name} is damaged or incomplete ({error}): copy or download it again"
                ) from error
        self._open.move_to_end(name)
        return self._open[name]

    @property
    def names(self) -> set[str]:
        """Names of the tensors; an MXFP4 pair counts as the tensor it stands for."""
        parts = {f"{name}{end}" for name in self.packed for end in (PACKED, SCALE)}
        return (self._files.keys() - parts) | self.packed

    def position(self, name: str) -> tuple[str, str]:
        """Sort key that visits every file once."""
        return self._files[f"{name}{PACKED}" if name in self.packed else name], name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        if name in self.packed:
            rows, bytes_ = self._shape(f"{name}{PACKED}")
            return rows, bytes_ * 2
        return self._shape(name)

    def _shape(self, stored: str) -> tuple[int, ...]:
        return tuple(self._file(self._files[stored]).get_slice(stored).get_shape())

    def dtype_of(self, name: str) -> str:
        """Element type of a tensor as ``read`` returns it, such as ``float32``."""
        if name in self.packed:
            return str(self.dtype).removeprefix("torch.")
        kind = self._file(self._files[name]).get_slice(name).get_dtype()
        if kind not in _DTYPES:
            raise ConversionError(f"{name} has element type {kind}; only {', '.join(_DTYPES)} can be converted")
        return _DTYPES[kind]

    def read(self, name: str) -> Tensor:
        """One tensor, unpacked if it is packed."""
        if name not in self.packed:
            return self._read(name)
        if f"{name}{SCALE}" not in self._files:
            raise ConversionError(f"{name}{PACKED} has no {name}{SCALE}")
        return mxfp4.dequantize(self._read(f"{name}{PACKED}"), self._read(f"{name}{SCALE}"), self.dtype, name)

    def _read(self, stored: str) -> Tensor:
        file = self._files[stored]
        try:
            return self._file(file).get_tensor(stored)
        except (SafetensorError, OSError) as error:
            message = f"{self.folder / file}: {stored} cannot be read ({error}): copy the file again"
            raise ConversionError(message) from error


class ShardWriter:
    """Writes tensors as they come; a shard is written when the next tensor would make it larger than ``max_bytes``."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._pending: dict[str, Tensor] = {}
        self._bytes = self._total = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._bytes + size > self.max_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._bytes += size
        self._total += size

    def _flush(self) -> None:
        path = self._temporary(len(self._shards))
        path.touch()
        mode = path.stat().st_mode  # by the umask; save_file makes a file of its own that only its owner may read
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(mode)
        self._shards.append(list(self._pending))
        self._pending, self._bytes = {}, 0

    def _temporary(self, index: int) -> Path:
        return self.folder / f"shard-{index}.safetensors"

    def close(self) -> None:
        """Write what is left and, if there are several shards, the index."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            os.replace(self._temporary(0), self.folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            os.replace(self._temporary(index), self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        contents = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(contents, indent=2) + "\n")
