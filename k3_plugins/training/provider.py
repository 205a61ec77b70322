"""What Megatron reads off a data set provider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def on_every_rank[F: Callable[..., Any]](provider: F) -> F:
    """Decorator: Megatron then calls the provider on every rank, not on the first tensor-parallel rank alone."""
    marked: Any = provider  # the type of a function has no such attribute
    marked.is_distributed = True
    return provider
