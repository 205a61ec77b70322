"""Where Attention Residuals enter a GPT model: around its constructor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def wrap_gpt_init(original: Callable[..., None]) -> Callable[..., None]:
    """Patch body for GPTModel.__init__: wrapped specs in, the decoder turned into one with Attention Residuals."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from k3_plugins.activation import active
        from k3_plugins.transformer.attention_residuals.block import install
        from k3_plugins.transformer.attention_residuals.spec import wrap_block_spec, wrap_mtp_spec

        config = active().config("attnres")
        bound = signature.bind(self, *args, **kwargs)
        arguments = bound.arguments
        arguments["transformer_layer_spec"] = wrap_block_spec(arguments["transformer_layer_spec"], config)
        if arguments.get("mtp_block_spec") is not None:
            arguments["mtp_block_spec"] = wrap_mtp_spec(arguments["mtp_block_spec"], config)
        original(*bound.args, **bound.kwargs)
        install(self.decoder, config)

    return __init__
