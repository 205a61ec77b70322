"""The checked arguments of one KDA call, shared by the backends.

Shapes: B batch, T tokens, H query/key heads, HV value heads, K key dim, V value dim, N packed sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KDAOptions:
    """What a call of `k3_plugins.transformer.kda.ops.kda` is besides its tensors."""

    scale: float
    output_final_state: bool
    bounds: tuple[tuple[int, int], ...] | None
    """(start, end) row of every packed sequence, or None when each batch entry is one sequence"""
    gate_lower_bound: float | None
    """what the caller says about min(g); a hint for kernels that need a bounded gate"""
    sequence_parts: int | None = None
    """parts that the torch backend cuts a sequence into; None for automatic"""

    def with_tensors(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
    ) -> "KDAInputs":
        """The call with these tensors."""
        return KDAInputs(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, **_options(self))


@dataclass(frozen=True, kw_only=True)
class KDAInputs(KDAOptions):
    """Arguments of `k3_plugins.transformer.kda.ops.kda` after validation."""

    q: Tensor
    """[B, T, H, K]"""
    k: Tensor
    """[B, T, H, K]"""
    v: Tensor
    """[B, T, HV, V]"""
    g: Tensor
    """[B, T, HV, K], log decay"""
    beta: Tensor
    """[B, T, HV]"""
    initial_state: Tensor | None
    """[B, HV, K, V], or [N, HV, K, V] with packed sequences"""

    @property
    def compute_dtype(self) -> torch.dtype:
        """fp64 for fp64 inputs, else fp32: the state and the residual are never formed in 16 bits."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32

    def without_tensors(self) -> KDAOptions:
        """What keeps no tensor alive; an autograd function saves its tensors apart."""
        return KDAOptions(**_options(self))

    def rows(self, rows: slice) -> "KDAInputs":
        """These rows alone, as one sequence per batch entry that starts from zero."""
        q, k, v, g, beta = (t[:, rows] for t in (self.q, self.k, self.v, self.g, self.beta))
        return replace(self, q=q, k=k, v=v, g=g, beta=beta, initial_state=None, bounds=None)

    def with_start(self, state: Tensor | None, bounds: tuple[tuple[int, int], ...] | None) -> "KDAInputs":
        """Other boundaries and starting states; with boundaries, `state` may cover the first sequences only."""
        return replace(self, initial_state=state, bounds=bounds)

    def zero_state(self, n: int) -> Tensor:
        """[n, HV, K, V] of zeros in the compute dtype."""
        heads, width = self.v.shape[2:]
        return self.v.new_zeros(n, heads, self.k.shape[-1], width, dtype=self.compute_dtype)


def _options(call: KDAOptions) -> dict[str, Any]:
    return {field.name: getattr(call, field.name) for field in fields(KDAOptions)}


def sequence_bounds(cu_seqlens: Tensor | Sequence[int], total: int) -> tuple[tuple[int, int], ...]:
    """(start, end) of every packed sequence, empty ones included; ValueError names what is wrong."""
    cu = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else [int(c) for c in cu_seqlens]
    if len(cu) < 2 or cu[0] != 0:
        raise ValueError(f"kda: cu_seqlens must start with 0 and hold at least one end, got {cu[:8]}")
    if any(b < a for a, b in zip(cu, cu[1:], strict=False)):
        raise ValueError(f"kda: cu_seqlens must not decrease, got {cu[:16]}{' ...' if len(cu) > 16 else ''}")
    if cu[-1] > total:
        raise ValueError(f"kda: cu_seqlens ends at {cu[-1]} but there are only {total} rows")
    return tuple(zip(cu, cu[1:], strict=False))


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | Sequence[int] | None,
    gate_lower_bound: float | None,
    sequence_parts: int | None,
) -> KDAInputs:
    """Validate shapes, dtypes and devices; raises ValueError naming the argument and its shape."""
    for name, x, rank in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("g", g, 4), ("beta", beta, 3)):
        if x.dim() != rank:
            raise ValueError(f"kda: {name} must have {rank} dimensions, got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"kda: {name} must be a floating-point tensor, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"kda: {name} is on {x.device} but q is on {q.device}")
    b, t, h, width = q.shape
    heads = v.shape[2]
    if k.shape != q.shape:
        raise ValueError(f"kda: q and k must have one shape, got {tuple(q.shape)} and {tuple(k.shape)}")
    if tuple(v.shape[:2]) != (b, t):
        raise ValueError(f"kda: v must be [{b}, {t}, HV, V] like q, got {tuple(v.shape)}")
    if heads % h:
        raise ValueError(f"kda: the {heads} value heads must be a multiple of the {h} query/key heads")
    if tuple(g.shape) != (b, t, heads, width):
        raise ValueError(f"kda: g must be [B, T, HV, K] = {(b, t, heads, width)}, got {tuple(g.shape)}")
    if tuple(beta.shape) != (b, t, heads):
        raise ValueError(f"kda: beta must be [B, T, HV] = {(b, t, heads)}, got {tuple(beta.shape)}")
    doubles = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.dtype == torch.float64]
    if doubles and (len(doubles) < 3 or g.dtype != torch.float64 or beta.dtype != torch.float64):
        raise ValueError("kda: to compute in fp64, pass q, k, v, g and beta all in fp64")
    bounds = None
    if cu_seqlens is not None:
        if b != 1:
            raise ValueError(f"kda: packed sequences (cu_seqlens) need a batch of 1, got {b}")
        bounds = sequence_bounds(cu_seqlens, t)
    if initial_state is not None:
        want = (b if bounds is None else len(bounds), heads, width, v.shape[-1])
        if tuple(initial_state.shape) != want:
            raise ValueError(f"kda: initial_state must be {want}, got {tuple(initial_state.shape)}")
    if gate_lower_bound is not None and not gate_lower_bound < 0:
        raise ValueError(f"kda: gate_lower_bound must be negative, got {gate_lower_bound}")
    if sequence_parts is not None and sequence_parts < 1:
        raise ValueError(f"kda: sequence_parts must be at least 1 (None for automatic), got {sequence_parts}")
    return KDAInputs(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=width**-0.5 if scale is None else float(scale),
        initial_state=initial_state,
        output_final_state=output_final_state,
        bounds=bounds,
        gate_lower_bound=gate_lower_bound,
        sequence_parts=sequence_parts,
    )
