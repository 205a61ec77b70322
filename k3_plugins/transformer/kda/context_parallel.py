"""KDA under context parallelism (KCP): every rank holds a contiguous slice of the rows.

State (Kimi Linear, arXiv 2510.26692): from its own rows alone a rank computes [S_ext | M], the state that its last
sequence ends with if it started from zero, and the map of the state before onto the state after. One all-gather of
that fixed-size fp32 pair (4 * HV * K * (K + V) bytes sent per rank and batch entry, whatever T is), and a scan over
the earlier ranks, S <- M_j S + S_ext,j, gives the true incoming state; the rank then runs its rows from there. The
backward does the same from the last rank to the first with M^T and dS_ext, the gradient of the incoming state from
the rank's own rows. With packed sequences only the last local sequence is summarised forward and only the first
backward, and only the first has an incoming state.

Short convolution: the W - 1 rows before a slice, from as many earlier ranks as hold them, none over a sequence start.

Layouts: Megatron's softmax attention wants the zigzag layout (rank i holds slices i and 2n-1-i of 2n);
`zigzag_to_contiguous` and `contiguous_to_zigzag` move rows between the two, gradients included.

Shapes: n ranks, B batch, T rows of this rank, H and HV query/key and value heads, K key dim, V value dim, D channels,
W kernel size, N packed sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3_plugins.transformer.kda.ops import KDABackendError, kda, resolve_backend
from k3_plugins.transformer.kda.ops.chunk_layout import ChunkPlan, make_plan
from k3_plugins.transformer.kda.ops.fla import kda_fla_cp
from k3_plugins.transformer.kda.ops.inputs import KDAInputs, KDAOptions, check_inputs, sequence_bounds
from k3_plugins.transformer.kda.ops.segment import Blocking
from k3_plugins.transformer.kda.ops.torch_chunk import (
    backward,
    forward,
    scan_gradients,
    scan_states,
    summarize,
    summarize_backward,
)
from k3_plugins.transformer.kda.short_conv import short_conv


@dataclass(frozen=True)
class LocalSlice:
    """What a rank's contiguous rows are in terms of the global sequences."""

    pieces: tuple[tuple[int, int], ...]
    """local [start, end) of every non-empty piece of a sequence"""
    rows_before: int
    """rows of the first piece's sequence on earlier ranks; 0 if it starts here"""
    continues: bool
    """whether the last piece's sequence goes on on a later rank"""
    rows: int

    @property
    def through(self) -> bool:
        """One sequence comes in and goes out: only then does the outgoing state depend on the incoming one."""
        return (self.rows == 0 or len(self.pieces) == 1) and self.rows_before > 0 and self.continues


def slice_lengths(rows: int, lengths: Sequence[int] | None, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Rows of every rank of the group; all like this rank's if not given."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    lengths = (rows,) * size if lengths is None else tuple(int(x) for x in lengths)
    if len(lengths) != size or lengths[rank] != rows or min(lengths) < 0:
        raise ValueError(
            f"context parallelism: lengths must give the rows of each of the {size} ranks, {rows} for rank {rank}, "
            f"got {lengths}"
        )
    return lengths


def local_slice(bounds: tuple[tuple[int, int], ...], start: int, end: int) -> LocalSlice:
    """Cut global sequences to the rows [start, end) of one rank."""
    pieces = [(max(a, start) - start, min(b, end) - start) for a, b in bounds if max(a, start) < min(b, end)]
    # A rank without rows inside a sequence hands the state through.
    inside = [(a, b) for a, b in bounds if a < b and a <= start < b]
    before = start - inside[0][0] if inside else 0
    continues = any(max(a, 0) < end < b for a, b in bounds)
    return LocalSlice(tuple(pieces), before, continues, end - start)


@dataclass(frozen=True)
class _Call:
    """One KCP call on this rank: the arguments without tensors, and the rank's place."""

    x: KDAOptions
    packed: bool
    place: LocalSlice
    group: dist.ProcessGroup

    def piece(self, x: KDAInputs, which: int) -> KDAInputs:
        """The first (0) or last (-1) local piece as inputs of one unpacked sequence per batch entry."""
        if not self.packed or not self.place.pieces:
            return x.rows(slice(0, self.place.rows))
        return x.rows(slice(*self.place.pieces[which]))

    def local(self, x: KDAInputs, incoming: Tensor) -> KDAInputs:
        """This rank's rows with the incoming state."""
        bounds = self.place.pieces if self.packed else None
        return x.with_start(incoming if self.place.rows_before else None, bounds)

    def exchange(self, pair: Tensor) -> Tensor:
        """All-gather [B, HV, K, V + K] -> [n, B, HV, K, V + K]: the only communication of a direction."""
        gathered = pair.new_empty(dist.get_world_size(self.group), *pair.shape)
        dist.all_gather(list(gathered), pair.contiguous(), group=self.group)
        return gathered


def _plan(x: KDAInputs) -> tuple[ChunkPlan, Blocking]:
    plan = make_plan(x.v.shape[1], x.bounds, 1, x.v.device)
    return plan, Blocking.choose(x, plan)


class _KCP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, call: _Call) -> Tensor:
        x = call.x.with_tensors(q, k, v, g, beta, None)
        place, width = call.place, v.shape[-1]
        rank = dist.get_rank(call.group)
        pair = x.zero_state(v.shape[0]).new_zeros(v.shape[0], v.shape[2], k.shape[-1], width + k.shape[-1])
        if place.continues:
            last = call.piece(x, -1)
            pair = summarize(last, *_plan(last))[:, 0]
            if not place.through:  # the state starts anew on this rank
                pair[..., width:] = 0
        maps = pair[..., width:].contiguous()
        earlier = call.exchange(pair)[: rank + 1]
        incoming = scan_states(earlier, x.zero_state(v.shape[0]))[-1]
        local = call.local(x, incoming)
        plan = _plan(local)
        o, _, saved = forward(local, *plan)
        ctx.save_for_backward(q, k, v, g, beta, incoming, saved, maps)
        ctx.call, ctx.plan = call, plan
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, incoming, saved, maps = ctx.saved_tensors
        call: _Call = ctx.call
        x = call.x.with_tensors(q, k, v, g, beta, None)
        place, width = call.place, x.v.shape[-1]
        rank = dist.get_rank(call.group)
        d_incoming = x.zero_state(x.v.shape[0])
        if place.rows_before and place.rows:
            first = call.piece(x, 0)
            rows = slice(0, first.v.shape[1])
            d_incoming = summarize_backward(first, *_plan(first), d_o[:, rows], {})[:, 0]
        later = call.exchange(torch.cat((d_incoming, maps), dim=-1))[rank:]
        d_outgoing = scan_gradients(later[..., :width], later[..., width:], torch.zeros_like(d_incoming))[0]
        local = call.local(x, incoming)
        d_final = {}
        if not place.continues:
            d_outgoing = torch.zeros_like(d_outgoing)
        elif call.packed and place.pieces:
            d_final = {len(place.pieces) - 1: d_outgoing[0]}
        plan, blocking = ctx.plan
        grads = backward(local, plan, blocking, saved, d_o, d_outgoing.unsqueeze(1), d_final)
        return grads.q, grads.k, grads.v, grads.g, grads.beta, None


def kda_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    group: dist.ProcessGroup,
    scale: float | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    backend: str = "auto",
    gate_lower_bound: float | None = None,
) -> Tensor:
    """KDA over sequences whose rows are split over the ranks of `group`, contiguous slices in rank order.

    Args:
        q, k, v, g, beta, scale, gate_lower_bound: this rank's rows, as for `k3_plugins.transformer.kda.ops.kda`.
        cu_seqlens: [N + 1] GLOBAL cumulative lengths of packed sequences, the same on all ranks (B must be 1). They
            may start and end anywhere and be empty; rows after the last boundary give zero output and gradient.
        lengths: rows of every rank; if None all ranks hold as many as this one.
        backend: "torch" (any device), "fla" (CUDA; equal slices, no empty rank), or "auto".
    Returns:
        o [B, T, HV, V], this rank's rows.
    Raises:
        ValueError: arguments that do not fit. KDABackendError: a named backend that cannot run here.
    """
    lengths = slice_lengths(v.shape[1], lengths, group)
    if len(lengths) == 1:
        o, _ = kda(
            q, k, v, g, beta, scale=scale, cu_seqlens=cu_seqlens, backend=backend, gate_lower_bound=gate_lower_bound
        )
        return o
    chosen, _ = resolve_backend(backend, q.device, v.dtype)
    if chosen == "naive":
        raise KDABackendError("KDA backend 'naive' has no context parallelism: use 'torch' or 'fla'")
    x = check_inputs(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=None,
        gate_lower_bound=gate_lower_bound,
        sequence_parts=None,
    )
    bounds = _global_bounds(cu_seqlens, lengths, v.shape[0])
    if chosen == "fla":
        return kda_fla_cp(x, bounds, lengths, group)
    rank = dist.get_rank(group)
    start = sum(lengths[:rank])
    place = local_slice(bounds, start, start + lengths[rank])
    call = _Call(x.without_tensors(), cu_seqlens is not None, place, group)
    return _KCP.apply(q, k, v, g, beta, call)


def _global_bounds(
    cu_seqlens: Tensor | Sequence[int] | None, lengths: tuple[int, ...], batch: int
) -> tuple[tuple[int, int], ...]:
    total = sum(lengths)
    if cu_seqlens is None:
        return ((0, total),)
    if batch != 1:
        raise ValueError(f"packed sequences (cu_seqlens) need a batch of 1, got {batch}")
    return sequence_bounds(cu_seqlens, total)


@dataclass(frozen=True)
class _Exchange:
    """Which local rows go to which rank, in rank order, and how many come from each."""

    send: Tensor
    """local rows, those for rank 0 first; a row may go to several ranks"""
    sent: tuple[int, ...]
    received: tuple[int, ...]


class _MoveRows(torch.autograd.Function):
    """All-to-all of rows (dimension 0); the backward sends the gradients home and adds them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Exchange, group: dist.ProcessGroup) -> Tensor:
        ctx.plan, ctx.group, ctx.rows = plan, group, x.shape[0]
        return _all_to_all(x.index_select(0, plan.send), plan.received, plan.sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        plan = ctx.plan
        back = _all_to_all(dy.contiguous(), plan.sent, plan.received, ctx.group)
        dx = back.new_zeros(ctx.rows, *back.shape[1:])
        return dx.index_add_(0, plan.send, back), None, None


def _all_to_all(x: Tensor, received: tuple[int, ...], sent: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x, list(received), list(sent), group=group)
    return out


def _halo_span(place: LocalSlice, width: int) -> int:
    """Rows before a slice that its convolution reads."""
    return min(width - 1, place.rows_before) if place.rows else 0


def short_conv_cp(
    x: Tensor,
    weight: Tensor,
    *,
    group: dist.ProcessGroup,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    activation: str | None = "silu",
) -> Tensor:
    """`short_conv` over rows that are split over the ranks of `group`, contiguous slices in rank order.

    Only the W - 1 rows before a slice are exchanged (one all-to-all per direction), from several earlier ranks where
    one holds fewer, and none over the start of a sequence. The weight's gradient is this rank's share.

    Args:
        x: [B, T, D], this rank's rows; weight: [D, W]. cu_seqlens, lengths: as for `kda_cp`.
    Returns:
        [B, T, D]
    """
    lengths = slice_lengths(x.shape[1], lengths, group)
    if len(lengths) == 1:
        return short_conv(x, weight, cu_seqlens=cu_seqlens, activation=activation)
    bounds = _global_bounds(cu_seqlens, lengths, x.shape[0])
    rank = dist.get_rank(group)
    places, spans, offset = [], [], 0
    for rows in lengths:
        places.append(local_slice(bounds, offset, offset + rows))
        spans.append((offset - _halo_span(places[-1], weight.shape[1]), offset))
        offset += rows
    first = sum(lengths[:rank])
    last = first + lengths[rank]
    overlap = [(max(a, first), min(b, last)) for a, b in spans]
    send = [torch.arange(a - first, b - first) for a, b in overlap if a < b]
    start, end = spans[rank]
    offsets = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
    plan = _Exchange(
        send=(torch.cat(send) if send else torch.zeros(0, dtype=torch.long)).to(x.device),
        sent=tuple(max(0, b - a) for a, b in overlap),
        received=tuple(max(0, min(end, b) - max(start, a)) for a, b in zip(offsets, offsets[1:], strict=False)),
    )
    halo = _MoveRows.apply(x.transpose(0, 1), plan, group).transpose(0, 1)
    local_cu = None
    if cu_seqlens is not None:
        pieces = places[rank].pieces
        local_cu = [0, *(b for _, b in pieces or ((0, 0),))]
    return short_conv(x, weight, cu_seqlens=local_cu, initial_rows=halo, activation=activation)


def _zigzag_rows(bounds: tuple[tuple[int, int], ...], size: int) -> list[Tensor]:
    """Global rows that every rank holds under Megatron's zigzag: slices i and 2n-1-i of each sequence."""
    rows: list[list[Tensor]] = [[] for _ in range(size)]
    for start, end in bounds:
        slices = torch.arange(start, end).chunk(2 * size) if end > start else ()
        for i in range(size if end > start else 0):
            rows[i] += [slices[i], slices[2 * size - 1 - i]]
    return [torch.cat(r) if r else torch.zeros(0, dtype=torch.long) for r in rows]


@lru_cache(maxsize=4)  # the layers of one step share theirs; the tables are as long as the row
def _layout_exchange(
    bounds: tuple[tuple[int, int], ...], size: int, rank: int, to_contiguous: bool, device: torch.device
) -> tuple[_Exchange, Tensor]:
    """The all-to-all between the layouts and the order of the received rows. Rows travel in global order."""
    total = bounds[-1][1]
    zigzag = _zigzag_rows(bounds, size)
    contiguous = list(torch.arange(total).chunk(size)) if total else zigzag
    source, target = (zigzag, contiguous) if to_contiguous else (contiguous, zigzag)
    owner = torch.empty(total, dtype=torch.long)
    for r, rows in enumerate(target):
        owner[rows] = r
    mine = source[rank]
    order = torch.argsort(owner[mine] * total + mine)
    sent = torch.bincount(owner[mine], minlength=size)
    sender = torch.empty(total, dtype=torch.long)
    for r, rows in enumerate(source):
        sender[rows] = r
    wanted = target[rank]
    received = torch.bincount(sender[wanted], minlength=size)
    arrival = torch.argsort(sender[wanted] * total + wanted)  # arrival[i]: place in the result of the i-th row
    plan = _Exchange(order.to(device), tuple(sent.tolist()), tuple(received.tolist()))
    return plan, torch.argsort(arrival).to(device)


def _change_layout(
    x: Tensor,
    group: dist.ProcessGroup,
    dim: int,
    cu_seqlens: Tensor | Sequence[int] | None,
    to_contiguous: bool,
) -> Tensor:
    size = dist.get_world_size(group)
    if size == 1:
        return x
    total = x.shape[dim] * size
    bounds = ((0, total),) if cu_seqlens is None else sequence_bounds(cu_seqlens, total)
    if bounds[-1][1] < total:  # padding rows are cut like one more sequence
        bounds = (*bounds, (bounds[-1][1], total))
    for start, end in bounds:
        if (end - start) % (2 * size):
            what = "the rows behind the last sequence" if end == total and cu_seqlens is not None else "a sequence"
            raise ValueError(
                f"zigzag context parallelism over {size} ranks cuts every sequence into {2 * size} equal slices, but "
                f"{what} [{start}, {end}) has {end - start} rows: pad it to a multiple of {2 * size}"
            )
    plan, order = _layout_exchange(bounds, size, dist.get_rank(group), to_contiguous, x.device)
    moved = _MoveRows.apply(x.movedim(dim, 0), plan, group)
    return moved.index_select(0, order).movedim(0, dim)


def zigzag_to_contiguous(
    x: Tensor, group: dist.ProcessGroup, *, dim: int = 1, cu_seqlens: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Move rows from Megatron's zigzag layout to contiguous slices of equal size, gradients included.

    Args:
        x: any tensor whose dimension `dim` holds this rank's rows.
        cu_seqlens: [N + 1] global boundaries if EACH packed sequence was cut in zigzag (Megatron's thd layout; every
            length a multiple of 2n); None if the row as a whole was, wherever its sequences start and end.
    Returns:
        A tensor of x's shape: rows [rank * T, (rank + 1) * T) of the global order.
    Raises:
        ValueError: a length that does not divide, named with what to do.
    """
    return _change_layout(x, group, dim, cu_seqlens, to_contiguous=True)


def contiguous_to_zigzag(
    x: Tensor, group: dist.ProcessGroup, *, dim: int = 1, cu_seqlens: Tensor | Sequence[int] | None = None
) -> Tensor:
    """The inverse of `zigzag_to_contiguous`, with the same arguments."""
    return _change_layout(x, group, dim, cu_seqlens, to_contiguous=False)
