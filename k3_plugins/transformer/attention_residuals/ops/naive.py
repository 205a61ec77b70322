"""Attention over residual sources, written as the paper prints it: the reference for every faster path.

Attention Residuals (arXiv 2603.15031), equations 8-10, in the Block form. Shapes: S sources, T tokens (any leading
shape), d hidden size. Every operation is plain autograd in the dtype of its inputs, so it runs in fp64.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension. `x` [..., d], `weight` [d] -> [..., d]."""
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def aggregate(query: Tensor, key_weight: Tensor, sources: list[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """Weigh the sources by the softmax of `query . RMSNorm(source)` and add them up; values are not normalised.

    Args:
        query: pseudo-query [d].
        key_weight: RMSNorm weight of the keys [d].
        sources: S tensors [..., d].
        eps: RMSNorm epsilon.

    Returns:
        (aggregate [..., d], weights [S, ...]).
    """
    values = torch.stack(sources)
    logits = (rms_norm(values, key_weight, eps) * query).sum(dim=-1)
    weights = torch.softmax(logits, dim=0)
    return (weights.unsqueeze(-1) * values).sum(dim=0), weights
