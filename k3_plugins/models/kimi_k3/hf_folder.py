"""What a Hugging Face folder holds besides weights, and what a conversion remembers of it for the way back.

A converted checkpoint keeps ``config.json``, the generation settings and the tokenizer in its folder ``hf/``, with
``conversion.json``: the prefix and spelling of the names, element types, and the padding of ``A_log``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k3_plugins.models.kimi_k3.hf_config import ConversionError

CONFIG = "config.json"
SIDECAR_FOLDER = "hf"
SIDECAR = "conversion.json"
QUANTIZATION = "quantization_config"
"""Field of ``config.json`` that says how weights are packed."""
VISION = "vision_config"
"""Field of ``config.json`` with the vision encoder's sizes."""
_FORMAT = 1

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


@dataclass
class Spelling:
    """How the original checkpoint wrote what the table of names leaves open."""

    prefix: str = ""
    """What stands before ``model.``: empty, or ``language_model.``."""
    also: list[str] = field(default_factory=list)
    """Entries of the table (their first name) that were found under their other name."""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    """Shapes of entries whose form leaves it open: ``A_log`` with its padding, rows."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Element type by entry."""
    other_dtypes: dict[str, str] = field(default_factory=dict)
    """Element type of single tensors that differ from their entry's."""
    vision: bool = True
    """Whether a vision tower, if there was one, was converted too."""
    unpacked: bool = False
    """Whether MXFP4 weights were unpacked; they are exported unpacked, unless quantization-aware training followed."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file.

    Raises:
        ConversionError: if it is missing or no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConversionError(f"{path} is missing: name a folder with a Hugging Face checkpoint") from error
    except ValueError as error:
        raise ConversionError(f"{path} is no JSON file ({error}): copy it again") from error
    if not isinstance(values, dict):
        raise ConversionError(f"{path} holds no JSON object: copy it again")
    return values


def companions(folder: Path) -> list[Path]:
    """The files that belong to a model but are no weights: config, tokenizer, templates, remote code."""
    files = (path for path in folder.iterdir() if path.is_file() and path.name != SIDECAR)
    return sorted(path for path in files if not path.name.endswith(_WEIGHTS))


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a tokenizer that ``transformers`` loads."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def write_sidecar(source: Path, iteration: Path, spelling: Spelling) -> None:
    """Keep the companions and the spelling in a checkpoint's iteration folder."""
    target = iteration / SIDECAR_FOLDER
    target.mkdir()
    for path in companions(source):
        shutil.copyfile(path, target / path.name)
    (target / SIDECAR).write_text(json.dumps({"format": _FORMAT, **asdict(spelling)}, indent=2) + "\n")


def read_sidecar(iteration: Path) -> tuple[Path, Spelling] | None:
    """The folder with the companions, and the spelling; None for a checkpoint that was not converted.

    Raises:
        ConversionError: if it was written by another version.
    """
    folder = iteration / SIDECAR_FOLDER
    if not (folder / SIDECAR).is_file():
        return None
    values = read_json(folder / SIDECAR)
    if values.pop("format", None) != _FORMAT:
        raise ConversionError(f"{folder / SIDECAR} has another format: convert the checkpoint again")
    return folder, Spelling(**values)


def without_vision(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config of the language model alone."""
    return {name: value for name, value in values.items() if name != VISION}


def without_quantization(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config for weights that were unpacked."""
    kept = {name: value for name, value in values.items() if name != QUANTIZATION}
    if isinstance(kept.get("text_config"), Mapping):
        kept["text_config"] = without_quantization(kept["text_config"])
    return kept


def with_quantization(values: Mapping[str, Any], quantization: Mapping[str, Any]) -> dict[str, Any]:
    """A config for packed weights; one that says how they are packed keeps its words."""
    nested = values.get("text_config")
    if QUANTIZATION in values or (isinstance(nested, Mapping) and QUANTIZATION in nested):
        return dict(values)
    if isinstance(nested, Mapping):
        return {**values, "text_config": {**nested, QUANTIZATION: quantization}}
    return {**values, QUANTIZATION: quantization}


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder that appears under its name when everything in it is complete, or not at all.

    Raises:
        ConversionError: if the target exists.
    """
    if target.exists():
        raise ConversionError(f"{target} exists already: remove it, or name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
