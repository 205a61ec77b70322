"""Kinds of arguments for argparse. Imports neither torch nor megatron."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole_from(least: int) -> Callable[[str], int]:
    """A whole number from ``least``, which is not negative."""

    def convert(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return int(text)

    return convert


positive = whole_from(1)
