"""The largest pre-softmax logit of every attention head, without storing a score matrix.

Fused attention kernels do not return their scores, so they are computed a second time, block by block, without
gradient. That costs one more QK^T in the forward, and is done only for a module that was given a `LogitMaxima`.

Shapes: s local queries, S keys of the whole sequence, b batch, n heads, m key-value heads (n a multiple of m),
g = n / m, c query/key width.
"""

import torch
from torch import Tensor

_SCORES_PER_BLOCK = 2**22
"""Elements of one block of scores: 16 MB in fp32."""


@torch.no_grad()
def largest_logits(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    slices: list[tuple[int, int]],
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Largest causal logit of every head over all local queries.

    Args:
        q: ``[s, b, n, c]``.
        k: ``[S, b, m, c]`` in sequence order.
        scale: positive factor on the scores.
        slices: (position in the sequence, length) of each run of consecutive local queries, in their local order.
        cu_seqlens: ``[N+1]`` boundaries of packed sequences over the whole sequence: logits across them, and of rows
            past the last one, do not count.

    Returns:
        ``[n]`` in at least fp32; -inf for a head without any admitted pair.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    _, batch, heads, _ = q.shape
    total, _, groups, _ = k.shape
    # [s, b, n, c] -> [b, m, g, s, c]; head i belongs to key-value head i // g
    q = q.detach().to(compute).permute(1, 2, 0, 3).unflatten(1, (groups, heads // groups))
    k = k.detach().to(compute).permute(1, 2, 3, 0).unsqueeze(2)  # [b, m, 1, c, S]
    place = torch.arange(total, device=q.device)
    packed = None if cu_seqlens is None else (torch.searchsorted(cu_seqlens, place, right=True), cu_seqlens[-1])
    best = q.new_full((groups, heads // groups), -torch.inf)
    rows = max(1, _SCORES_PER_BLOCK // (batch * heads * total))
    offset = 0
    for first, length in slices:
        for start in range(0, length, rows):
            count = min(rows, length - start)
            begin, end = first + start, first + start + count
            admitted = place[None, :end] <= place[begin:end, None]
            if packed is not None:
                segment, last = packed
                admitted &= segment[None, :end] == segment[begin:end, None]
                admitted &= place[begin:end, None] < last
            local = q[:, :, :, offset + start : offset + start + count]
            scores = (local @ k[..., :end]).masked_fill_(~admitted, -torch.inf)
            best = torch.maximum(best, scores.amax(dim=(0, 3, 4)))
        offset += length
    return best.flatten() * scale


class LogitMaxima:
    """Running maximum of the logits of one attention module since it was last taken."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        """``[n]`` of this rank's heads, or None when no forward has run since."""

    def update(self, largest: Tensor) -> None:
        """Include one more forward's maxima ``[n]``."""
        self.value = largest if self.value is None else torch.maximum(self.value, largest)

    def take(self) -> Tensor | None:
        """The maxima, and start anew."""
        value, self.value = self.value, None
        return value
