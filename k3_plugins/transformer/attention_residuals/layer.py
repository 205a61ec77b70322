"""A transformer layer of any kind whose two sublayers read an aggregate of the residual sources.

Attention Residuals (arXiv 2603.15031). The layer's own class (dense, MoE, KDA, MLA: whatever the spec names) is
subclassed and keeps its forward. Megatron's `hidden_states` between layers is the running partial sum of the block:

    if this layer starts a block: push hidden_states as a finished block, the partial sum is empty
    h = aggregate(blocks, partial);  partial = partial + attention(norm(h))
    h = aggregate(blocks, partial);  partial = partial + mlp(norm(h))

Stock code adds the sublayer's output to the sublayer's input; here the bias-dropout-add adds it to the partial sum
instead, which is the only difference inside the stock forward.

Shapes: s sequence, b batch, d hidden size, S sources, T = s*b.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from k3_plugins.memory.annotation import annotate, listening
from k3_plugins.transformer.attention_residuals.aggregator import AttentionResidual
from k3_plugins.transformer.attention_residuals.bank import Query, ResidualBank
from k3_plugins.transformer.attention_residuals.config import AttentionResidualsConfig, max_sources
from k3_plugins.transformer.attention_residuals.ops.aggregate import combine


@dataclass
class SublayerInput:
    """What the bias-dropout-add of a sublayer needs from the aggregation before it."""

    partial: Tensor | None
    hidden: Tensor
    sources: list[Tensor]
    weights: Tensor


class PartialSumAdd:
    """Takes the place of a layer's bias-dropout-add: adds the sublayer's output to the partial sum.

    It is the last thing that happens in a sublayer, so this is also where the sublayer's input, the aggregate, is
    freed: its storage is emptied and filled again (from sources that are alive anyway, and S scalars a token) when the
    gradient of the sum arrives, before any part of the sublayer's backward runs.
    """

    def __init__(self, bias_dropout_add: Callable[..., Any], recompute_input: bool):
        self.bias_dropout_add = bias_dropout_add
        self.recompute_input = recompute_input
        self.pending: SublayerInput | None = None

    def __call__(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        add = self.bias_dropout_add(training, fused)

        def add_to_partial(output_with_bias: tuple[Tensor, Tensor | None], _input: Tensor, prob: float) -> Tensor:
            pending, self.pending = self.pending, None
            if pending is None:
                raise RuntimeError("attention residuals: a sublayer's output arrived without an aggregation before it")
            partial = pending.partial
            if partial is None:
                # a scalar zero broadcasts; its dtype carries --fp32-residual-connection
                partial = torch.zeros((), dtype=pending.hidden.dtype, device=pending.hidden.device)
            total = add(output_with_bias, partial, prob)
            frees = self.recompute_input and not listening()
            if frees and pending.hidden.requires_grad and total.requires_grad:
                free_until_backward(pending, total)
            return total

        return add_to_partial


def dropped_until_backward(hidden: Tensor, sources: list[Tensor], weights: Tensor) -> None:
    """The same under the activation manager: it drops `hidden`, and may move the sources that it is rebuilt from.

    `free_until_backward` would hold on to the sources until the backward.
    """
    annotate(hidden, "recompute", name="aggregate", recompute=(_combine, weights, *sources))


def _combine(weights: Tensor, *sources: Tensor) -> Tensor:
    return combine(weights, sources)


def free_until_backward(pending: SublayerInput, after: Tensor) -> None:
    """Empty the storage of `pending.hidden` and rebuild it when the gradient of `after` arrives.

    Every consumer of the aggregate must lie between it and `after`, and must have run.
    """
    hidden, sources, weights = pending.hidden.detach(), pending.sources, pending.weights
    storage = hidden.untyped_storage()
    num_bytes = storage.nbytes()

    @torch.no_grad()
    def rebuild(_grad: Tensor) -> None:
        if storage.nbytes() == 0:
            storage.resize_(num_bytes)
            # through the storage: a write through the tensor would count as an in-place change of a saved tensor
            storage.copy_(combine(weights, [source.detach() for source in sources]).untyped_storage())

    after.register_hook(rebuild)
    storage.resize_(0)


if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer as _Layer
else:
    _Layer = object


class AttentionResidualLayer(_Layer):
    """Mixin over a TransformerLayer class; see `attention_residual_layer`."""

    residual_bank: ResidualBank
    self_attn_bda: PartialSumAdd
    mlp_bda: PartialSumAdd

    def __init__(
        self, config: TransformerConfig, *args: Any, attention_residuals: AttentionResidualsConfig, **kwargs: Any
    ):
        super().__init__(config, *args, **kwargs)
        for slot, needed in (("self_attention", True), ("mlp", True), ("cross_attention", False)):
            if isinstance(getattr(self, slot), IdentityOp) is needed:
                raise ValueError(
                    f"attention residuals: layer {self.layer_number} has {'no' if needed else 'a'} {slot}; a layer must"
                    " consist of self-attention and an MLP"
                )
        block_size = attention_residuals.attn_res_block_size
        # an MTP depth is a stack of its own: its projected input is its embedding
        index = 0 if self.is_mtp_layer else self.layer_number - 1
        self.starts_block = index % block_size == 0
        self.residual_block = index // block_size
        recompute_input = attention_residuals.attn_res_recompute_input == "on"
        width = max_sources(config.num_layers, block_size)
        self.self_attention_res = AttentionResidual(config, width)
        self.mlp_res = AttentionResidual(config, width)
        self.self_attn_bda = PartialSumAdd(self.self_attn_bda, recompute_input)
        self.mlp_bda = PartialSumAdd(self.mlp_bda, recompute_input)

    @property
    def residual_queries(self) -> tuple[Query, Query]:
        """The queries of this layer in the order in which they are asked."""
        return (self.residual_block, self.self_attention_res), (self.residual_block, self.mlp_res)

    def _aggregate(self, add: PartialSumAdd, module: AttentionResidual, partial: Tensor | None) -> Tensor:
        sources, (hidden, weights) = self.residual_bank.aggregate(module, partial)
        if add.recompute_input:
            dropped_until_backward(hidden, sources, weights)
        add.pending = SublayerInput(partial, hidden, sources, weights)
        return hidden

    def _forward_attention(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        partial: Tensor | None = hidden_states
        if self.starts_block:
            self.residual_bank.push(hidden_states)
            partial = None
        hidden = self._aggregate(self.self_attn_bda, self.self_attention_res, partial)
        return super()._forward_attention(hidden, *args, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden = self._aggregate(self.mlp_bda, self.mlp_res, hidden_states)
        return super()._forward_mlp(hidden, *args, **kwargs)


@functools.cache
def attention_residual_layer(layer_class: type[TransformerLayer]) -> type[TransformerLayer]:
    """The given layer class with Attention Residuals; a class that has them is returned as it is.

    The constructor takes one more keyword, `attention_residuals: AttentionResidualsConfig`.

    Raises:
        TypeError: for a class that is no TransformerLayer.
    """
    if issubclass(layer_class, AttentionResidualLayer):
        return layer_class
    if not issubclass(layer_class, TransformerLayer):
        raise TypeError(f"attention residuals need layers derived from TransformerLayer, not {layer_class.__name__}")
    return type(f"AttentionResidual{layer_class.__name__}", (AttentionResidualLayer, layer_class), {})
