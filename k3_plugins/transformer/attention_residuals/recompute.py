"""Full activation recomputation of a decoder with Attention Residuals.

Megatron's checkpointed forward passes one hidden state from layer to layer. Here a window of layers also reads the
finished blocks and may finish some: they must be inputs and outputs of the checkpoint, or the recomputation would
backpropagate through the graph of the first forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.core import tensor_parallel
from torch import Tensor

if TYPE_CHECKING:
    from k3_plugins.transformer.attention_residuals.block import AttentionResidualBlock


def windows(block: AttentionResidualBlock) -> Iterator[tuple[int, int, bool]]:
    """(first layer, end, recompute) for the stage's layers, by Megatron's --recompute-method and -num-layers."""
    count, step = len(block.layers), block.config.recompute_num_layers
    if block.config.recompute_method == "uniform":
        for start in range(0, count, step):
            yield start, min(start + step, count), True
    elif block.config.recompute_method == "block":
        for index in range(count):
            yield index, index + 1, index < step
    else:
        raise ValueError(f"--recompute-method must be uniform or block, it is {block.config.recompute_method!r}")


def checkpointed_forward(
    block: AttentionResidualBlock,
    hidden_states: Tensor,
    *,
    extract_layer_indices: set[int] | None = None,
    layer_offset: int = 0,
    **layer_inputs: Any,
) -> Tensor | tuple[Tensor, list[Tensor]]:
    """The counterpart of megatron.core.recompute.checkpointed_forward.

    Args:
        block: the decoder stage; its bank holds the blocks finished by earlier stages.
        hidden_states: partial sum [s, b, d].
        extract_layer_indices, layer_offset: as in the original; the partial sums after these layers are returned too.
        layer_inputs: keyword arguments of a layer (masks and rotary embeddings carry no gradient).
    """
    extract = extract_layer_indices or set()
    extracted: list[Tensor] = []
    bank = block.residual_bank
    partial = hidden_states
    for start, end, recompute in windows(block):

        def run(partial: Tensor, *blocks: Tensor, start: int = start, end: int = end) -> tuple[Tensor, ...]:
            with bank.window(blocks, block.residual_queries(start, end)) as inner:
                for layer in block.layers[start:end]:
                    partial, _ = layer(hidden_states=partial, **layer_inputs)
                finished = inner.blocks[len(blocks) :]
            # the caller pushes the incoming partial sum itself: an input must not come back as an output
            return (partial, *finished[block.layers[start].starts_block :])

        before = partial
        inputs = (partial, *bank.blocks)
        partial, *finished = tensor_parallel.checkpoint(run, False, *inputs) if recompute else run(*inputs)
        if block.layers[start].starts_block:
            bank.push(before)
        for finished_block in finished:
            bank.push(finished_block)
        if (end - 1 + layer_offset) in extract:
            extracted.append(partial)
    return (partial, extracted) if extract else partial


def wrap_checkpointed_forward(original: Any) -> Any:
    """Patch body: decoders with Attention Residuals take the function above, all other modules the original."""
    from k3_plugins.transformer.attention_residuals.block import AttentionResidualBlock

    @functools.wraps(original)
    def checkpointed(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, AttentionResidualBlock):
            return original(self, hidden_states, *args, **kwargs)
        if args:
            raise TypeError("attention residuals: checkpointed_forward takes keyword arguments only")
        if kwargs.pop("use_inner_quantization_context"):
            raise ValueError(
                "attention residuals: full recomputation of fp8 or fp4 layers is not supported; use"
                " --recompute-granularity selective"
            )
        return checkpointed_forward(self, hidden_states, **kwargs)

    dispatch: Any = checkpointed
    dispatch.knows_attention_residuals = True
    return dispatch


def require_patch() -> None:
    """Refuse to recompute through the original function: it would silently give wrong gradients.

    Raises:
        RuntimeError: if the patch is not in place.
    """
    from megatron.core.transformer import transformer_block

    if not getattr(transformer_block.checkpointed_forward, "knows_attention_residuals", False):
        raise RuntimeError(
            "attention residuals: --recompute-granularity full needs the patch attnres.recompute, which is not applied;"
            " start through one of the doors of k3_plugins with attnres in --k3-plugins"
        )
