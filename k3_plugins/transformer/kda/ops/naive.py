"""KDA token by token: the readable definition, and the oracle that every faster backend is tested against.

Per head, with the state S in R^{K x V} (Kimi Linear, arXiv 2510.26692, section 3):

    S~  = Diag(exp(g_t)) S_{t-1}
    S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T
    o_t = scale * S_t^T q_t

Shapes: B batch, T tokens, H query/key heads, HV value heads (a multiple of H), K key dim, V value dim,
N packed sequences. Plain autograd: memory grows with T * K * V, so this is for tests and for single steps.
"""

import torch
from torch import Tensor

from k3_plugins.transformer.kda.ops.inputs import KDAInputs


def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence, for generation.

    Args:
        q, k: [B, H, K], L2-normalised. v: [B, HV, V]. g: [B, HV, K] log decay. beta: [B, HV].
        state: [B, HV, K, V] of the previous token, or None at the start of a sequence.
        scale: defaults to K ** -0.5.
    Returns:
        (o [B, HV, V] in v's dtype, new state [B, HV, K, V] in fp32, or fp64 for fp64 inputs).
    """
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    group = v.shape[1] // k.shape[1]
    qf, kf = (x.to(dtype).repeat_interleave(group, dim=1) for x in (q, k))
    vf, gf, bf = v.to(dtype), g.to(dtype), beta.to(dtype)
    if state is None:
        state = vf.new_zeros(*kf.shape, vf.shape[-1])
    decayed = state.to(dtype) * gf.exp().unsqueeze(-1)
    residual = vf - torch.einsum("bhk,bhkv->bhv", kf, decayed)
    state = decayed + torch.einsum("bhk,bhv->bhkv", kf * bf.unsqueeze(-1), residual)
    o = torch.einsum("bhk,bhkv->bhv", qf * scale, state)
    return o.to(v.dtype), state


def kda_naive(inputs: KDAInputs) -> tuple[Tensor, Tensor | None]:
    """The recurrence over whole (packed) sequences; see `k3_plugins.transformer.kda.ops.kda` for the arguments."""
    x = inputs
    # unbind, not x[:, t]: the backward of T separate index operations is quadratic in T.
    tokens = list(zip(*(t.unbind(1) for t in (x.q, x.k, x.v, x.g, x.beta)), strict=True))
    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    bounds = x.bounds or ((0, len(tokens)),)
    for n, (start, end) in enumerate(bounds):
        state = x.initial_state
        if state is not None and x.bounds is not None:
            state = state[n : n + 1]
        for t in range(start, end):
            q, k, v, g, beta = tokens[t]
            o, state = kda_step(q, k, v, g, beta, state, scale=x.scale)
            outputs.append(o)
        if state is None:
            state = x.zero_state(x.v.shape[0])
        finals.append(state.to(x.compute_dtype))
    padding = len(tokens) - len(outputs)
    if padding:
        outputs.extend([torch.zeros_like(tokens[0][2])] * padding)
    o = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x.v)
    return o, torch.cat(finals) if x.output_final_state else None
