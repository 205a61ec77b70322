"""Planners' scalar loops over arrays, compiled by numba where it works, with the same result either way."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from k3_plugins.compat.optional import probe, require


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled on first use and kept on disk; as it is without numba."""
    numba = _numba()
    return function if numba is None else numba.njit(cache=True)(function)


@functools.cache
def _numba() -> ModuleType | None:
    """The module; None, with one warning, if it is missing or broken."""
    found = probe("numba")
    if found.available:
        return require("numba", "compilation")
    state = f"is installed but broken ({found.error})" if found.installed else "is not installed"
    logging.getLogger(__name__).warning(
        f"numba {state}: plans of encoder work take about 10 times longer, MoonEP's host plans about 100 times "
        f"({found.package.install})."
    )
    return None
