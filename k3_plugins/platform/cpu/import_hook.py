"""Run a repair right after a module has been imported, whoever imports it.

The CPU platform must not import Megatron itself: a platform that imports half of Megatron would decide the
import order for everybody else.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Repair = Callable[[Any], None]
"""Gets the module, whose attributes it knows."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module through the other finders and makes its loader run the repairs after the module's body."""

    def __init__(self):
        self.repairs: dict[str, list[Repair]] = {}
        self._searching: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if fullname not in self.repairs or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        exec_module = loader.exec_module

        def exec_and_repair(module: ModuleType) -> None:
            exec_module(module)
            for repair in self.repairs[fullname]:
                repair(module)

        # Loaders are made per module, so this instance attribute changes one import only; the loader keeps
        # its class, which inspect.getsource relies on.
        loader.exec_module = exec_and_repair
        return spec


_finder = _Finder()


def after_import(name: str, repair: Repair) -> None:
    """Call `repair(module)` once `name` is imported; at once if it already is. An error fails that import."""
    if name in sys.modules:
        repair(sys.modules[name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.repairs.setdefault(name, []).append(repair)
