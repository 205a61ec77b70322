"""Attention Residuals in a multi-token-prediction depth.

A depth is a short stack: its projected input plays the part of the embedding, its one layer aggregates like any
layer, and one more query aggregates the two sources before the depth's final norm, as the model's output does.

Shapes: s sequence, b batch, d hidden size.
"""

import functools
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from k3_plugins.transformer.attention_residuals.aggregator import AttentionResidual
from k3_plugins.transformer.attention_residuals.bank import ResidualBank
from k3_plugins.transformer.attention_residuals.config import AttentionResidualsConfig, max_sources

if TYPE_CHECKING:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as _Layer
else:
    _Layer = object


class AttentionResidualMTPLayer(_Layer):
    """Mixin over a MultiTokenPredictionLayer class; see `attention_residual_mtp_layer`."""

    def __init__(
        self, config: TransformerConfig, *args: Any, attention_residuals: AttentionResidualsConfig, **kwargs: Any
    ):
        super().__init__(config, *args, **kwargs)
        if self.mtp_layer_pattern is not None:
            raise ValueError("attention residuals: multi-token prediction by a hybrid layer pattern is not supported")
        self.output_res = AttentionResidual(
            config, max_sources(config.num_layers, attention_residuals.attn_res_block_size)
        )
        self.residual_bank = ResidualBank()
        self.mtp_model_layer.residual_bank = self.residual_bank

    def _proj_and_transformer_layer(self, *args: Any, **kwargs: Any) -> Tensor:
        # everything between begin() and clear() is inside the stock checkpoint, so recomputation starts afresh too
        queries = (*self.mtp_model_layer.residual_queries, (0, self.output_res))
        self.residual_bank.begin((), queries, measure=self.training)
        try:
            return super()._proj_and_transformer_layer(*args, **kwargs)
        finally:
            self.residual_bank.clear()

    def _postprocess(self, hidden_states: Tensor) -> Tensor:
        _, (hidden, _) = self.residual_bank.aggregate(self.output_res, hidden_states)
        return super()._postprocess(hidden)


@functools.cache
def attention_residual_mtp_layer(layer_class: type[MultiTokenPredictionLayer]) -> type[MultiTokenPredictionLayer]:
    """The given MTP layer class with Attention Residuals; a class that has them is returned as it is."""
    if issubclass(layer_class, AttentionResidualMTPLayer):
        return layer_class
    return type(f"AttentionResidual{layer_class.__name__}", (AttentionResidualMTPLayer, layer_class), {})
