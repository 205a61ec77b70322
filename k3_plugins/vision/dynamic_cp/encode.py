"""Encode images and videos over a process group: the one function that training calls.

    tokens = encode(encoder, patches, clips, group, wanted)

All ranks of the group call it with the same clips. The group may be that of context parallelism, where each rank wants
the tokens of its slice of the sequence, or any other, such as the ranks of a pipeline, the first of which wants them
all. The gradient of what a rank wanted goes back to the ranks that encoded it; the gradient of a parameter on a rank is
that of the rank's own work, so that the sum over the group is the whole.

Letters: N patches and M tokens of all clips, D width of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from k3_plugins.vision.dynamic_cp.balance import Assignment, balance
from k3_plugins.vision.dynamic_cp.cost import sample_of
from k3_plugins.vision.dynamic_cp.layout import Layout, Rows
from k3_plugins.vision.dynamic_cp.split import Split
from k3_plugins.vision.moonvit.encoder import Between, MoonViT
from k3_plugins.vision.moonvit.geometry import Clip, check_batch


def assign(encoder: MoonViT, clips: Sequence[Clip], group_size: int, imbalance: float = 1.05) -> Assignment:
    """Who encodes what; see ``balance.balance``."""
    output_size = encoder.projector.linear_fc2.output_size
    return balance([sample_of(clip, encoder.vit, output_size) for clip in clips], group_size, imbalance)


def encode(
    encoder: MoonViT,
    patches: Tensor,
    clips: Sequence[Clip],
    group: ProcessGroup,
    wanted: Sequence[Rows],
    assignment: Assignment | None = None,
    between: Between | None = None,
) -> Tensor:
    """Encode a batch over a group. Collective, forward and backward.

    Args:
        encoder: the same weights on every rank of the group.
        patches: ``[N, 3*P*P]``, all of them, of which the rank reads its own.
        clips: their grids.
        group: the ranks.
        wanted: by rank of the group, the same on all: numbers of the tokens, out of M, that it gets.
        assignment: from :func:`assign`; made here if it is not given.
        between: see ``MoonViT.encode``.

    Returns:
        ``[len(wanted[rank]), D]``, in the order wanted.

    Raises:
        ImageError: grids that are refused, or patches that do not fit them.
    """
    check_batch(patches, clips, encoder.vit)
    if not clips:
        return patches.new_zeros(0, encoder.projector.linear_fc2.output_size, dtype=encoder.config.params_dtype)
    layout = Layout(clips, (assignment or assign(encoder, clips, group.size())).owners, group.size())
    part = Split(layout, group)
    rows = torch.from_numpy(layout.patch_rows(group.rank())).to(patches.device)
    return part.deliver(encoder.encode_packed(patches[rows], part, between), [np.asarray(rows) for rows in wanted])
