"""How far a draft's distribution is from the target's, as speculative decoding feels it.

A drafted token is accepted with probability sum_x min(p(x), q(x)), p the target's and q the draft's distribution at
temperature 1. Training minimises the negative logarithm of just that (EAGLE-3 style, without a cross-entropy term):

    L_LK = -log sum_x min(p(x), q(x))

Letters: v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lk_loss(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """``L_LK`` and the acceptance probability of every position, from logits.

    Args:
        target: logits of p, ``[..., v]``, any floating dtype; no gradient goes there.
        draft: logits of q, ``[..., v]``.

    Returns:
        Loss and acceptance ``[...]``, fp32 (fp64 for fp64 logits). The acceptance has no gradient.
    """
    wide = torch.promote_types(draft.dtype, torch.float32)
    log_p = torch.log_softmax(target.detach().to(wide), -1)
    log_q = torch.log_softmax(draft.to(wide), -1)
    # In logarithms: of a vocabulary's tail, min(p, q) underflows where its logarithm is still a number.
    loss = -torch.logsumexp(torch.minimum(log_p, log_q), -1)
    return loss, torch.exp(-loss.detach())
