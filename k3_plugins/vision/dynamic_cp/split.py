"""Attention, pooling and pixel shuffle over clips that are split over ranks: the same values as over whole clips.

Every rank of the group takes part in every exchange, with or without rows of its own, in the same order forward and
backward. An exchange is kept in the graph of a rank that uses nothing of it: its peers wait for it when they go back;
and every parameter gets a gradient on every rank, which Megatron's reduction of gradients counts on.

Letters: L patches of this rank, R received ones, m tokens of this rank, s patches of a frame, d width, n heads, k head
width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad, scaled_dot_product_attention

from k3_plugins.vision.dynamic_cp.layout import Layout, Message, Rows, columns, token_slots
from k3_plugins.vision.moonvit.geometry import MERGE, Clip, Piece, Run
from k3_plugins.vision.moonvit.packed import Packed, attend_whole, merge_whole, rows_of_videos


def exchange(x: Tensor, message: Message, group: ProcessGroup, send: Tensor | None = None) -> Tensor:
    """Send rows of ``x`` to the other ranks; those received, in the order of ranks. The gradient goes back.

    Args:
        send: ``message.send`` where ``x`` is, if it is there already.
    """
    rows = x.index_select(0, torch.from_numpy(message.send).to(x.device) if send is None else send)
    return all_to_all(group, rows, list(message.receive_counts), list(message.send_counts))


class _Job(NamedTuple):
    """An attention problem: queries of a piece among keys of the pool."""

    queries: Tensor
    """Rows of the piece, ``[b, q]``."""
    keys: tuple[int, int]
    """b and the keys of each."""


class _Part(NamedTuple):
    """What a rank holds of one clip."""

    rows: slice
    clip: Clip
    jobs: list[_Job]
    """Empty for a whole clip."""
    back: Tensor | None
    """From the order of the jobs to that of the rows."""


@dataclass(frozen=True)
class _Plan:
    """Spatial or temporal attention of a rank's rows, with indices where the rows are."""

    message: Message | None
    """None: no clip is split."""
    send: Tensor | None
    keys: Tensor
    """Rows of the pool for all jobs."""
    parts: list[_Part]

    @classmethod
    def make(cls, layout: Layout, rank: int, across_time: bool, device: torch.device) -> _Plan:
        """Of the clips of ``layout``."""
        message: Message | None = None
        table: dict[int, Rows] = {}
        if layout.split:
            needs = layout.time_needs if across_time else layout.space_needs
            message, table = layout.message(rank, {other: needs(other) for other in range(layout.group_size)})
        parts, keys, start = [], [np.arange(0)], 0
        for number, piece in layout.pieces(rank).items():
            rows = slice(start, start + piece.patches)
            start += piece.patches
            jobs, order = [], [np.arange(0)]
            for queries, places in _jobs(piece, table[number], across_time) if number in table else ():
                jobs.append(_Job(torch.from_numpy(queries.copy()).to(device), places.shape))
                order.append(queries.reshape(-1))
                keys.append(places.reshape(-1))
            back = torch.from_numpy(np.argsort(np.concatenate(order))).to(device) if jobs else None
            parts.append(_Part(rows, piece.clip, jobs, back))
        send = None if message is None else torch.from_numpy(message.send).to(device)
        return cls(message, send, torch.from_numpy(np.concatenate(keys)).to(device), parts)


class Split(Packed):
    """This rank's part of a batch; see ``Packed`` for the methods.

    Args:
        layout: where the batch lies, the same on all ranks.
        group: the ranks; its size is the layout's.
    """

    def __init__(self, layout: Layout, group: ProcessGroup) -> None:
        self.layout, self.group, self.rank = layout, group, group.rank()
        self.numbered = layout.pieces(self.rank)
        self.pieces = list(self.numbered.values())
        self._plans: dict[tuple[torch.device, bool], _Plan] = {}

    @cached_property
    def video_rows(self) -> Tensor | None:
        """As in ``Packed``; where a video is split the step has an exchange, which no rank leaves out."""
        here = any(piece.clip.t > 1 for piece in self.pieces)
        return rows_of_videos(self.pieces) if here or self.layout.splits_video else None

    @cached_property
    def _videos(self) -> Layout:
        """The layout of the clips of several frames alone."""
        layout = self.layout
        numbers = [number for number, clip in enumerate(layout.clips) if clip.t > 1]
        return Layout([layout.clips[k] for k in numbers], [layout.owners[k] for k in numbers], layout.group_size)

    def attend_space(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention within each frame, ``[L, n, k]`` to ``[L, n*k]``."""
        return self._attend(q, k, v, across_time=False)

    def attend_time(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention across the frames of each place; the rows are those of ``video_rows``."""
        return self._attend(q, k, v, across_time=True)

    def _plan(self, device: torch.device, across_time: bool) -> _Plan:
        """Made once; every block of the encoder does the same."""
        if (device, across_time) not in self._plans:
            layout = self._videos if across_time else self.layout
            self._plans[device, across_time] = _Plan.make(layout, self.rank, across_time, device)
        return self._plans[device, across_time]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, across_time: bool) -> Tensor:
        """Whole clips among their own rows, pieces among their own and the received ones."""
        plan = self._plan(q.device, across_time)
        # No rows, but a place in the graph for the exchange and the weights: see the module docstring.
        empty = q[:0] * k[:0] * v[:0]
        keys: list[Tensor] = []
        if plan.message is not None:
            own = torch.cat([k, v], dim=-1)
            pool = torch.cat([own, exchange(own, plan.message, self.group, plan.send)])
            empty = empty + pool[:0].chunk(2, dim=-1)[0]
            # Taken in one step, so that their gradients are added in one.
            keys = list(pool[plan.keys].split([math.prod(job.keys) for part in plan.parts for job in part.jobs]))
        outputs = [empty.flatten(1)]
        for part in plan.parts:
            if not part.jobs:
                whole = attend_whole(q[part.rows], k[part.rows], v[part.rows], [part.clip], across_time=across_time)
                outputs.append(whole)
                continue
            attended = []
            for job in part.jobs:
                queries = rearrange(q[part.rows][job.queries], "b q n k -> b n q k")
                key, value = rearrange(keys.pop(0).unflatten(0, job.keys), "b q n k -> b n q k").chunk(2, dim=-1)
                attended.append(rearrange(scaled_dot_product_attention(queries, key, value), "b n q k -> (b q) (n k)"))
            outputs.append(torch.cat(attended)[part.back])
        return torch.cat(outputs)

    def merge(self, x: Tensor) -> Tensor:
        """Mean over the frames of each clip (in at least fp32), then 2 x 2 pixel shuffle: ``[L, d]`` to ``[m, 4, d]``.

        A rank adds up its frames; the holder of a token adds the sums of the ranks, in their order.
        """
        starts = np.cumsum([0, *(piece.patches for piece in self.pieces)])
        parts = {n: x[starts[k] : starts[k + 1]] for k, n in enumerate(self.numbered)}
        merged = {n: merge_whole(part, self.layout.clips[n]) for n, part in parts.items() if n not in self.layout.split}
        empty = x[:0, None].expand(0, MERGE**2, -1)
        if self.layout.split:
            tokens, empty = self._merge_split({n: part for n, part in parts.items() if n not in merged}, x)
            merged |= tokens
        return torch.cat([empty, *(merged[n] for n in sorted(merged))])

    def _merge_split(self, parts: dict[int, Tensor], x: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """This rank's tokens of split clips, and no token, which keeps the exchange in the graph of a rank without."""
        layout, compute = self.layout, torch.promote_types(x.dtype, torch.float32)
        sums = [_sum_over_frames(part.to(compute), self.numbered[n]) for n, part in parts.items()]
        message, targets, counts = _merge_message(layout, self.rank)
        received = exchange(torch.cat([x[:0].to(compute), *sums]), message, self.group)
        total = received.new_zeros(MERGE**2 * sum(counts.values()), x.shape[-1])
        for rows, target in zip(received.split(list(message.receive_counts)), targets, strict=True):
            total = total.index_add(0, torch.from_numpy(target).to(x.device), rows)
        total = total.unflatten(0, (-1, MERGE**2))
        tokens = dict(zip(counts, total.split(list(counts.values())), strict=True))
        return {n: (part / layout.clips[n].t).to(x.dtype) for n, part in tokens.items()}, total[:0].to(x.dtype)

    def deliver(self, tokens: Tensor, wanted: Sequence[Rows]) -> Tensor:
        """Bring tokens to the ranks that want them: ``[m, D]`` to ``[len(wanted[rank]), D]`` in the order wanted.

        Args:
            tokens: this rank's, projected.
            wanted: by rank: numbers of tokens among all of the batch.
        """
        layout = self.layout
        holder = np.zeros(layout.first_token[-1], dtype=np.int64)
        place = np.zeros_like(holder)
        for rank in range(layout.group_size):
            by_clip = [layout.first_token[n] + layout.tokens(n, rank) for n in range(len(layout.clips))]
            held = np.concatenate([np.arange(0), *by_clip])
            holder[held], place[held] = rank, np.arange(len(held))
        send = [place[rows[holder[rows] == self.rank]] for rows in wanted]
        sources = holder[wanted[self.rank]]
        counts = tuple(int((sources == rank).sum()) for rank in range(layout.group_size))
        message = Message(np.concatenate(send), tuple(map(len, send)), counts)
        received = exchange(tokens, message, self.group)
        back = np.argsort(np.argsort(sources, kind="stable"), kind="stable")
        return received[torch.from_numpy(back).to(tokens.device)]


def _jobs(piece: Piece, table: Rows, across_time: bool) -> list[tuple[Rows, Rows]]:
    """Attention problems of one shape each: rows of the queries in the piece, rows of the keys in the pool.

    Both are ``[b, q]``: b frames of some of their places, or b places of some of their frames.
    """
    size = piece.clip.h * piece.clip.w
    jobs = []
    for run in columns(piece) if across_time else piece.runs():
        frames, places = np.arange(run.begin, run.end), np.arange(run.first, run.last)
        queries = frames[:, None] * size + places - piece.start
        if across_time:
            keys = np.arange(piece.clip.t)[:, None] * size + places
            jobs.append((queries.T, table[keys.T]))
        else:
            keys = frames[:, None] * size + np.arange(size)
            jobs.append((queries, table[keys]))
    return jobs


def _slots(piece: Piece) -> tuple[Rows, Rows]:
    """The places that a piece touches, and their slots, in the order of the slots."""
    runs = piece.runs()
    places = np.unique(np.concatenate([np.arange(0), *(np.arange(run.first, run.last) for run in runs)]))
    slots = token_slots(piece.clip)[places]
    order = np.argsort(slots)
    return places[order], slots[order]


def _sum_over_frames(x: Tensor, piece: Piece) -> Tensor:
    """The sum over the piece's frames at each place that it touches, in the order of the slots."""
    places, _ = _slots(piece)
    runs = piece.runs()
    low, high = min(run.first for run in runs), max(run.last for run in runs)

    def padded(run: Run, part: Tensor) -> Tensor:
        total = part.unflatten(0, (run.end - run.begin, -1)).sum(0)
        return pad(total, (0, 0, run.first - low, high - run.last))

    parts = x.split([run.patches for run in runs])
    total = sum(padded(run, part) for run, part in zip(runs, parts, strict=True))
    assert isinstance(total, Tensor), "a piece has at least one run"
    return total[torch.from_numpy(places - low).to(x.device)]


def _merge_message(layout: Layout, rank: int) -> tuple[Message, list[Rows], dict[int, int]]:
    """The exchange of sums, the slots in which the rows of each rank are added, and this rank's tokens by clip."""
    counts = {n: len(layout.tokens(n, rank)) for n in layout.split if rank in layout.owners[n].ranks}
    base = dict(zip(counts, np.cumsum([0, *counts.values()]), strict=False))
    send, targets = [], []
    for other in range(layout.group_size):
        rows, target, held = [np.arange(0)], [np.arange(0)], 0
        for n in layout.split:
            mine, theirs = layout.piece(n, rank), layout.piece(n, other)
            if mine is None:
                continue
            slots = _slots(mine)[1]
            if theirs is not None:
                rows.append(held + np.flatnonzero(np.isin(slots // MERGE**2, layout.tokens(n, other))))
                first, tokens = base[n], layout.tokens(n, rank)
                sent = _slots(theirs)[1]
                sent = sent[np.isin(sent // MERGE**2, tokens)]
                target.append(sent + (first - (tokens[0] if len(tokens) else 0)) * MERGE**2)
            held += len(slots)
        send.append(np.concatenate(rows))
        targets.append(np.concatenate(target))
    message = Message(np.concatenate(send), tuple(map(len, send)), tuple(map(len, targets)))
    return message, targets, counts
