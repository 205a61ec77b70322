"""The part of KDA that stays inside a chunk, forward and backward, for many chunks at once.

With G the inclusive cumulative sum of the log decay g inside the chunk, the chunkwise form needs, for i > j
(and i = j for q),

    Akk_ij = sum_d k_id k_jd exp(G_id - G_jd),      Aqk_ij = sum_d q_id k_jd exp(G_id - G_jd).

exp(-G) over a chunk overflows, and so does exp(G_i - G_j) for i < j. Here every factor is a product of decays
exp(g) of a run of consecutive tokens, hence <= 1 for ANY g <= 0: the chunk is split in halves again and again,
and the pairs (i in a second half, j in a first half) meet at the boundary between the halves,

    exp(G_i - G_j) = P_i X_j,   P_i = prod of exp(g) from the boundary up to i,
                                X_j = prod of exp(g) after j up to the boundary.

So a level with halves of s rows is a batched matrix product of [2s, K] (k and q rows) with [K, s], the tables P
and X of the next level follow from this level's by one multiplication, and exp is evaluated once per element.
Two properties fall out: row i uses nothing of a later token, and the gradient of g is a sum of terms that really
depend on it. (The usual dg = reverse cumsum of q*dq - k*dk cancels catastrophically under strong decay.)

Shapes: n chunks (of all lanes), C rows of a chunk (a power of two), K key dim, V value dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Level:
    """One halving, kept for the backward: m blocks of 2s rows, all chunks together."""

    s: int
    rows: Tensor
    """[n * C / 2s, 2s, K] second halves of k, then of q, times P"""
    cols: Tensor
    """[n * C / 2s, s, K] first halves of k times X"""
    prefix: Tensor
    """[n, C / 2s, s, K] P of the second halves"""
    suffix: Tensor
    """[n, C / 2s, s, K] X of the first halves"""


@dataclass
class IntraChunk:
    """What the state pass needs of a chunk."""

    kq_in: Tensor
    """[n, 2C, K]: k * exp(G), then q * exp(G): what reads the incoming state"""
    k_out: Tensor
    """[n, C, K]: k * exp(G_last - G): what writes the outgoing state"""
    decay: Tensor
    """[n, K]: exp(G_last)"""
    inv: Tensor
    """[n, C, C]: (I + A)^{-1}, A = Diag(beta) Akk"""
    mix: Tensor
    """[n, C, C]: (I + A)^{-1} Diag(beta)"""
    akk: Tensor
    """[n, C, C], strictly lower"""
    aqk: Tensor
    """[n, C, C], lower with the diagonal"""
    prefix: Tensor
    """[n, C, K]: exp(G)"""
    suffix: Tensor
    """[n, C, K]: exp(G_last - G)"""
    levels: list[Level]


def _blocks_below_diagonal(a: Tensor, s: int) -> Tensor:
    """View [n, m, s, s] of the tiles (second half, first half) of the m diagonal blocks of a [n, C, C]."""
    n, c, _ = a.shape
    return a.as_strided((n, c // (2 * s), s, s), (c * c, 2 * s * (c + 1), c, 1), a.storage_offset() + s * c)


def _unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)^{-1} for strictly lower a [n, C, C], by halves: [[L1, 0], [-L2 a21 L1, L2]]."""
    n, c, _ = a.shape
    inv = torch.zeros_like(a)
    inv.diagonal(dim1=1, dim2=2).fill_(1)
    s = 1
    while s < c:
        below = _blocks_below_diagonal(a, s)
        if s == 1:
            tile = below.neg()
        else:
            blocks = inv.as_strided((n, c // (2 * s), 2, s, s), (c * c, 2 * s * (c + 1), s * (c + 1), c, 1))
            first, second = blocks[:, :, 0], blocks[:, :, 1]
            tile = (second @ below @ first).neg_()
        _blocks_below_diagonal(inv, s).copy_(tile)
        s *= 2
    return inv


def intra_chunk(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, *, keep_levels: bool) -> IntraChunk:
    """Everything about the chunks that does not depend on the state.

    Args:
        q, k, g: [n, C, K]. beta: [n, C].
        keep_levels: keep what `intra_chunk_backward` needs.
    """
    n, c, width = k.shape
    kq = torch.stack((k, q), dim=1)
    prefix = g.exp()
    suffix = torch.ones_like(prefix)
    pair = k.new_zeros(2, n, c, c)
    akk, aqk = pair.unbind(0)
    levels: list[Level] = []
    s = 1
    while s < c:
        m = c // (2 * s)
        p, x = prefix.view(n, m, 2, s, width), suffix.view(n, m, 2, s, width)
        rows = k.new_empty(n, m, 2, s, width)
        torch.mul(kq.view(n, 2, m, 2, s, width)[:, :, :, 1], p[:, None, :, 1], out=rows.transpose(1, 2))
        rows = rows.view(n * m, 2 * s, width)
        cols = (k.view(n, m, 2, s, width)[:, :, 0] * x[:, :, 0]).view(n * m, s, width)
        tile = torch.bmm(rows, cols.transpose(1, 2)).view(n, m, 2, s, s)
        _blocks_below_diagonal(akk, s).copy_(tile[:, :, 0])
        _blocks_below_diagonal(aqk, s).copy_(tile[:, :, 1])
        if keep_levels:
            levels.append(Level(s, rows, cols, p[:, :, 1].clone(), x[:, :, 0].clone()))
        x[:, :, 0] *= p[:, :, 1, -1:]
        p[:, :, 1] *= p[:, :, 0, -1:]
        s *= 2
    aqk.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    inv = _unit_lower_inverse(akk * beta.unsqueeze(-1))
    return IntraChunk(
        kq_in=(kq * prefix.unsqueeze(1)).view(n, 2 * c, width),
        k_out=k * suffix,
        decay=prefix[:, -1],
        inv=inv,
        mix=inv * beta.unsqueeze(-2),
        akk=akk,
        aqk=aqk,
        prefix=prefix,
        suffix=suffix,
        levels=levels,
    )


def intra_chunk_backward(
    q: Tensor,
    k: Tensor,
    f: IntraChunk,
    d_kq_in: Tensor,
    d_k_out: Tensor,
    d_decay: Tensor,
    d_akk: Tensor,
    d_aqk: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and g, each [n, C, K].

    Args:
        f: `intra_chunk(..., keep_levels=True)` of the same chunks.
        d_kq_in [n, 2C, K], d_k_out [n, C, K], d_decay [n, K], d_akk, d_aqk [n, C, C]: gradients of its fields;
            entries of d_akk on or above the diagonal and of d_aqk above it are ignored.
    """
    n, c, width = k.shape
    dkq = d_kq_in.view(n, 2, c, width) * f.prefix.unsqueeze(1)
    dk, dq = dkq[:, 0], dkq[:, 1]
    # d_p and d_x are gradients with respect to log P and log X, the sums of g over their runs.
    d_p = (dk * k).addcmul_(dq, q)
    d_p[:, -1] += f.decay * d_decay
    d_out = d_k_out * f.suffix
    dk += d_out
    d_x = d_out.mul_(k)
    for level in reversed(f.levels):
        s, m = level.s, c // (2 * level.s)
        dkq_v, p_v, x_v = (
            dkq.view(n, 2, m, 2, s, width),
            d_p.view(n, m, 2, s, width),
            d_x.view(n, m, 2, s, width),
        )
        # Undo P2 = P2 * P1[last] (second halves) and X1 = X1 * P2[last] (first halves).
        total_first, total_second = p_v[:, :, 1].sum(2), x_v[:, :, 0].sum(2)
        p_v[:, :, 0, -1] += total_first
        p_v[:, :, 1, -1] += total_second
        tile = k.new_empty(n, m, 2, s, s)
        tile[:, :, 0] = _blocks_below_diagonal(d_akk, s)
        tile[:, :, 1] = _blocks_below_diagonal(d_aqk, s)
        tile = tile.view(n * m, 2 * s, s)
        d_rows = torch.bmm(tile, level.cols).view(n, m, 2, s, width)
        d_cols = torch.bmm(tile.transpose(1, 2), level.rows).view(n, m, s, width)
        p_v[:, :, 1] += (d_rows * level.rows.view(n, m, 2, s, width)).sum(2)
        x_v[:, :, 0] += d_cols * level.cols.view(n, m, s, width)
        dkq_v[:, :, :, 1] += d_rows.mul_(level.prefix.unsqueeze(2)).transpose(1, 2)
        dkq_v[:, 0, :, 0] += d_cols.mul_(level.suffix)
    # The diagonal of Aqk carries no decay.
    diagonal = d_aqk.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    dq += diagonal * k
    dk += diagonal * q
    return dq, dk, d_p
