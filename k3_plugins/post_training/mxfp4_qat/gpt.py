"""Where quantizers enter a GPT model: after its constructor, in every door and tool that builds one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_gpt_init(original: Callable[..., None]) -> Callable[..., None]:
    """Patch body for GPTModel.__init__."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from k3_plugins.activation import active
        from k3_plugins.post_training.mxfp4_qat.convert import quantize_routed_experts

        original(self, *args, **kwargs)
        quantize_routed_experts(self, active().config("mxfp4-qat"))

    return __init__
