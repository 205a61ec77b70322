"""The decoder stack of a GPT model with Attention Residuals: sources in, layers, output aggregation, sources out.

The stock TransformerBlock.forward runs unchanged over layers that carry the running partial sum. Around it:

- a first stage starts an empty bank; a later one unpacks the blocks and the partial sum that arrived,
- the output query aggregates all sources right before the final norm,
- a stage that is not the last packs what the next one lacks.

Shapes: s sequence, b batch, d hidden size.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from k3_plugins.memory.annotation import listening
from k3_plugins.pipeline_parallel.attnres_payload import session as payload
from k3_plugins.transformer.attention_residuals.aggregator import AttentionResidual
from k3_plugins.transformer.attention_residuals.bank import Query, ResidualBank
from k3_plugins.transformer.attention_residuals.config import AttentionResidualsConfig, max_sources
from k3_plugins.transformer.attention_residuals.layer import (
    AttentionResidualLayer,
    SublayerInput,
    dropped_until_backward,
    free_until_backward,
)
from k3_plugins.transformer.attention_residuals.recompute import require_patch

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlock as _Block
else:
    _Block = object


class AttentionResidualBlock(_Block):
    """Mixin over TransformerBlock, given to a decoder that was built from `spec.wrap_block_spec`.

    See `install`.
    """

    attention_residuals: AttentionResidualsConfig
    residual_bank: ResidualBank
    aggregates_output: bool
    """Whether this stage holds the output query (the stage of the final norm)."""
    output_res: AttentionResidual
    """The output query, on the stage that holds it."""
    _measure_next: bool
    _output_input: SublayerInput | None
    """The output aggregation, until the final norm has read it."""

    def residual_queries(self, start: int = 0, end: int | None = None) -> tuple[Query, ...]:
        """The queries of layers start..end-1 of this stage; with the whole stage also the output query."""
        queries = tuple(query for layer in self.layers[start:end] for query in layer.residual_queries)
        if end is None and self.aggregates_output:
            last_block = (self.config.num_layers - 1) // self.attention_residuals.attn_res_block_size
            queries += ((last_block, self.output_res),)
        return queries

    def request_measurement(self) -> None:
        """Refresh the statistics of every aggregation in the next forward pass (once)."""
        self._measure_next = True

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Receive the previous stage's payload (None on the first stage); called by Megatron's schedule."""
        self._incoming_blocks: list[Tensor] = []
        if input_tensor is None or self.pre_process:
            super().set_input_tensor(input_tensor)
            return
        # Megatron reads the rotary length from input_tensor, so it must be the partial sum [s, b, d]
        self._incoming_blocks, partial = payload.current().unpack(self.vp_stage or 0, input_tensor)
        super().set_input_tensor(partial)

    def forward(self, hidden_states: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """See TransformerBlock.forward; a stage that is not the last returns the packed payload (flat)."""
        incoming, self._incoming_blocks = getattr(self, "_incoming_blocks", []), []
        measure, self._measure_next = self._measure_next and self.training, False
        bank = self.residual_bank
        bank.begin(incoming, self.residual_queries(), measure=measure)
        try:
            output = super().forward(hidden_states, *args, **kwargs)
            if self.aggregates_output and self.final_layernorm is None:
                output = self._aggregate_output(output)
                self._output_input = None
            if self.pg_collection.pp.size() == 1:
                return output
            blocks = [] if self.aggregates_output else bank.blocks
            return payload.current().pack(self.vp_stage or 0, blocks, output)
        finally:
            bank.clear()

    def _aggregate_output(self, partial: Tensor) -> Tensor:
        sources, (hidden, weights) = self.residual_bank.aggregate(self.output_res, partial)
        if self.attention_residuals.attn_res_recompute_input == "on":
            dropped_until_backward(hidden, sources, weights)
        self._output_input = SublayerInput(partial, hidden, sources, weights)
        return hidden

    def _before_final_layernorm(self, _module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self._aggregate_output(args[0]), *args[1:])

    def _after_final_layernorm(self, _module: torch.nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
        pending, self._output_input = self._output_input, None
        assert pending is not None, "the norm's pre-hook has aggregated its input"
        recompute = self.attention_residuals.attn_res_recompute_input == "on" and not listening()
        if recompute and pending.hidden.requires_grad and output.requires_grad:
            free_until_backward(pending, output)


@functools.cache
def _with_mixin(block_class: type[TransformerBlock]) -> type[TransformerBlock]:
    return type(f"AttentionResidual{block_class.__name__}", (AttentionResidualBlock, block_class), {})


def _stage_of_output(block: TransformerBlock) -> bool:
    """Megatron's own rule for the place of the final norm (without asking whether a norm exists)."""
    if block.config.mtp_num_layers is None:
        return block.post_process
    return any(layer.layer_number == block.config.num_layers for layer in block.layers)


def install(block: TransformerBlock, config: AttentionResidualsConfig) -> None:
    """Turn a freshly built decoder, whose layers came from `spec.wrap_block_spec`, into one with Attention Residuals.

    Raises:
        ValueError: if a layer has no Attention Residuals.
        RuntimeError: for full recomputation without the patch that makes it correct.
    """
    for layer in block.layers:
        if not isinstance(layer, AttentionResidualLayer):
            raise ValueError(
                f"attention residuals: layer {layer.layer_number} is a plain {type(layer).__name__}; build the block"
                " from attention_residuals.spec.wrap_block_spec"
            )
    if block.config.recompute_granularity == "full":
        require_patch()
    block.__class__ = _with_mixin(block.__class__)
    block.attention_residuals = config
    block.residual_bank = ResidualBank()
    block._measure_next = False
    for layer in block.layers:
        layer.residual_bank = block.residual_bank
    block.aggregates_output = _stage_of_output(block)
    if block.aggregates_output:
        block.output_res = AttentionResidual(
            block.config, max_sources(block.config.num_layers, config.attn_res_block_size)
        )
        if block.final_layernorm is not None:
            block.final_layernorm.register_forward_pre_hook(block._before_final_layernorm)
            block.final_layernorm.register_forward_hook(block._after_final_layernorm)
