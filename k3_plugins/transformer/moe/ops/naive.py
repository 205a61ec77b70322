"""LatentMoE written out token by token and expert by expert (K3 report, equation 11): the oracle. Slow on purpose.

Letters: n tokens, d width, l latent width, E experts, k experts per token, f expert width, F shared-expert width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def situ_glu(gate: Tensor, up: Tensor, beta_gate: float = 4.0, beta_up: float = 25.0) -> Tensor:
    """The definition, with autograd; ``math.inf`` for a bound removes it."""
    bounded = gate if math.isinf(beta_gate) else beta_gate * torch.tanh(gate / beta_gate)
    up = up if math.isinf(beta_up) else beta_up * torch.tanh(up / beta_up)
    return bounded * torch.sigmoid(gate) * up


def route(x: Tensor, w_router: Tensor, bias: Tensor, k: int, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """``(experts, weights)``, each ``[n, k]``: sigmoid scores, the bias for selection only, weights over the chosen."""
    scores = torch.sigmoid(x @ w_router.T)
    experts = (scores + bias).topk(k, dim=1).indices
    chosen = scores.gather(1, experts)
    return experts, chosen / chosen.sum(1, keepdim=True) * scaling


def latent_moe(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w_down: Tensor | None,
    w_up: Tensor | None,
    norm_weight: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    shared: tuple[Tensor, Tensor] | None,
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
    eps: float = 1e-5,
) -> Tensor:
    """``y = Shared(x) + W_up RMSNorm(sum_i p_i E_i(W_down x))``.

    Args:
        x: ``[n, d]``.
        experts: int ``[n, k]``; -1 marks a choice that goes nowhere.
        weights: ``[n, k]``.
        w_down: ``[l, d]``, or None (then l = d and there is no up-projection and no norm).
        w_up: ``[d, l]``.
        norm_weight: ``[l]``, or None for no norm.
        w1: ``[E, 2 f, l]``, gate rows first.
        w2: ``[E, l, f]``.
        shared: ``([2 F, d], [d, F])``, or None.

    Returns:
        ``[n, d]``.
    """
    rows = []
    for t in range(x.shape[0]):
        z = x[t] if w_down is None else w_down @ x[t]
        u = torch.zeros_like(z)
        for e, p in zip(experts[t].tolist(), weights[t], strict=True):
            if e < 0:
                continue
            gate, up = (w1[e] @ z).chunk(2)
            u = u + p * (w2[e] @ situ_glu(gate, up, beta_gate, beta_up))
        if norm_weight is not None:
            u = u / torch.sqrt(u.pow(2).mean() + eps) * norm_weight
        y = u if w_up is None else w_up @ u
        if shared is not None:
            gate, up = (shared[0] @ x[t]).chunk(2)
            y = y + shared[1] @ situ_glu(gate, up, beta_gate, beta_up)
        rows.append(y)
    return torch.stack(rows)
