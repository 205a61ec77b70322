"""KDA in chunks of 64 tokens with plain PyTorch operations: any device, differentiable, memory linear in T.

With the quantities of `intra_chunk` and the state S at a chunk's start (Kimi Linear, arXiv 2510.26692, section 3):

    R  = V - (K exp(G)) S                       the residual v - S^T k, formed in fp32 for 16-bit inputs too
    Vn = (I + A)^{-1} Diag(beta) R
    O  = scale * [(Q exp(G)) S + Aqk Vn]
    S' = Diag(exp(G_last)) S + (K exp(G_last - G))^T Vn

Only R, Vn and S' are sequential; the rest is batched over batch entries, heads and chunks. The sequence is walked
in SEGMENTS of a few chunks and the heads in groups, so that the temporaries stay in the cache however long the
sequence is. The forward saves its inputs and the state at the start of every segment; the hand-written backward
walks the segments in reverse and recomputes everything else.

Shapes: B batch, T tokens, P parts, h heads of a group, L = B * P * h lanes, n chunks of a segment, C rows of a
chunk, K key dim, V value dim, N packed sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3_plugins.transformer.kda.ops.chunk_layout import CHUNK, ChunkPlan, gather, make_plan, scatter
from k3_plugins.transformer.kda.ops.inputs import KDAInputs
from k3_plugins.transformer.kda.ops.intra_chunk import IntraChunk, intra_chunk, intra_chunk_backward

# Chunks times lanes that are worked on at once. On a CPU 32 keeps the temporaries of K = V = 128 near 1 MB each;
# an accelerator wants large batches.
_CHUNK_LANES = {"cpu": 32}
_CHUNK_LANES_ACCELERATOR = 1024
_GROUP_LANES = {"cpu": 16}
_GROUP_LANES_ACCELERATOR = 256


@dataclass(frozen=True)
class Blocking:
    """How the work is cut: groups of value heads, and segments of the chunks."""

    heads_per_group: int
    segment: int

    @staticmethod
    def choose(x: KDAInputs, plan: ChunkPlan) -> "Blocking":
        """Group sizes are multiples of HV / H, so that a group owns the gradient of its query/key heads."""
        b, heads, ratio = x.v.shape[0], x.v.shape[2], x.v.shape[2] // x.k.shape[2]
        lanes = _GROUP_LANES.get(x.v.device.type, _GROUP_LANES_ACCELERATOR)
        work = _CHUNK_LANES.get(x.v.device.type, _CHUNK_LANES_ACCELERATOR)
        per_group = max(1, lanes // (b * plan.parts * ratio)) * ratio
        per_group = min(per_group, heads)
        return Blocking(per_group, max(1, work // (b * plan.parts * per_group)))


@dataclass(frozen=True)
class Group:
    """One group of value heads and the query/key heads that they read."""

    heads: slice
    qk_heads: slice
    ratio: int


def _groups(x: KDAInputs, blocking: Blocking) -> Iterator[Group]:
    heads, ratio = x.v.shape[2], x.v.shape[2] // x.k.shape[2]
    for h0 in range(0, heads, blocking.heads_per_group):
        h1 = min(h0 + blocking.heads_per_group, heads)
        yield Group(slice(h0, h1), slice(h0 // ratio, h1 // ratio), ratio)


@dataclass
class Segment:
    """The inputs of one group's segment, in fp32 or fp64."""

    kq: Tensor
    """[n * L, 2, C, K]"""
    v: Tensor
    """[n * L, C, V]"""
    g: Tensor
    """[n * L, C, K]"""
    beta: Tensor
    """[n * L, C]"""
    chunks: tuple[int, int]
    lanes: tuple[int, int, int]
    """(B, P, h)"""

    @property
    def per_chunk(self) -> int:
        """L"""
        b, p, h = self.lanes
        return b * p * h

    def by_chunk(self, x: Tensor) -> Tensor:
        """[n * L, ...] -> [n, L, ...]"""
        return x.unflatten(0, (-1, self.per_chunk))


def _rows(x: KDAInputs, t: Tensor, plan: ChunkPlan, chunks: tuple[int, int], heads: slice) -> Tensor:
    """[n * L, C, D] of a [B, T, HV, D] tensor, in the compute dtype."""
    shape = (chunks[1] - chunks[0], t.shape[0], plan.parts, heads.stop - heads.start, 1, CHUNK, t.shape[-1])
    return gather(t, t.new_empty(shape, dtype=x.compute_dtype), plan, chunks, heads).flatten(0, 4)


def _load(x: KDAInputs, plan: ChunkPlan, chunks: tuple[int, int], group: Group) -> Segment:
    v, g, beta = (_rows(x, t, plan, chunks, group.heads) for t in (x.v, x.g, x.beta.unsqueeze(-1)))
    kq = g.new_empty(g.shape[0], 2, *g.shape[1:])
    lanes = (x.v.shape[0], plan.parts, group.heads.stop - group.heads.start)
    by_qk_head = kq.view(-1, *lanes[:2], lanes[2] // group.ratio, group.ratio, *kq.shape[1:])
    gather(x.k, by_qk_head[:, :, :, :, :, 0], plan, chunks, group.qk_heads)
    gather(x.q, by_qk_head[:, :, :, :, :, 1], plan, chunks, group.qk_heads)
    return Segment(kq, v, g, beta.squeeze(-1), chunks, lanes)


def _set_states(states: Tensor, seg: Segment, marks: list[tuple[int, int]], source: Tensor | None) -> None:
    """Overwrite the lanes [L, K, *] of the marked (part, sequence) pairs with source[sequence] (zeros if None)."""
    lanes = states.view(*seg.lanes, *states.shape[1:])
    for part, n in marks:
        lanes[:, part] = 0
        if source is not None:
            lanes[:, part, :, :, : source.shape[-1]] = source[n]


def _take_states(states: Tensor, seg: Segment, marks: list[tuple[int, int]], target: Tensor) -> None:
    """The reverse of `_set_states`: target[sequence] = the marked lanes."""
    lanes = states.view(*seg.lanes, *states.shape[1:])
    for part, n in marks:
        target[n] = lanes[0, part]


def _forward_segment(
    x: KDAInputs,
    plan: ChunkPlan,
    seg: Segment,
    f: IntraChunk,
    state: Tensor,
    initial: Tensor | None,
    final: Tensor | None,
) -> Tensor:
    """Advance state [L, K, V] in place over a segment; returns its outputs [n * L, C, V]."""
    kq_in, k_out, decay, mix, v = (seg.by_chunk(t) for t in (f.kq_in, f.k_out, f.decay, f.mix, seg.v))
    reads = v.new_empty(*v.shape[:2], 2 * CHUNK, v.shape[-1])
    new_v = torch.empty_like(v)
    for i, c in enumerate(range(*seg.chunks)):
        if c in plan.starts:
            _set_states(state, seg, plan.starts[c], initial)
        torch.bmm(kq_in[i], state, out=reads[i])
        torch.bmm(mix[i], v[i] - reads[i, :, :CHUNK], out=new_v[i])
        state.mul_(decay[i].unsqueeze(-1)).baddbmm_(k_out[i].transpose(1, 2), new_v[i])
        if final is not None and c in plan.ends:
            _take_states(state, seg, plan.ends[c], final)
    return torch.baddbmm(reads.flatten(0, 1)[:, CHUNK:], f.aqk, new_v.flatten(0, 1)).mul_(x.scale)


def _forward(x: KDAInputs, plan: ChunkPlan, blocking: Blocking) -> tuple[Tensor, Tensor | None, Tensor]:
    """(o [B, T, HV, V], final state or None, states at the segments' starts [segments, B, P, HV, K, V])."""
    b, t, heads, width = x.v.shape
    key = x.k.shape[-1]
    segments = plan.segments(blocking.segment)
    packed = x.bounds is not None
    covered = plan.rows is None
    o = torch.empty_like(x.v, memory_format=torch.contiguous_format) if covered else x.v.new_zeros(x.v.shape)
    saved = x.zero_state(len(segments) * b * plan.parts).view(len(segments), b, plan.parts, heads, key, width)
    final = None
    if x.output_final_state:
        final = x.zero_state(len(x.bounds) if packed else b)
        if x.initial_state is not None:  # stays for empty sequences
            final.copy_(x.initial_state)
    for group in _groups(x, blocking):
        hs = group.heads
        initial = None if x.initial_state is None else x.initial_state[:, hs].to(x.compute_dtype)
        state = saved.new_zeros(b, plan.parts, hs.stop - hs.start, key, width)
        if initial is not None and not packed:
            state[:, 0] = initial
        lanes = state.flatten(0, 2)
        group_final = final[:, hs] if packed and final is not None else None
        for s, chunks in enumerate(segments):
            saved[s, :, :, hs] = state
            seg = _load(x, plan, chunks, group)
            f = intra_chunk(seg.kq, seg.g, seg.beta, keep_levels=False)
            out = _forward_segment(x, plan, seg, f, lanes, initial, group_final)
            scatter(out.unflatten(0, (-1, *seg.lanes)), o, plan, chunks, hs)
        if final is not None and not packed and segments:
            final[:, hs] = state[:, -1]
    return o, final, saved


@dataclass
class Gradients:
    """Gradients of the tensors of `KDAInputs`, in their dtypes."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None


def _replay(
    plan: ChunkPlan, seg: Segment, f: IntraChunk, state: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Recompute the states [n, L, K, V] at the chunks' starts, the residuals and the new values [n, L, C, V]."""
    kq_in, k_out, decay, mix, v = (seg.by_chunk(t) for t in (f.kq_in, f.k_out, f.decay, f.mix, seg.v))
    n = v.shape[0]
    states = state.new_empty(n, *state.shape)
    states[0] = state
    residual, new_v = torch.empty_like(v), torch.empty_like(v)
    for i, c in enumerate(range(*seg.chunks)):
        if c in plan.starts:
            _set_states(states[i], seg, plan.starts[c], initial)
        torch.baddbmm(v[i], kq_in[i, :, :CHUNK], states[i], alpha=-1, out=residual[i])
        torch.bmm(mix[i], residual[i], out=new_v[i])
        if i + 1 < n:
            torch.mul(states[i], decay[i].unsqueeze(-1), out=states[i + 1])
            states[i + 1].baddbmm_(k_out[i].transpose(1, 2), new_v[i])
    return states, residual, new_v


def _reverse_states(
    plan: ChunkPlan,
    seg: Segment,
    f: IntraChunk,
    d_out: Tensor,
    d_state: Tensor,
    d_final: Tensor | None,
    d_initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The state pass backwards; it needs no forward state.

    Args:
        d_out: [n * L, C, V], scale included. d_state: [L, K, V] gradient of the state at the segment's end;
            becomes that of the state at its start.
        d_final, d_initial: [N, h, K, V] of the packed sequences, read and written.
    Returns:
        d_states [n, L, K, V] of the states at the chunks' ends; y = (I + A)^{-T} dVn [n, L, C, V]; and
        d_reads [n, L, 2C, V], the gradients of what the k and q rows read from the state.
    """
    kq_in, k_out, decay, inv, beta = (seg.by_chunk(t) for t in (f.kq_in, f.k_out, f.decay, f.inv, seg.beta))
    d_new_v = seg.by_chunk(torch.bmm(f.aqk.transpose(1, 2), d_out))
    n = d_new_v.shape[0]
    d_states = d_state.new_empty(n, *d_state.shape)
    y = torch.empty_like(d_new_v)
    d_reads = d_out.new_empty(*y.shape[:2], 2 * CHUNK, y.shape[-1])
    d_reads[:, :, CHUNK:] = seg.by_chunk(d_out)
    for i in reversed(range(n)):
        c = seg.chunks[0] + i
        if c in plan.ends:
            _set_states(d_state, seg, plan.ends[c], d_final)
        d_states[i] = d_state
        d_new_v[i].baddbmm_(k_out[i], d_state)
        torch.bmm(inv[i].transpose(1, 2), d_new_v[i], out=y[i])
        torch.mul(y[i], beta[i].neg().unsqueeze(-1), out=d_reads[i, :, :CHUNK])
        d_state.mul_(decay[i].unsqueeze(-1)).baddbmm_(kq_in[i].transpose(1, 2), d_reads[i])
        if c in plan.starts:
            if d_initial is not None:
                _take_states(d_state, seg, plan.starts[c], d_initial)
            _set_states(d_state, seg, plan.starts[c], None)
    return d_states, y, d_reads


def _backward_segment(
    plan: ChunkPlan,
    seg: Segment,
    state: Tensor,
    initial: Tensor | None,
    d_out: Tensor,
    d_state: Tensor,
    d_final: Tensor | None,
    d_initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dg, dbeta) of a segment, [n * L, C, *]; d_state [L, K, V] is updated in place."""
    f = intra_chunk(seg.kq, seg.g, seg.beta, keep_levels=True)
    states, residual, new_v = (t.flatten(0, 1) for t in _replay(plan, seg, f, state, initial))
    reverse = _reverse_states(plan, seg, f, d_out, d_state, d_final, d_initial)
    d_states, y, d_reads = (t.flatten(0, 1) for t in reverse)
    d_kq_in = torch.bmm(d_reads, states.transpose(1, 2))
    d_k_out = torch.bmm(new_v, d_states.transpose(1, 2))
    d_decay = states.mul_(d_states).sum(-1)
    # d(I + A) = -y Vn^T, and A = Diag(beta) Akk.
    d_pairs = torch.empty_like(f.pairs)
    torch.bmm(d_out, new_v.transpose(1, 2), out=d_pairs[:, 1])
    minus_d_a = torch.bmm(y, new_v.transpose(1, 2))
    d_beta = y.mul_(residual).sum(-1) - (minus_d_a * f.akk).sum(-1)
    torch.mul(minus_d_a, seg.beta.neg().unsqueeze(-1), out=d_pairs[:, 0])
    dq, dk, dg = intra_chunk_backward(seg.kq, f, d_kq_in, d_k_out, d_decay, d_pairs)
    return dq, dk, d_reads[:, :CHUNK].neg(), dg, d_beta


def _backward(
    x: KDAInputs,
    plan: ChunkPlan,
    blocking: Blocking,
    saved: Tensor,
    d_o: Tensor,
    d_final: Tensor | None,
) -> Gradients:
    packed = x.bounds is not None
    segments = plan.segments(blocking.segment)
    new = torch.empty_like if plan.rows is None else torch.zeros_like
    grads = Gradients(
        *(new(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v, x.g, x.beta)),
        None if x.initial_state is None else torch.zeros_like(x.initial_state),
    )
    if grads.initial_state is not None and d_final is not None:  # stays for empty sequences
        grads.initial_state.copy_(d_final)
    for group in _groups(x, blocking):
        hs = group.heads
        initial = None if x.initial_state is None else x.initial_state[:, hs].to(x.compute_dtype)
        group_d_final = None if d_final is None else d_final[:, hs]
        d_state = torch.zeros_like(saved[0, :, :, hs]) if segments else None
        if not packed and group_d_final is not None and segments:
            d_state[:, -1] = group_d_final
        d_initial = torch.zeros_like(initial) if packed and initial is not None else None
        for s in reversed(range(len(segments))):
            chunks = segments[s]
            seg = _load(x, plan, chunks, group)
            d_out = _rows(x, d_o, plan, chunks, hs).mul_(x.scale)
            state = saved[s, :, :, hs].flatten(0, 2)
            pieces = _backward_segment(
                plan,
                seg,
                state,
                initial,
                d_out,
                d_state.flatten(0, 2),
                group_d_final if packed else None,
                d_initial,
            )
            dq, dk, dv, dg, dbeta = (t.unflatten(0, (-1, *seg.lanes)) for t in pieces)
            if group.ratio > 1:
                dq, dk = (t.unflatten(3, (-1, group.ratio)).sum(4) for t in (dq, dk))
            scatter(dq, grads.q, plan, chunks, group.qk_heads)
            scatter(dk, grads.k, plan, chunks, group.qk_heads)
            scatter(dv, grads.v, plan, chunks, hs)
            scatter(dg, grads.g, plan, chunks, hs)
            scatter(dbeta.unsqueeze(-1), grads.beta.unsqueeze(-1), plan, chunks, hs)
        if grads.initial_state is not None and segments:
            if packed:
                busy = [n for n, (start, end) in enumerate(x.bounds) if end > start]
                grads.initial_state[busy, hs] = d_initial[busy].to(grads.initial_state.dtype)
            else:
                grads.initial_state[:, hs] = d_state[:, 0].to(grads.initial_state.dtype)
    return grads


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        inputs: KDAInputs,
    ) -> tuple[Tensor, Tensor | None]:
        plan = make_plan(v.shape[1], inputs.bounds, 1, v.device)
        blocking = Blocking.choose(inputs, plan)
        o, final, saved = _forward(inputs, plan, blocking)
        ctx.save_for_backward(q, k, v, g, beta, initial_state, saved)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.blocking = plan, blocking
        ctx.call = inputs.without_tensors()
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_o: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, saved = ctx.saved_tensors
        x = ctx.call.with_tensors(*tensors)
        if d_o is None:
            d_o = torch.zeros_like(x.v)
        grads = _backward(x, ctx.plan, ctx.blocking, saved, d_o, d_final)
        return grads.q, grads.k, grads.v, grads.g, grads.beta, grads.initial_state, None


def kda_torch(inputs: KDAInputs) -> tuple[Tensor, Tensor | None]:
    """See `k3_plugins.transformer.kda.ops.kda` for the arguments and results."""
    x = inputs
    return _ChunkKDA.apply(x.q, x.k, x.v, x.g, x.beta, x.initial_state, inputs)
