"""What the YAML files of the recipes have in common: lists of flags, and errors that name file, field and reason."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from k3_plugins import strict_yaml

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


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
        contents = strict_yaml.read(path)
    except ValueError as cause:
        raise error(f"{path} cannot be read: {cause}") from cause
    if not isinstance(contents, dict):
        raise error(f"{path} must be a mapping with {fields}")
    try:
        return model(**contents)
    except ValidationError as cause:
        faults = cause.errors()
        # A list whose only entry is wrong is called too short as well.
        first = [fault for fault in faults if not any(_inside(other, fault) for other in faults)]
        raise error(f"{path}: " + "; ".join(map(_sentence, first))) from cause
    except TypeError as cause:  # a key that is no text
        raise error(f"{path} must be a mapping with {fields}: {cause}") from cause


def _inside(inner: ErrorDetails, outer: ErrorDetails) -> bool:
    size = len(outer["loc"])
    return len(inner["loc"]) > size and inner["loc"][:size] == outer["loc"]


def _sentence(fault: ErrorDetails) -> str:
    """A fault that pydantic found: the field, what it holds and what belongs there.

    A list's entries are counted from 1, as people do.
    """
    where = ".".join(str(word + 1) if isinstance(word, int) else word for word in fault["loc"])
    limits: dict[str, Any] = fault.get("ctx", {})
    must = _MUST.get(fault["type"])
    if fault["type"] == "value_error":
        return f"{where}: {limits['error']}" if where else str(limits["error"])
    if must is None:
        return f"{where} is {fault['input']!r}: {fault['msg']}"
    held = "" if fault["type"] in _WITHOUT_VALUE else f" is {fault['input']!r}, but"
    return f"{where}{held} {must.format(**limits)}"


_WITHOUT_VALUE = frozenset(("missing", "extra_forbidden", "too_short"))
_MUST = {
    "missing": "is missing",
    "extra_forbidden": "is no field here",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a text",
    "string_pattern_mismatch": "must be letters, digits, '.', '_' and '-', the first a letter or digit",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "too_short": "must have at least {min_length} entries",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
}
"""Pydantic's kinds of fault -> what to write."""
