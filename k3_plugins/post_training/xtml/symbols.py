"""The alphabet of XTML: four reserved tokens, and text between them.

A reserved token is one id of the tokenizer and never the characters of its name: text that contains ``[open]`` is
text. So nothing has to be escaped in contents, and no content can forge structure. Only attribute values, which stand
inside a tag's text, escape the quote and the ampersand.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class Special(enum.Enum):
    """The reserved tokens, by the names they have in a tokenizer."""

    OPEN = "[open]"
    SEP = "[sep]"
    CLOSE = "[close]"
    END = "[end_of_msg]"


Symbol = Special | str
"""A reserved token, or a piece of text (any length, cut anywhere)."""


@dataclass(frozen=True)
class Segment:
    """A reserved token or a piece of text, and whether the model is trained to produce it."""

    symbol: Symbol
    train: bool


def quote(value: str) -> str:
    """An attribute's value as it stands in a tag."""
    return '"' + value.replace("&", "&amp;").replace('"', "&quot;") + '"'


def unquote(text: str) -> str:
    """The inverse of `quote`, without its quotes.

    Raises:
        ValueError: for an ampersand that starts none of the two escapes.
    """
    if re.search(r"&(?!amp;|quot;)", text):
        raise ValueError(f"{text!r} holds an ampersand that is not written as &amp;")
    return text.replace("&quot;", '"').replace("&amp;", "&")


def from_text(chunks: Iterable[str]) -> Iterator[Symbol]:
    """Symbols from a decoded stream in which reserved tokens appear by name, cut anywhere, even inside a name.

    Only for text whose contents are known not to hold these names; ids do not have the ambiguity.
    """
    names = {special.value: special for special in Special}
    pattern = re.compile("|".join(map(re.escape, names)))
    held = ""
    for chunk in chunks:
        held += chunk
        position = 0
        for match in pattern.finditer(held):
            if match.start() > position:
                yield held[position : match.start()]
            yield names[match.group()]
            position = match.end()
        held = held[position:]
        keep = _unfinished(held, names)
        if len(held) > keep:
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    if held:
        yield held


def _unfinished(text: str, names: Iterable[str]) -> int:
    """Length of the longest end of the text that could become a reserved name."""
    longest = max(map(len, names)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(name.startswith(text[-length:]) for name in names):
            return length
    return 0
