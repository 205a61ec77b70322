"""An activation in the test's own process, for code that asks `k3_plugins.activation.current()` for its config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from k3_plugins import activation, features


@contextmanager
def active(*names: str) -> Iterator[SimpleNamespace]:
    """Features with their default configs; nothing is patched."""
    configs = {entry.name: features.load(entry).config() for entry in features.BUILT_IN if entry.name in names}
    toy = SimpleNamespace(names=names, configs=configs, config=configs.__getitem__, platform="cpu")
    before = activation.current()
    activation.set_current(toy)
    try:
        yield toy
    finally:
        activation.set_current(before)
