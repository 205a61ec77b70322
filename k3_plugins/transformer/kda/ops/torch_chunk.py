"""KDA in chunks of 64 tokens with plain PyTorch operations: any device, differentiable, memory linear in T.

The sequence is walked in SEGMENTS of a few chunks and the heads in groups, so that the temporaries stay in the cache
however long the sequence is. The forward saves its inputs and the state at the start of every segment; the
hand-written backward walks the segments in reverse and recomputes everything else. The mathematics of a chunk is in
`intra_chunk`, the state pass of a segment in `segment`.

PARTS (intra-device context parallelism): a long sequence with few heads can be cut into parts that run side by side.
Each part is first summarised by [S | M], the state that it ends with from S = 0 and the map of the state before onto
the state after; a scan over the parts gives every part's true start, and the parts are then run from there. The
backward does the same in reverse with M^T.

Shapes: B batch, T tokens, P parts, K key dim, V value dim, H and HV query/key and value heads, N packed sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3_plugins.transformer.kda.ops.chunk_layout import CHUNK, ChunkPlan, make_plan, scatter
from k3_plugins.transformer.kda.ops.inputs import KDAInputs
from k3_plugins.transformer.kda.ops.intra_chunk import intra_chunk
from k3_plugins.transformer.kda.ops.segment import (
    Blocking,
    Group,
    States,
    backward_segment,
    forward_segment,
    head_groups,
    load,
    reverse_states,
    rows_of,
    summarize_segment,
)


def _states_of(x: KDAInputs, states: Tensor | None, group: Group) -> States:
    """The group's share of [N, HV, K, V], for packed sequences."""
    if states is None or x.bounds is None:
        return {}
    return dict(enumerate(states[:, group.heads].to(x.compute_dtype)))


def forward(
    x: KDAInputs, plan: ChunkPlan, blocking: Blocking, part_states: Tensor | None = None, *, save: bool = True
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The whole forward.

    Args:
        part_states: [B, P, HV, K, V] at the parts' starts; the initial state or zeros if None.
        save: whether a backward will follow.
    Returns:
        o [B, T, HV, V]; the final states [B or N, HV, K, V] or None; and what the backward needs, the states at the
        segments' starts [segments, B, P, HV, K, V] (none if not `save`).
    """
    b, _, heads, width = x.v.shape
    key = x.k.shape[-1]
    segments = plan.segments(blocking.segment)
    packed = x.bounds is not None
    o = x.v.new_empty(x.v.shape) if plan.rows is None else x.v.new_zeros(x.v.shape)
    kept = len(segments) if save else 0
    saved = x.v.new_empty(kept, b, plan.parts, heads, key, width, dtype=x.compute_dtype)
    final = None
    if x.output_final_state:
        final = x.zero_state(b if x.bounds is None else len(x.bounds))
        if x.initial_state is not None:  # stays for empty sequences
            final.copy_(x.initial_state)
    for group in head_groups(x, blocking):
        hs = group.heads
        initial = _states_of(x, x.initial_state, group)
        finals = {} if final is None or not packed else dict(enumerate(final[:, hs]))
        state = saved.new_zeros(b, plan.parts, group.size, key, width)
        if part_states is not None:
            state.copy_(part_states[:, :, hs])
        elif x.initial_state is not None and not packed:
            state[:, 0] = x.initial_state[:, hs]
        for s, chunks in enumerate(segments):
            if save:
                saved[s, :, :, hs] = state
            seg = load(x, plan, chunks, group)
            out = forward_segment(seg, state.flatten(0, 2), x.scale, initial, finals)
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


def backward(
    x: KDAInputs,
    plan: ChunkPlan,
    blocking: Blocking,
    saved: Tensor,
    d_o: Tensor,
    d_part_states: Tensor,
    d_final: dict[int, Tensor],
) -> Gradients:
    """The whole backward.

    Args:
        saved: from `forward`.
        d_part_states: [B, P, HV, K, V] gradients of the states that the parts end with.
        d_final: packed sequence -> [HV, K, V], gradients of the states that the packed sequences end with.
    """
    packed = x.bounds is not None
    segments = plan.segments(blocking.segment)
    new = torch.empty_like if plan.rows is None else torch.zeros_like
    q, k, v, g, beta = (new(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v, x.g, x.beta))
    initial_state = None if x.initial_state is None else torch.zeros_like(x.initial_state)
    grads = Gradients(q, k, v, g, beta, initial_state)
    for group in head_groups(x, blocking):
        hs = group.heads
        initial = _states_of(x, x.initial_state, group)
        d_finals = {n: d[hs] for n, d in d_final.items()}
        # An empty sequence hands the gradient of its final state straight on.
        d_initial = {n: d_finals[n].clone() if n in d_finals else torch.zeros_like(s) for n, s in initial.items()}
        d_state = d_part_states[:, :, hs].clone(memory_format=torch.contiguous_format)
        d_lanes = d_state.flatten(0, 2)
        for s in reversed(range(len(segments))):
            chunks = segments[s]
            seg = load(x, plan, chunks, group)
            d_out = rows_of(x, d_o, plan, chunks, hs).mul_(x.scale)
            state = saved[s, :, :, hs].flatten(0, 2)
            pieces = backward_segment(seg, state, initial, d_out, d_lanes, d_finals, d_initial)
            dq, dk, dv, dg, dbeta = (t.unflatten(0, (-1, *seg.lanes)) for t in pieces)
            if group.ratio > 1:
                dq, dk = (t.unflatten(3, (-1, group.ratio)).sum(4) for t in (dq, dk))
            scatter(dq, grads.q, plan, chunks, group.qk_heads)
            scatter(dk, grads.k, plan, chunks, group.qk_heads)
            scatter(dv, grads.v, plan, chunks, hs)
            scatter(dg, grads.g, plan, chunks, hs)
            scatter(dbeta.unsqueeze(-1), grads.beta.unsqueeze(-1), plan, chunks, hs)
        if grads.initial_state is not None:
            if packed:
                for n, d in d_initial.items():
                    grads.initial_state[n, hs] = d.to(grads.initial_state.dtype)
            else:
                grads.initial_state[:, hs] = d_state[:, 0].to(grads.initial_state.dtype)
    return grads


def summarize(x: KDAInputs, plan: ChunkPlan, blocking: Blocking) -> Tensor:
    """[B, P, HV, K, V + K]: every part's [S | M], the state from zero and the map of the state before."""
    b, _, heads, width = x.v.shape
    key = x.k.shape[-1]
    summary = x.v.new_zeros(b, plan.parts, heads, key, width + key, dtype=x.compute_dtype)
    summary[..., width:].diagonal(dim1=-2, dim2=-1).fill_(1)
    for group in head_groups(x, blocking):
        initial = _states_of(x, x.initial_state, group)
        state = summary[:, :, group.heads].contiguous()
        for chunks in plan.segments(blocking.segment):
            summarize_segment(load(x, plan, chunks, group, with_q=False), state.flatten(0, 2), initial)
        summary[:, :, group.heads] = state
    return summary


def summarize_backward(
    x: KDAInputs, plan: ChunkPlan, blocking: Blocking, d_o: Tensor, d_final: dict[int, Tensor]
) -> Tensor:
    """[B, P, HV, K, V]: gradients of the states at the parts' starts if those at their ends have none."""
    b, _, heads, width = x.v.shape
    d_states = x.zero_state(b * plan.parts).view(b, plan.parts, heads, x.k.shape[-1], width)
    for group in head_groups(x, blocking):
        hs = group.heads
        d_finals = {n: d[hs] for n, d in d_final.items()}
        d_state = d_states[:, :, hs].contiguous()
        for chunks in reversed(plan.segments(blocking.segment)):
            seg = load(x, plan, chunks, group)
            f = intra_chunk(seg.kq, seg.g, seg.beta, keep_levels=False)
            d_out = rows_of(x, d_o, plan, chunks, hs).mul_(x.scale)
            reverse_states(seg, f, d_out, d_state.flatten(0, 2), d_finals, {})
        d_states[:, :, hs] = d_state
    return d_states


def scan_states(summary: Tensor, start: Tensor) -> Tensor:
    """The state at every part's start: S_0 = start, S_{p+1} = M_p S_p + S_ext,p.

    Args:
        summary: [P, ..., K, V + K], start: [..., K, V].
    Returns:
        [P, ..., K, V]
    """
    width = start.shape[-1]
    states = [start]
    for part in summary[:-1]:
        states.append(torch.matmul(part[..., width:], states[-1]) + part[..., :width])
    return torch.stack(states)


def scan_gradients(d_states: Tensor, maps: Tensor, end: Tensor) -> Tensor:
    """The gradient of the state at every part's end: D_{P-1} = end, D_{p-1} = M_p^T D_p + dS_ext,p.

    Args:
        d_states: [P, ..., K, V] from `summarize_backward`, maps: [P, ..., K, K], end: [..., K, V].
    Returns:
        [P, ..., K, V]
    """
    ends = [end]
    for d_state, m in zip(reversed(d_states[1:]), reversed(maps[1:]), strict=True):
        ends.append(torch.matmul(m.transpose(-1, -2), ends[-1]) + d_state)
    return torch.stack(ends[::-1])


def _run(
    x: KDAInputs, parts: int, *, save: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, ChunkPlan, Blocking]:
    """The forward in so many parts: o, final state, saved states, the parts' maps [B, P, HV, K, K], and the cutting."""
    plan = make_plan(x.v.shape[1], x.bounds, parts, x.v.device)
    blocking = Blocking.choose(x, plan)
    part_states = maps = None
    if parts > 1:
        summary = summarize(x, plan, blocking)
        start = x.zero_state(x.v.shape[0])
        if x.initial_state is not None and x.bounds is None:
            start.copy_(x.initial_state)
        part_states = scan_states(summary.transpose(0, 1), start).transpose(0, 1)
        maps = summary[..., x.v.shape[-1] :].contiguous()
    return *forward(x, plan, blocking, part_states, save=save), maps, plan, blocking


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        x: KDAInputs,
        parts: int,
    ) -> tuple[Tensor, Tensor | None]:
        o, final, saved, maps, ctx.plan, ctx.blocking = _run(x, parts, save=True)
        ctx.save_for_backward(q, k, v, g, beta, initial_state, saved, maps)
        ctx.set_materialize_grads(False)
        ctx.call = x.without_tensors()
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, saved, maps = ctx.saved_tensors
        x, plan, blocking = ctx.call.with_tensors(*tensors), ctx.plan, ctx.blocking
        if d_o is None:
            d_o = torch.zeros_like(x.v)
        packed = x.bounds is not None
        d_finals = dict(enumerate(d_final)) if packed and d_final is not None else {}
        end = x.zero_state(x.v.shape[0]) if packed or d_final is None else d_final
        if maps is None:
            d_parts = end.unsqueeze(1)
        else:
            d_states = summarize_backward(x, plan, blocking, d_o, d_finals)
            d_parts = scan_gradients(d_states.transpose(0, 1), maps.transpose(0, 1), end).transpose(0, 1)
        grads = backward(x, plan, blocking, saved, d_o, d_parts, d_finals)
        return grads.q, grads.k, grads.v, grads.g, grads.beta, grads.initial_state, None, None


def choose_parts(chunks: int, lanes: int, width: int) -> int:
    """How many parts to cut a sequence into: a power of two that at least halves the expected time, else 1.

    Cutting doubles the work (summary, then replay; on 2 CPU threads 1.1 to 2 times the time was measured, never a
    gain) and divides the sequential steps, so it pays where lanes leave most of the device idle.

    Args:
        chunks: of the sequence. lanes: independent recurrences (batch entries times heads).
        width: lanes that the device advances side by side in the time of one.
    """
    whole = chunks * -(-lanes // width)
    choices = [parts for parts in (2, 4, 8, 16, 32, 64) if parts <= chunks]
    cost = {parts: 2 * -(-chunks // parts) * -(-lanes * parts // width) for parts in choices}
    parts = min(cost, key=lambda choice: cost[choice], default=1)
    return parts if parts > 1 and 2 * cost[parts] <= whole else 1


def _device_width(device: torch.device) -> int:
    """Threads of a CPU; multiprocessors of a CUDA device; 1, which never cuts, for anything else."""
    if device.type == "cpu":
        return torch.get_num_threads()
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1


def kda_torch(inputs: KDAInputs) -> tuple[Tensor, Tensor | None]:
    """See `k3_plugins.transformer.kda.ops.kda` for the arguments and results."""
    x = inputs
    chunks = -(-x.v.shape[1] // CHUNK)
    parts = x.sequence_parts
    if parts is None:
        parts = choose_parts(chunks, x.v.shape[0] * x.v.shape[2], _device_width(x.v.device))
    parts = max(1, min(parts, chunks))
    tensors = (x.q, x.k, x.v, x.g, x.beta, x.initial_state)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in tensors):
        return _run(x, parts, save=False)[:2]
    return _ChunkKDA.apply(*tensors, x, parts)
