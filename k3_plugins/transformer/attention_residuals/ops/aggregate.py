"""Attention over residual sources with the saved activations of a plain residual connection.

Attention Residuals (arXiv 2603.15031), equations 8-10. Shapes: S sources, T tokens (flattened leading shape),
d hidden size.

    r_j = (mean_d v_j^2 + eps)^-1/2        logit_j = r_j * (query * key_weight) . v_j
    alpha = softmax_j(logit)                h = sum_j alpha_j v_j

The backward needs the sources, which the residual stream keeps alive anyway (they are saved by reference), and alpha,
S fp32 scalars a token. Keys and logits are recomputed. With g = dL/dh:

    dalpha_j = g . v_j       dlogit_j = alpha_j (dalpha_j - sum_k alpha_k dalpha_k)
    dv_j = alpha_j g + dlogit_j (r_j query*key_weight - logit_j r_j^2 v_j / d)
    c = sum_{j,t} dlogit_j r_j v_j    dquery = key_weight * c    dkey_weight = query * c

Arithmetic is fp32 (fp64 for fp64 sources) whatever the dtype of the sources. The sources are never stacked: that
would copy S*T*d elements in every sublayer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from k3_plugins.transformer.attention_residuals.ops.two_phase import InterBlock


class Aggregate(NamedTuple):
    """Result of an aggregation: `hidden` like a source, `weights` [S, T] fp32 (no gradient flows through them)."""

    hidden: Tensor
    weights: Tensor


def math_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which logits, softmax and sums are evaluated."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def key_scale_and_logit(value: Tensor, scaled_query: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`value` [T, d] and `query * key_weight` [d], both in the math dtype -> (r [T], logit [T])."""
    mean_square = torch.linalg.vector_norm(value, dim=-1).square_().div_(value.shape[-1])
    scale = mean_square.add_(eps).rsqrt_()
    return scale, torch.mv(value, scaled_query).mul_(scale)


def combine(weights: Tensor, sources: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """`sum_j weights[j] * sources[j]` in the math dtype, returned in the sources' dtype and shape."""
    first = sources[0]
    dtype, hidden_size = math_dtype(first), first.shape[-1]
    total = first.reshape(-1, hidden_size).to(dtype) * weights[0].unsqueeze(-1)
    for weight, source in zip(weights[1:], sources[1:], strict=True):
        total.addcmul_(source.reshape(-1, hidden_size).to(dtype), weight.unsqueeze(-1))
    return total.to(first.dtype).view(first.shape)


class _Aggregate(torch.autograd.Function):
    """See the module's docstring. Inputs: query, key_weight, eps, inter-block statistics or None, then the sources."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key_weight: Tensor, eps: float, inter: InterBlock | None, *sources: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype, hidden_size = math_dtype(sources[0]), sources[0].shape[-1]
        scaled_query = query.to(dtype) * key_weight.to(dtype)
        if inter is None:
            logits = torch.stack(
                [
                    key_scale_and_logit(source.reshape(-1, hidden_size).to(dtype), scaled_query, eps)[1]
                    for source in sources
                ]
            )
            weights = torch.softmax(logits, dim=0)
            hidden = combine(weights, sources)
        else:
            partial = sources[-1] if len(sources) > inter.logits.shape[0] else None
            hidden, weights = inter.merge(partial, scaled_query, eps, like=sources[0])
        ctx.eps = eps
        ctx.save_for_backward(query, key_weight, weights, *sources)
        ctx.mark_non_differentiable(weights)
        ctx.set_materialize_grads(False)
        return hidden, weights

    @staticmethod
    def backward(ctx: Any, grad_hidden: Tensor | None, _grad_weights: None) -> tuple[Tensor | None, ...]:
        query, key_weight, weights, *sources = ctx.saved_tensors
        if grad_hidden is None:
            return (None,) * (4 + len(sources))
        dtype, hidden_size = math_dtype(sources[0]), sources[0].shape[-1]
        wide_query, wide_key = query.to(dtype), key_weight.to(dtype)
        scaled_query = wide_query * wide_key
        grad = grad_hidden.reshape(-1, hidden_size).to(dtype)

        values = [source.reshape(-1, hidden_size) for source in sources]
        grad_weights = torch.stack([torch.linalg.vecdot(grad, value.to(dtype)) for value in values])
        grad_logits = weights * (grad_weights - (weights * grad_weights).sum(dim=0, keepdim=True))

        key_moment = torch.zeros_like(scaled_query)
        grad_sources: list[Tensor | None] = []
        for index, value in enumerate(values):
            wide = value.to(dtype)
            scale, logit = key_scale_and_logit(wide, scaled_query, ctx.eps)
            scaled_grad = grad_logits[index] * scale
            key_moment += torch.mv(wide.t(), scaled_grad)
            if not ctx.needs_input_grad[4 + index]:
                grad_sources.append(None)
                continue
            grad_value = grad * weights[index].unsqueeze(-1)
            grad_value.addcmul_(scaled_grad.unsqueeze(-1), scaled_query)
            through_norm = scaled_grad.mul_(logit).mul_(scale).div_(-hidden_size)
            grad_value.addcmul_(wide, through_norm.unsqueeze(-1))
            grad_sources.append(grad_value.to(value.dtype).view(sources[index].shape))
        grad_query = (wide_key * key_moment).to(query.dtype)
        grad_key = (wide_query * key_moment).to(key_weight.dtype)
        return (grad_query, grad_key, None, None, *grad_sources)


def aggregate(
    query: Tensor,
    key_weight: Tensor,
    sources: list[Tensor],
    eps: float,
    inter: InterBlock | None = None,
) -> Aggregate:
    """Aggregate `sources` for one pseudo-query.

    Args:
        query: [d]; zeros make every source count equally.
        key_weight: RMSNorm weight of the keys [d].
        sources: one or more tensors of the same shape [..., d] and dtype.
        eps: RMSNorm epsilon.
        inter: this query's statistics over all sources but an optional last one (two_phase.py); the result is the
            same up to rounding.

    Raises:
        ValueError: no source, or sources whose shapes or dtypes differ.
    """
    if not sources:
        raise ValueError("attention residuals: there is no source to aggregate")
    first = sources[0]
    for source in sources[1:]:
        if source.shape != first.shape or source.dtype != first.dtype:
            raise ValueError(
                f"attention residuals: sources differ: {tuple(source.shape)} {source.dtype} against"
                f" {tuple(first.shape)} {first.dtype}"
            )
    return Aggregate(*_Aggregate.apply(query, key_weight, eps, inter, *sources))
