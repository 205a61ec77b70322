"""One segment of the chunkwise KDA: a few chunks of a group of heads, loaded, advanced and walked back.

With the quantities of `intra_chunk` and the state S at a chunk's start:

    R  = V - (K exp(G)) S                       the residual v - S^T k, formed in fp32 for 16-bit inputs too
    Vn = (I + A)^{-1} Diag(beta) R
    O  = scale * [(Q exp(G)) S + Aqk Vn]
    S' = Diag(exp(G_last)) S + (K exp(G_last - G))^T Vn

Only R, Vn and S' are sequential; the rest is batched over batch entries, heads and chunks.

Shapes: B batch, T tokens, P parts, h heads of a group, L = B * P * h lanes, n chunks of a segment, C rows of a
chunk, K key dim, V value dim, N packed sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_plugins.transformer.kda.ops.chunk_layout import CHUNK, ChunkPlan, gather
from k3_plugins.transformer.kda.ops.inputs import KDAInputs
from k3_plugins.transformer.kda.ops.intra_chunk import IntraChunk, intra_chunk, intra_chunk_backward

# Lanes that are advanced together, and chunks of each per segment. On a CPU 8 lanes of 4 chunks keep the temporaries of
# K = V = 128 near 1 MB each (measured best of 8 to 128 chunks in all); an accelerator wants large batches.
_CPU_LANES, _ACCELERATOR_LANES = 8, 256
_CHUNKS_PER_LANE = 4

States = dict[int, Tensor]
"""Packed sequence -> [h, K, V]; a sequence that is missing stands for zeros."""


@dataclass(frozen=True)
class Blocking:
    """How the work is cut: groups of value heads, and segments of the chunks."""

    heads_per_group: int
    segment: int

    @staticmethod
    def choose(x: KDAInputs, plan: ChunkPlan) -> "Blocking":
        """Group sizes are multiples of HV / H, so that a group owns the gradient of its query/key heads."""
        b, heads, ratio = x.v.shape[0], x.v.shape[2], x.v.shape[2] // x.k.shape[2]
        on_cpu = x.v.device.type == "cpu"
        lanes = max(_CPU_LANES, torch.get_num_threads()) if on_cpu else _ACCELERATOR_LANES
        per_group = min(heads, max(1, lanes // (b * plan.parts * ratio)) * ratio)
        return Blocking(per_group, max(1, lanes * _CHUNKS_PER_LANE // (b * plan.parts * per_group)))


@dataclass(frozen=True)
class Group:
    """One group of value heads and the query/key heads that they read."""

    heads: slice
    qk_heads: slice
    ratio: int

    @property
    def size(self) -> int:
        """h"""
        return self.heads.stop - self.heads.start


def head_groups(x: KDAInputs, blocking: Blocking) -> Iterator[Group]:
    """Consecutive groups that cover all value heads."""
    heads, ratio = x.v.shape[2], x.v.shape[2] // x.k.shape[2]
    for h0 in range(0, heads, blocking.heads_per_group):
        h1 = min(h0 + blocking.heads_per_group, heads)
        yield Group(slice(h0, h1), slice(h0 // ratio, h1 // ratio), ratio)


@dataclass
class Segment:
    """The inputs of one group's segment, in fp32 or fp64, and where it lies."""

    plan: ChunkPlan
    chunks: tuple[int, int]
    lanes: tuple[int, int, int]
    """(B, P, h)"""
    kq: Tensor
    """[n * L, 2, C, K], or [n * L, 1, C, K] where q is not needed"""
    v: Tensor
    """[n * L, C, V]"""
    g: Tensor
    """[n * L, C, K]"""
    beta: Tensor
    """[n * L, C]"""

    def by_chunk(self, x: Tensor) -> Tensor:
        """[n * L, ...] -> [n, L, ...]"""
        b, p, h = self.lanes
        return x.unflatten(0, (-1, b * p * h))

    def set_states(self, states: Tensor, marks: list[tuple[int, int]], source: States) -> None:
        """Overwrite the lanes [L, K, V or more] of the marked (part, sequence) pairs, columns past V with zeros."""
        lanes = states.view(*self.lanes, *states.shape[1:])
        for part, n in marks:
            lanes[:, part] = 0
            if n in source:
                lanes[:, part, :, :, : source[n].shape[-1]] = source[n]

    def take_states(self, states: Tensor, marks: list[tuple[int, int]], target: States) -> None:
        """The reverse of `set_states`, into the tensors that target holds."""
        lanes = states.view(*self.lanes, *states.shape[1:])
        for part, n in marks:
            if n in target:
                target[n].copy_(lanes[0, part])


def rows_of(x: KDAInputs, t: Tensor, plan: ChunkPlan, chunks: tuple[int, int], heads: slice) -> Tensor:
    """[n * L, C, D] of a [B, T, HV, D] tensor, in the compute dtype."""
    shape = (chunks[1] - chunks[0], t.shape[0], plan.parts, heads.stop - heads.start, 1, CHUNK, t.shape[-1])
    return gather(t, t.new_empty(shape, dtype=x.compute_dtype), plan, chunks, heads).flatten(0, 4)


def load(x: KDAInputs, plan: ChunkPlan, chunks: tuple[int, int], group: Group, *, with_q: bool = True) -> Segment:
    """Gather a segment's inputs."""
    v, g, beta = (rows_of(x, t, plan, chunks, group.heads) for t in (x.v, x.g, x.beta.unsqueeze(-1)))
    wanted = (x.k, x.q) if with_q else (x.k,)
    kq = g.new_empty(g.shape[0], len(wanted), *g.shape[1:])
    lanes = (x.v.shape[0], plan.parts, group.size)
    by_qk_head = kq.view(-1, *lanes[:2], lanes[2] // group.ratio, group.ratio, *kq.shape[1:])
    for i, t in enumerate(wanted):
        gather(t, by_qk_head[:, :, :, :, :, i], plan, chunks, group.qk_heads)
    return Segment(plan, chunks, lanes, kq, v, g, beta.squeeze(-1))


def forward_segment(seg: Segment, state: Tensor, scale: float, initial: States, final: States) -> Tensor:
    """Advance state [L, K, V] in place over a segment; returns its outputs [n * L, C, V].

    Args:
        initial: states that packed sequences start from. final: filled where a packed sequence ends.
    """
    f = intra_chunk(seg.kq, seg.g, seg.beta, keep_levels=False)
    kq_in, k_out, decay, mix, v = (seg.by_chunk(t) for t in (f.kq_in, f.k_out, f.decay, f.mix, seg.v))
    reads = v.new_empty(*v.shape[:2], 2 * CHUNK, v.shape[-1])
    new_v = torch.empty_like(v)
    for i, c in enumerate(range(*seg.chunks)):
        if c in seg.plan.starts:
            seg.set_states(state, seg.plan.starts[c], initial)
        torch.bmm(kq_in[i], state, out=reads[i])
        torch.bmm(mix[i], v[i] - reads[i, :, :CHUNK], out=new_v[i])
        state.mul_(decay[i].unsqueeze(-1)).baddbmm_(k_out[i].transpose(1, 2), new_v[i])
        if c in seg.plan.ends:
            seg.take_states(state, seg.plan.ends[c], final)
    return torch.baddbmm(reads.flatten(0, 1)[:, CHUNK:], f.aqk, new_v.flatten(0, 1)).mul_(scale)


def summarize_segment(seg: Segment, state: Tensor, initial: States) -> None:
    """Advance [S | M], [L, K, V + K], in place: the state, and the map of the state before onto the state after.

    M obeys the recurrence of S with v = 0, so it is K more columns. A packed sequence that starts resets M to zero.
    """
    f = intra_chunk(seg.kq, seg.g, seg.beta, keep_levels=False)
    k_in, k_out, decay, mix, v = (seg.by_chunk(t) for t in (f.kq_in, f.k_out, f.decay, f.mix, seg.v))
    for i, c in enumerate(range(*seg.chunks)):
        if c in seg.plan.starts:
            seg.set_states(state, seg.plan.starts[c], initial)
        residual = torch.bmm(k_in[i], state).neg_()
        residual[..., : v.shape[-1]] += v[i]
        state.mul_(decay[i].unsqueeze(-1)).baddbmm_(k_out[i].transpose(1, 2), torch.bmm(mix[i], residual))


def _replay(seg: Segment, f: IntraChunk, state: Tensor, initial: States) -> tuple[Tensor, Tensor, Tensor]:
    """Recompute the states [n, L, K, V] at the chunks' starts, the residuals and the new values [n, L, C, V]."""
    kq_in, k_out, decay, mix, v = (seg.by_chunk(t) for t in (f.kq_in, f.k_out, f.decay, f.mix, seg.v))
    n = v.shape[0]
    states = state.new_empty(n, *state.shape)
    states[0] = state
    residual, new_v = torch.empty_like(v), torch.empty_like(v)
    for i, c in enumerate(range(*seg.chunks)):
        if c in seg.plan.starts:
            seg.set_states(states[i], seg.plan.starts[c], initial)
        torch.baddbmm(v[i], kq_in[i, :, :CHUNK], states[i], alpha=-1, out=residual[i])
        torch.bmm(mix[i], residual[i], out=new_v[i])
        if i + 1 < n:
            torch.mul(states[i], decay[i].unsqueeze(-1), out=states[i + 1])
            states[i + 1].baddbmm_(k_out[i].transpose(1, 2), new_v[i])
    return states, residual, new_v


def reverse_states(
    seg: Segment, f: IntraChunk, d_out: Tensor, d_state: Tensor, d_final: States, d_initial: States
) -> tuple[Tensor, Tensor, Tensor]:
    """The state pass backwards; it needs no forward state.

    Args:
        d_out: [n * L, C, V], scale included. d_state: [L, K, V] gradient of the state at the segment's end;
            becomes that of the state at its start.
        d_final: gradients of the states that packed sequences end with. d_initial: filled with those of the
            states that they start from.
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
        if c in seg.plan.ends:
            seg.set_states(d_state, seg.plan.ends[c], d_final)
        d_states[i] = d_state
        d_new_v[i].baddbmm_(k_out[i], d_state)
        torch.bmm(inv[i].transpose(1, 2), d_new_v[i], out=y[i])
        torch.mul(y[i], beta[i].neg().unsqueeze(-1), out=d_reads[i, :, :CHUNK])
        d_state.mul_(decay[i].unsqueeze(-1)).baddbmm_(kq_in[i].transpose(1, 2), d_reads[i])
        if c in seg.plan.starts:
            seg.take_states(d_state, seg.plan.starts[c], d_initial)
            seg.set_states(d_state, seg.plan.starts[c], {})
    return d_states, y, d_reads


def backward_segment(
    seg: Segment,
    state: Tensor,
    initial: States,
    d_out: Tensor,
    d_state: Tensor,
    d_final: States,
    d_initial: States,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dg, dbeta) of a segment, [n * L, C, *].

    Args:
        state: [L, K, V] at the segment's start. The others are those of `forward_segment` and `reverse_states`.
    """
    f = intra_chunk(seg.kq, seg.g, seg.beta, keep_levels=True)
    states, residual, new_v = (t.flatten(0, 1) for t in _replay(seg, f, state, initial))
    d_states, y, d_reads = (t.flatten(0, 1) for t in reverse_states(seg, f, d_out, d_state, d_final, d_initial))
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
