"""Fields of a ``config.json``, read one by one; what is wrong is collected, so that one message names all of it.

This module imports neither torch nor megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass
class FieldReader:
    """The fields, and what is wrong with those that were read."""

    values: Mapping[str, Any]
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A text (str), true or false (bool), a list or a table of fields (dict)."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not kind:
            self.faults.append(f"{name} is {shown(value)}, not {_KINDS[kind]}")
            return default
        return value

    def size(self, name: str, required: bool = False, smallest: int = 1) -> int | None:
        """A whole number of at least ``smallest``; None if it is absent or wrong."""
        value = self._present(name, required)
        return None if value is None else self.checked_size(name, value, smallest)

    def checked_size(self, name: str, value: Any, smallest: int = 1) -> int | None:
        """The same for a value that is at hand."""
        if type(value) is int and value >= smallest:
            return value
        self.faults.append(f"{name} is {shown(value)}, not a whole number of at least {smallest}")
        return None

    @overload
    def factor(self, name: str, default: float) -> float: ...

    @overload
    def factor(self, name: str, default: None = None, required: bool = False) -> float | None: ...

    def factor(self, name: str, default: float | None = None, required: bool = False) -> float | None:
        """A positive, finite number."""
        value = self._present(name, required)
        if value is None:
            return default
        if is_number(value) and value > 0:
            return value
        self.faults.append(f"{name} is {shown(value)}, not a number above 0")
        return default

    def _present(self, name: str, required: bool) -> Any:
        value = self.values.get(name)
        if value is None and required:
            self.faults.append(f"{name} is missing")
        return value


_KINDS = {str: "text", bool: "true or false", list: "a list", dict: "a table of fields"}


def shown(value: Any) -> str:
    """A value in a message, in one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_number(value: Any) -> bool:
    """Whether it is a finite number; JSON also knows integers that no float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_among(value: Any, accepted: Iterable[Any]) -> bool:
    """Like ``in``, but true is not 1."""
    return any(type(value) is type(item) and value == item for item in accepted)
