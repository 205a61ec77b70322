"""The part of KDA that stays inside a chunk, forward and backward, for many chunks at once.

With G the inclusive cumulative sum of the log decay g inside the chunk, the chunkwise form needs, for i > j
(and i = j for q),

    Akk_ij = sum_d k_id k_jd exp(G_id - G_jd),      Aqk_ij = sum_d q_id k_jd exp(G_id - G_jd).

exp(-G) over a chunk overflows, and so does exp(G_i - G_j) for i < j. Here every factor is a product of decays
exp(g) of a run of consecutive tokens, hence <= 1 for ANY g <= 0: the chunk is split in halves again and again,
and the pairs (i in a second half, j in a first half) meet at the boundary between the halves,

    exp(G_i - G_j) = P_i X_j,   P_i = prod of exp(g) from the boundary up to i,
                                X_j = prod of exp(g) after j up to the boundary.

So a LEVEL with halves of s rows is a batched matrix product of [2s, K] (k and q rows) with [K, s], the tables P
and X of the next level follow from this level's by one multiplication, and exp is evaluated once per element.
Row i uses nothing of a later token, and the gradient of g is a sum of terms that really depend on it (the usual
dg = reverse cumsum of q*dq - k*dk cancels catastrophically under strong decay).

The smallest halvings are slow matrix products. Where no 8 consecutive tokens decay by more than e^-40 (always so
with K3's gate, bounded by -5), the tiles of 16 are one dense product instead, with the middle of the tile as the
reference, F_i = P_i or 1 / X_i, and 1 / F_j on the other side: factors up to e^40, non-causal products up to e^80
that are finite in fp32 and dropped. This is decided from g itself, so no promise by a caller can be wrong.

Shapes: n chunks (of all lanes), C rows of a chunk, m blocks of a chunk, K key dim; R = 2 for k and q, 1 for k alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 16
# Half a tile may decay by this much: 8 * -5, with room for rounding. exp(81) fits fp32 (max exp(88.7)).
_DENSE_LIMIT = -40.5


@dataclass
class Level:
    """The products of one halving (or of the dense tiles), kept for the backward."""

    s: int
    rows: Tensor
    """[n, m, R, r, K] k rows, then q rows, times their factors; r = s second-half rows, or all TILE rows"""
    cols: Tensor
    """[n, m, r, K] k times the factors of the other side"""
    row_factor: Tensor
    """[n, m, r, K]"""
    col_factor: Tensor
    """[n, m, r, K]"""

    @property
    def dense(self) -> bool:
        """Dense tiles have all rows on both sides."""
        return self.cols.shape[2] == 2 * self.s


@dataclass
class IntraChunk:
    """What the state pass needs of a chunk."""

    kq_in: Tensor
    """[n, R * C, K]: k * exp(G), then q * exp(G): what reads the incoming state"""
    k_out: Tensor
    """[n, C, K]: k * exp(G_last - G): what writes the outgoing state"""
    decay: Tensor
    """[n, K]: exp(G_last)"""
    inv: Tensor
    """[n, C, C]: (I + A)^{-1}, A = Diag(beta) Akk"""
    mix: Tensor
    """[n, C, C]: (I + A)^{-1} Diag(beta)"""
    pairs: Tensor
    """[n, R, C, C]: Akk (strictly lower) and Aqk (lower with the diagonal)"""
    prefix: Tensor
    """[n, C, K]: exp(G)"""
    suffix: Tensor
    """[n, C, K]: exp(G_last - G)"""
    levels: list[Level]
    """from the finest up; empty unless asked for"""

    @property
    def akk(self) -> Tensor:
        return self.pairs[:, 0]

    @property
    def aqk(self) -> Tensor:
        return self.pairs[:, 1]


def dense_tiles_fit(g: Tensor) -> bool:
    """Whether the dense tiles are exact for these log decays [n, C, K]; looks at the data, nothing else."""
    return g.unflatten(1, (-1, TILE // 2)).sum(2).amin().item() >= _DENSE_LIMIT


def _below_diagonal(pairs: Tensor, s: int) -> Tensor:
    """View [n, m, R, s, s] of the tiles (second half, first half) of the m diagonal blocks of [n, R, C, C]."""
    n, sets, c, _ = pairs.shape
    shape, strides = (n, c // (2 * s), sets, s, s), (sets * c * c, 2 * s * (c + 1), c * c, c, 1)
    return pairs.as_strided(shape, strides, pairs.storage_offset() + s * c)


def _on_diagonal(pairs: Tensor) -> Tensor:
    """View [n, m, R, TILE, TILE] of the diagonal tiles of [n, R, C, C]."""
    n, sets, c, _ = pairs.shape
    shape, strides = (n, c // TILE, sets, TILE, TILE), (sets * c * c, TILE * (c + 1), c * c, c, 1)
    return pairs.as_strided(shape, strides, pairs.storage_offset())


def _unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)^{-1} for strictly lower a [n, C, C]: tiles by substitution, then [[L1, 0], [-L2 a21 L1, L2]]."""
    n, c, _ = a.shape
    inv = torch.zeros_like(a)
    tiles = a.as_strided((n, c // TILE, TILE, TILE), (c * c, TILE * (c + 1), c, 1)).reshape(-1, TILE, TILE)
    eye = torch.eye(TILE, dtype=a.dtype, device=a.device).expand_as(tiles)
    solved = torch.linalg.solve_triangular(tiles, eye, upper=False, unitriangular=True)
    inv.as_strided((n, c // TILE, TILE, TILE), (c * c, TILE * (c + 1), c, 1)).copy_(solved.view(n, -1, TILE, TILE))
    s = TILE
    while s < c:
        for start in range(0, c, 2 * s):
            first, second = slice(start, start + s), slice(start + s, start + 2 * s)
            product = torch.bmm(torch.bmm(inv[:, second, second], a[:, second, first]), inv[:, first, first])
            torch.neg(product, out=inv[:, second, first])
        s *= 2
    return inv


def _products(kq: Tensor, k: Tensor, row_factor: Tensor, col_factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [n, m, R, r, K], columns [n, m, r, K] and their products [n, m, R, r, r].

    Args:
        kq: [n, R, m, r, K], k: [n, m, r, K], factors: [n, m, r, K].
    """
    n, m, r, width = row_factor.shape
    sets = kq.shape[1]
    rows = k.new_empty(n, m, sets, r, width)
    torch.mul(kq, row_factor.unsqueeze(1), out=rows.transpose(1, 2))
    cols = k * col_factor
    products = torch.bmm(rows.view(n * m, sets * r, width), cols.view(n * m, r, width).transpose(1, 2))
    return rows, cols, products.view(n, m, sets, r, r)


def intra_chunk(kq: Tensor, g: Tensor, beta: Tensor, *, keep_levels: bool) -> IntraChunk:
    """Everything about the chunks that does not depend on the state.

    Args:
        kq: [n, R, C, K], k and q, or k alone. g: [n, C, K]; C is TILE times a power of two. beta: [n, C].
        keep_levels: keep what `intra_chunk_backward` needs.
    """
    n, sets, c, width = kq.shape
    k = kq[:, 0]
    dense = dense_tiles_fit(g)
    prefix = g.exp()
    suffix = torch.ones_like(prefix)
    pairs = k.new_zeros(n, sets, c, c)
    levels: list[Level] = []
    s = 1
    while s < c:
        m = c // (2 * s)
        p, x = prefix.view(n, m, 2, s, width), suffix.view(n, m, 2, s, width)
        if dense and 2 * s == TILE:
            row_factor = torch.stack((x[:, :, 0].reciprocal(), p[:, :, 1]), dim=2).flatten(2, 3)
            col_factor = torch.stack((x[:, :, 0], p[:, :, 1].reciprocal()), dim=2).flatten(2, 3)
            rows, cols, products = _products(
                kq.view(n, sets, m, TILE, width), k.view(n, m, TILE, width), row_factor, col_factor
            )
            _on_diagonal(pairs).copy_(products.tril_(-1))
            if keep_levels:
                levels.append(Level(s, rows, cols, row_factor, col_factor))
        elif not (dense and 2 * s < TILE):
            rows, cols, products = _products(
                kq.view(n, sets, m, 2, s, width)[:, :, :, 1], k.view(n, m, 2, s, width)[:, :, 0], p[:, :, 1], x[:, :, 0]
            )
            _below_diagonal(pairs, s).copy_(products)
            if keep_levels:
                levels.append(Level(s, rows, cols, p[:, :, 1].clone(), x[:, :, 0].clone()))
        if s == 1:
            x[:, :, 0] = p[:, :, 1]
        else:
            x[:, :, 0] *= p[:, :, 1, -1:]
        p[:, :, 1] *= p[:, :, 0, -1:]
        s *= 2
    if sets == 2:
        pairs[:, 1].diagonal(dim1=1, dim2=2).copy_((kq[:, 1] * k).sum(-1))
    inv = _unit_lower_inverse(pairs[:, 0] * beta.unsqueeze(-1))
    return IntraChunk(
        kq_in=(kq * prefix.unsqueeze(1)).view(n, sets * c, width),
        k_out=k * suffix,
        decay=prefix[:, -1],
        inv=inv,
        mix=inv * beta.unsqueeze(-2),
        pairs=pairs,
        prefix=prefix,
        suffix=suffix,
        levels=levels,
    )


def _level_backward(
    level: Level, d_products: Tensor, d_rows_out: Tensor, d_cols_out: Tensor, d_row_log: Tensor, d_col_log: Tensor
) -> None:
    """Add a level's share to the gradients of k and q rows [n, 2, m, r, K], of k columns [n, m, r, K], and of the
    logarithms of the row and column factors [n, m, r, K].

    Args:
        d_products: [n, m, 2, r, r]
    """
    n, m, _, r, width = level.rows.shape
    d_products = d_products.view(n * m, 2 * r, r)
    d_rows = torch.bmm(d_products, level.cols.view(n * m, r, width)).view(n, m, 2, r, width)
    d_cols = torch.bmm(d_products.transpose(1, 2), level.rows.view(n * m, 2 * r, width)).view(n, m, r, width)
    d_row_log.addcmul_(d_rows[:, :, 0], level.rows[:, :, 0]).addcmul_(d_rows[:, :, 1], level.rows[:, :, 1])
    d_col_log.addcmul_(d_cols, level.cols)
    d_rows_out.addcmul_(d_rows.transpose(1, 2), level.row_factor.unsqueeze(1))
    d_cols_out.addcmul_(d_cols, level.col_factor)


def intra_chunk_backward(
    kq: Tensor, f: IntraChunk, d_kq_in: Tensor, d_k_out: Tensor, d_decay: Tensor, d_pairs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and g, each [n, C, K].

    Args:
        kq: [n, 2, C, K], k and q.
        f: `intra_chunk(..., keep_levels=True)` of the same chunks.
        d_kq_in [n, 2C, K], d_k_out [n, C, K], d_decay [n, K], d_pairs [n, 2, C, C]: gradients of its fields;
            the entries of d_pairs on or above the diagonal (above it for Aqk) are ignored.
    """
    n, _, c, width = kq.shape
    k, q = kq.unbind(1)
    dkq = d_kq_in.view(n, 2, c, width) * f.prefix.unsqueeze(1)
    dk, dq = dkq[:, 0], dkq[:, 1]
    # d_p and d_x are gradients with respect to log P and log X, the sums of g over their runs.
    d_p = (dk * k).addcmul_(dq, q)
    d_p[:, -1] += f.decay * d_decay
    d_out = d_k_out * f.suffix
    dk += d_out
    d_x = d_out.mul_(k)
    levels = {level.s: level for level in f.levels}
    s = c // 2
    while s:
        m = c // (2 * s)
        p_v, x_v = d_p.view(n, m, 2, s, width), d_x.view(n, m, 2, s, width)
        # Undo P2 = P2 * P1[last] (second halves) and X1 = X1 * P2[last] (first halves).
        total_first, total_second = (d[:, :, 0] if s == 1 else d.sum(2) for d in (p_v[:, :, 1], x_v[:, :, 0]))
        p_v[:, :, 0, -1] += total_first
        p_v[:, :, 1, -1] += total_second
        level = levels.get(s)
        if level is not None and level.dense:
            # One dense tile: log F is log P in the second half and -log X in the first. The diagonal carries no
            # decay and is left out, or its share would leave rounding noise in dg.
            d_products = _on_diagonal(d_pairs).tril(-1)
            d_log = torch.zeros_like(level.cols), torch.zeros_like(level.cols)
            blocks = dkq.view(n, 2, m, TILE, width)
            _level_backward(level, d_products, blocks, blocks[:, 0], *d_log)
            d_factor = torch.sub(*d_log, out=d_log[0]).view(n, m, 2, s, width)
            x_v[:, :, 0] -= d_factor[:, :, 0]
            p_v[:, :, 1] += d_factor[:, :, 1]
        elif level is not None:
            blocks = dkq.view(n, 2, m, 2, s, width)
            d_products = _below_diagonal(d_pairs, s).contiguous()
            _level_backward(level, d_products, blocks[:, :, :, 1], blocks[:, 0, :, 0], p_v[:, :, 1], x_v[:, :, 0])
        s //= 2
    diagonal = d_pairs[:, 1].diagonal(dim1=1, dim2=2).unsqueeze(-1)
    dq.addcmul_(diagonal, k)
    dk.addcmul_(diagonal, q)
    return dq, dk, d_p
