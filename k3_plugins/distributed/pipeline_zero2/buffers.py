"""Megatron's gradient buffers without their memory. Imports neither torch nor megatron."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def release_gradients(buffer: Any) -> None:
    """Free a `_ParamAndGradBuffer`'s gradient memory; all tensors on it keep their shapes. Twice is harmless."""
    buffer.grad_data.untyped_storage().resize_(0)


def without_gradient_memory(original: Callable[..., None]) -> Callable[..., None]:
    """Patch body for `_ParamAndGradBuffer.__init__`: a chunk's gradients exist during its own construction only.

    At no time does the device hold more than one chunk's buffer, which is half of what training takes.
    """

    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        if self.ddp_config.use_distributed_optimizer:
            release_gradients(self)

    return __init__
