"""How the rows of a [B, T, heads, D] tensor are laid out in chunks, and moved there and back a segment at a time.

A LANE is one sequential recurrence: (batch entry, part, head). A chunk holds C consecutive rows of one
sequence; the last chunk of a sequence is padded with zero rows (zero k, beta and g leave the state alone).
Packed sequences give a list of chunks with marks where the state starts anew. PARTS are consecutive runs of
chunks that the intra-device context parallelism treats as separate lanes.

Shapes: B batch, T rows, P parts, n chunks of a segment, h heads of a group, C rows of a chunk, D width.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK = 64


@dataclass(frozen=True)
class ChunkPlan:
    """Where every chunk's rows come from."""

    total_rows: int
    """T of the source tensors"""
    parts: int
    chunks: int
    """chunks per part"""
    rows: Tensor | None
    """[P, chunks * C] source row, -1 for padding; None if chunk c of the only part is rows [c * C, c * C + C)"""
    starts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """chunk index -> (part, sequence) of the packed sequences that start there"""
    ends: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """chunk index -> (part, sequence) of the packed sequences that end there"""

    def segments(self, length: int) -> list[tuple[int, int]]:
        """[start, end) chunk ranges of at most `length` chunks."""
        return [(c, min(c + length, self.chunks)) for c in range(0, self.chunks, length)]


def make_plan(
    total_rows: int, bounds: tuple[tuple[int, int], ...] | None, parts: int, device: torch.device
) -> ChunkPlan:
    """Plan the chunks of one sequence per batch entry (bounds None) or of packed sequences.

    Empty packed sequences get no chunk; rows behind the last sequence belong to no chunk.
    """
    if bounds is None and parts == 1:
        return ChunkPlan(total_rows, 1, -(-total_rows // CHUNK), None)
    sequences = ((0, total_rows),) if bounds is None else bounds
    pieces: list[Tensor] = []
    first: list[tuple[int, int]] = []
    last: list[tuple[int, int]] = []
    count = 0
    for n, (start, end) in enumerate(sequences):
        length = end - start
        chunks = -(-length // CHUNK)
        if chunks == 0:
            continue
        index = torch.full((chunks * CHUNK,), -1, dtype=torch.long)
        index[:length] = torch.arange(start, end)
        pieces.append(index)
        first.append((count, n))
        count += chunks
        last.append((count - 1, n))
    per_part = -(-count // parts)
    spare = per_part * parts - count
    if spare:
        pieces.append(torch.full((spare * CHUNK,), -1, dtype=torch.long))
    rows = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)
    starts: dict[int, list[tuple[int, int]]] = {}
    ends: dict[int, list[tuple[int, int]]] = {}
    if bounds is not None:
        for marks, table in ((first, starts), (last, ends)):
            for chunk, n in marks:
                table.setdefault(chunk % per_part, []).append((chunk // per_part, n))
    return ChunkPlan(total_rows, parts, per_part, rows.view(parts, -1).to(device), starts, ends)


def gather(x: Tensor, out: Tensor, plan: ChunkPlan, chunks: tuple[int, int], heads: slice) -> Tensor:
    """Write the rows of the chunks [c0, c1) into `out` and return it; padding rows become zero.

    Args:
        x: [B, T, heads, D].
        out: [n, B, P, h, r, C, D], in the dtype to convert to; each head is written r times.
    """
    c0, c1 = chunks
    n, x = c1 - c0, x[:, :, heads]
    b, _, h, d = x.shape
    if plan.rows is None:
        t0, t1 = c0 * CHUNK, min(c1 * CHUNK, plan.total_rows)
        full = (t1 - t0) // CHUNK
        rest = t1 - t0 - full * CHUNK
        if full:
            block = x[:, t0 : t0 + full * CHUNK].unflatten(1, (full, CHUNK))
            out[:full, :, 0].copy_(block.permute(1, 0, 3, 2, 4).unsqueeze(3))
        if rest:
            out[full, :, 0, :, :, :rest].copy_(x[:, t1 - rest : t1].transpose(1, 2).unsqueeze(2))
            out[full, :, 0, :, :, rest:] = 0
        return out
    rows = plan.rows[:, c0 * CHUNK : c1 * CHUNK]
    block = x.index_select(1, rows.clamp(min=0).reshape(-1)).view(b, plan.parts, n, CHUNK, h, d)
    out.copy_(block.permute(2, 0, 1, 4, 3, 5).unsqueeze(4))
    padding = (rows < 0).view(plan.parts, n, CHUNK).transpose(0, 1)
    return out.masked_fill_(padding[:, None, :, None, None, :, None], 0)


def scatter(piece: Tensor, out: Tensor, plan: ChunkPlan, chunks: tuple[int, int], heads: slice) -> None:
    """The reverse of `gather`: write [n, B, P, h, C, D] into the rows of out [B, T, heads, D], dropping padding."""
    c0, c1 = chunks
    out = out[:, :, heads]
    if plan.rows is None:
        t0, t1 = c0 * CHUNK, min(c1 * CHUNK, plan.total_rows)
        full = (t1 - t0) // CHUNK
        rest = t1 - t0 - full * CHUNK
        if full:
            block = out[:, t0 : t0 + full * CHUNK].unflatten(1, (full, CHUNK))
            block.copy_(piece[:full, :, 0].permute(1, 0, 3, 2, 4))
        if rest:
            out[:, t1 - rest : t1].copy_(piece[full, :, 0, :, :rest].transpose(1, 2))
        return
    rows = plan.rows[:, c0 * CHUNK : c1 * CHUNK].reshape(-1)
    flat = piece.permute(1, 2, 0, 4, 3, 5).flatten(1, 3)
    keep = (rows >= 0).nonzero().squeeze(1)
    out.index_copy_(1, rows[keep], flat.index_select(1, keep).to(out.dtype))
