"""What the YAML files of the recipes have in common: lists of flags, and errors that name file, field and reason."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError


def words(value: object) -> object:
    """Flags from a line or a list; anything else is left to the model's own check."""
    if isinstance(value, str):
        return tuple(shlex.split(value))
    return tuple(str(word) for word in value) if isinstance(value, list) else value


def refuse_reserved(flags: Collection[str], reserved: Collection[str], why: str) -> None:
    """Flags that the recipe sets itself.

    Raises:
        ValueError: naming the first one.
    """
    for word in flags:
        if word.startswith("--") and word.removeprefix("--").partition("=")[0] in reserved:
            raise ValueError(f"{word} {why}; leave it out")


def read[Model: BaseModel](path: Path, model: type[Model], error: type[Exception], fields: str) -> Model:
    """The model that a YAML file describes.

    Args:
        error: raised for anything wrong, naming the file, every wrong field and why.
        fields: what the file must hold, for the message.
    """
    try:
        contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as cause:
        raise error(f"{path} cannot be read: {cause}") from cause
    if not isinstance(contents, dict):
        raise error(f"{path} must be a mapping with {fields}")
    try:
        return model(**contents)
    except ValidationError as cause:
        lines = [
            f"{'.'.join(map(str, fault['loc'])) or 'file'}: {re.sub('^Value error, ', '', fault['msg'])}"
            for fault in cause.errors()
        ]
        raise error(f"{path}: " + "; ".join(lines)) from cause
