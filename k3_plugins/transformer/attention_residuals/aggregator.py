"""The parameters of one depth-wise attention: a pseudo-query and the RMSNorm weight of its keys.

Shapes: S sources, s sequence, b batch, T = s*b tokens, d hidden size.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from k3_plugins.transformer.attention_residuals.ops.aggregate import Aggregate, aggregate
from k3_plugins.transformer.attention_residuals.ops.two_phase import InterBlock
from k3_plugins.transformer.norm import parameter_device


class AttentionResidual(MegatronModule):
    """Softmax attention of one learned query over the residual sources (Attention Residuals, equations 8-10).

    Both parameters are one-dimensional, so Megatron's optimizers give them no weight decay and matrix optimizers leave
    them to AdamW. The query starts at zero: every source counts equally.

    The buffer `source_weights` [max_sources] holds the mean weight of each source, zero beyond the last source. It is
    refreshed from `measured` of all ranks when metrics are written, and saved with the model, so that a checkpoint can
    be plotted.

    Args:
        config: Megatron's transformer config (hidden_size, layernorm_epsilon, params_dtype, sequence_parallel).
        max_sources: length of `source_weights`, the same for all aggregations of a model.
    """

    source_weights: Tensor

    def __init__(self, config: TransformerConfig, max_sources: int):
        super().__init__(config=config)
        device = parameter_device(config)
        self.query = torch.nn.Parameter(torch.empty(config.hidden_size, dtype=config.params_dtype, device=device))
        self.key_norm_weight = torch.nn.Parameter(torch.empty_like(self.query))
        parameter: Any
        for parameter in (self.query, self.key_norm_weight):
            # under sequence parallelism each rank sees its own tokens: Megatron sums these gradients over TP
            parameter.sequence_parallel = config.sequence_parallel
        self.register_buffer("source_weights", torch.empty(max_sources, dtype=torch.float32, device=device))
        self.measured: Tensor | None = None
        """This rank's mean weights [max_sources] over the last measured micro-batch."""
        self.relative_entropy: Tensor | None = None
        """Entropy of the weights over log(S), mean over the same micro-batch; None with a single source."""
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Query zero, key norm one (also called by Megatron after meta-device construction)."""
        self.query.zero_()
        self.key_norm_weight.fill_(1.0)
        self.source_weights.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        """Keep the statistics in fp32 when the model is cast (`Float16Module` casts buffers too)."""
        exact = self.source_weights
        super()._apply(fn, recurse)
        if self.source_weights.dtype != exact.dtype:
            device = self.source_weights.device
            self.source_weights = exact.to(device) if not exact.is_meta else torch.empty_like(exact, device=device)
        return self

    @torch.no_grad()
    def scaled_query(self) -> Tensor:
        """`query * key_norm_weight` [d] in fp32 or wider, without gradient: what the batched pass needs."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        return self.query.to(dtype) * self.key_norm_weight.to(dtype)

    def forward(self, sources: list[Tensor], inter: InterBlock | None = None, measure: bool = False) -> Aggregate:
        """S sources [s, b, d] -> Aggregate(hidden [s, b, d], weights [S, T]); `measure` refreshes the statistics."""
        result = aggregate(self.query, self.key_norm_weight, sources, self.config.layernorm_epsilon, inter)
        if measure:
            self._measure(result.weights)
        return result

    @torch.no_grad()
    def _measure(self, weights: Tensor) -> None:
        count = weights.shape[0]
        self.measured = torch.zeros_like(self.source_weights)
        self.measured[:count] = weights.mean(dim=1)
        if count > 1:
            entropy = torch.special.entr(weights).sum(dim=0).mean()
            self.relative_entropy = entropy / math.log(count)
