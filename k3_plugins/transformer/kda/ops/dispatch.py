"""Which backend computes KDA: named ones are obeyed or refused with the reason, "auto" chooses and says why.

Backends (one file each): `naive` (token recurrence, the oracle), `torch` (chunkwise, any device), `fla` (Triton
kernels of fla-core on a CUDA device).
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from k3_plugins.transformer.kda.ops import fla as fla_backend
from k3_plugins.transformer.kda.ops.inputs import check_inputs
from k3_plugins.transformer.kda.ops.naive import kda_naive
from k3_plugins.transformer.kda.ops.torch_chunk import kda_torch

logger = logging.getLogger(__name__)

BACKENDS = ("fla", "torch", "naive")
_announced: set[tuple[str, str]] = set()


class KDABackendError(RuntimeError):
    """A backend was asked for by name and cannot run here."""


def resolve_backend(
    name: str, device: torch.device | str, dtype: torch.dtype | None = None
) -> tuple[str, dict[str, str]]:
    """Choose the backend that computes KDA.

    Args:
        name: "auto", "fla", "torch" or "naive".
        device: where the tensors are.
        dtype: of the values, if known (fla has no fp64).
    Returns:
        (the chosen name, {rejected backend: reason}); nothing is rejected when a backend is named.
    Raises:
        ValueError: unknown name. KDABackendError: a named backend cannot run here, with the reason.
    """
    device = torch.device(device)
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"unknown KDA backend {name!r}: choose auto, {', '.join(BACKENDS)}")
    against_fla = fla_backend.reason_against(device, dtype)
    if name == "fla" and against_fla is not None:
        raise KDABackendError(f"KDA backend 'fla' cannot run: {against_fla}")
    if name != "auto":
        return name, {}
    rejected = {"naive": "the token-by-token oracle: slow, chosen by name only"}
    if against_fla is not None:
        return "torch", {"fla": against_fla, **rejected}
    return "fla", {"torch": "runs anywhere, but fla's kernels are made for this device", **rejected}


def _announce(chosen: str, device: torch.device, rejected: dict[str, str]) -> None:
    if (chosen, device.type) in _announced:
        return
    _announced.add((chosen, device.type))
    why = "; ".join(f"{name} rejected: {reason}" for name, reason in rejected.items())
    logger.info("KDA backend on %s: %s (%s)", device.type, chosen, why)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: str = "auto",
    gate_lower_bound: float | None = None,
    sequence_parts: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692, section 3), causal, one state per head.

        S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T;   o_t = scale * S_t^T q_t

    Args:
        q, k: [B, T, H, K], already L2-normalised over K.
        v: [B, T, HV, V]; HV a multiple of H (value head i reads query/key head i // (HV / H)).
        g: [B, T, HV, K] log decay, <= 0. beta: [B, T, HV], in (0, 1).
        scale: defaults to K ** -0.5.
        initial_state: [B, HV, K, V], or [N, HV, K, V] with cu_seqlens; zeros if None.
        output_final_state: also return the state after the last token.
        cu_seqlens: [N + 1] cumulative lengths of packed sequences (B must be 1). The state starts anew at each;
            rows after the last boundary give zero output and zero gradient; empty sequences are accepted.
        backend: "auto", "fla", "torch" or "naive"; see `resolve_backend`.
        gate_lower_bound: a number that every g is known to exceed, None if none is known. `torch` and `naive`
            are exact for any g and ignore it; `fla` may use dense tiles if it is in [-5, 0) and checks it then.
        sequence_parts: intra-device context parallelism of the `torch` backend: cut every sequence into this many
            parts that run side by side (exact; 1 turns it off, None lets a cost rule decide). The other backends
            have no such parts and refuse a number above 1.
    Returns:
        (o [B, T, HV, V] in v's dtype, final state in fp32 (fp64 for fp64 inputs), or None).
    Raises:
        ValueError: shapes that do not fit. KDABackendError: a named backend that cannot run here.
    """
    chosen, rejected = resolve_backend(backend, q.device, v.dtype)
    if backend == "auto":
        _announce(chosen, q.device, rejected)
    inputs = check_inputs(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        gate_lower_bound=gate_lower_bound,
        sequence_parts=sequence_parts,
    )
    if chosen != "torch" and (sequence_parts or 1) > 1:
        raise ValueError(f"kda: sequence_parts={sequence_parts} needs backend='torch', but {chosen!r} computes this")
    run = {"fla": fla_backend.kda_fla, "torch": kda_torch, "naive": kda_naive}[chosen]
    return run(inputs)
