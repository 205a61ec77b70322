"""A row of images and text under context parallelism: every rank reads the row, and trains on its slice.

The sequence is cut as Megatron cuts text, in zigzag: rank i of G has slices i and 2G-1-i of 2G. The encoder's work is
divided by feature ``dynamic-cp``; without it every rank encodes all images and takes its tokens.

Letters: G context-parallel ranks, s sequence, M image tokens of the row, d width of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args
from numpy.typing import NDArray
from torch import Tensor

from k3_plugins.training.forward_step import loss_func
from k3_plugins.vision.moonvit.encoder import Between, MoonViT
from k3_plugins.vision.moonvit.geometry import Clip, ImageError

_SEQUENCES = ("tokens", "labels", "loss_mask", "position_ids")
_READ_BY_THE_HOST = ("clips", "image_positions", "row")


def on_device(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """A row with its tensors on the device, but for what the host reads: that would wait for all kernels before it."""
    return {key: value if key in _READ_BY_THE_HOST else value.cuda(non_blocking=True) for key, value in row.items()}


def places(image_positions: Sequence[int], seq_length: int, size: int) -> list[tuple[NDArray, NDArray]]:
    """By rank: which image tokens lie in its slice, and where there.

    Args:
        image_positions: of the M tokens in the row.
        size: G; 2G divides the length of the sequence (Megatron checks).

    Returns:
        numbers of tokens, ascending, and places in ``[0, s/G)``.
    """
    positions = np.asarray(image_positions, dtype=np.int64)
    if size == 1:
        return [(np.arange(len(positions)), positions)]
    length = seq_length // (2 * size)
    piece, within = positions // length, positions % length
    found = []
    for rank in range(size):
        mine = np.flatnonzero((piece == rank) | (piece == 2 * size - 1 - rank))
        found.append((mine, within[mine] + np.where(piece[mine] == rank, 0, length)))
    return found


def cut(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sequences of a row, ``[1, s]`` to ``[1, s/G]``; everything else as it was."""
    group = mpu.get_context_parallel_group()
    sequences = {key: row[key] for key in _SEQUENCES} | {"cu_seqlens": None}
    sequences = get_batch_on_this_cp_rank(sequences, is_hybrid_cp=False, cp_group=group)
    return {**row, **{key: sequences[key] for key in _SEQUENCES}}


def encode_images(encoder: MoonViT, row: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The image tokens in this rank's slice of the sequence; with ``dynamic-cp`` collective over the slices' ranks.

    Args:
        row: from :func:`on_device`, with a dimension of 1 in front, not cut; with ``images`` ``[m, d]`` if they are
            encoded already.

    Returns:
        tokens ``[m, d]`` and their places ``[m]`` in the slice.

    Raises:
        ImageError: the row has more or fewer places for image tokens than its images make.
    """
    clips = [Clip(*clip) for clip in row["clips"][0].tolist()]
    positions = row["image_positions"][0].tolist()
    needed = sum(clip.tokens for clip in clips)
    if len(positions) != needed:
        raise ImageError(f"a row has {len(positions)} places for image tokens, and its images make {needed}")
    group = mpu.get_context_parallel_group()
    found = places(positions, row["position_ids"].shape[1], group.size())
    images = row.get("images")
    if images is None:
        images = encode_slice(encoder, row["patches"][0], clips, [wanted for wanted, _ in found])
    return images, torch.from_numpy(found[group.rank()][1]).to(row["position_ids"].device)


def encode_slice(
    encoder: MoonViT, patches: Tensor, clips: Sequence[Clip], wanted: Sequence[NDArray], between: Between | None = None
) -> Tensor:
    """Encode images and take this rank's tokens; with ``dynamic-cp`` collective over the slices' ranks.

    Args:
        patches: ``[N, 3*P*P]``, all of them.
        wanted: by rank, the numbers of its tokens; the first of each pair of :func:`places`.
        between: see ``MoonViT.encode``.

    Returns:
        ``[m, d]``.
    """
    from k3_plugins.activation import current

    group = mpu.get_context_parallel_group()
    if group.size() == 1:
        return encoder(patches, clips, between)
    activation = current()
    if activation is None or "dynamic-cp" not in activation.names:
        return encoder(patches, clips, between)[torch.from_numpy(wanted[group.rank()]).to(patches.device)]
    from k3_plugins.vision.dynamic_cp.encode import assign, encode
    from k3_plugins.vision.dynamic_cp.loads import SO_FAR

    assignment = assign(encoder, clips, group.size(), activation.configs["dynamic-cp"].dynamic_cp_imbalance)
    if clips:
        SO_FAR.add(assignment)
    return encode(encoder, patches, clips, group, wanted, assignment, between)


def loss_of(loss_mask: Tensor | None, model: GPTModel) -> partial:
    """The loss function of a slice: summed over ranks it is that of the whole row, however its text is spread."""
    return partial(_loss, loss_mask, model=model)


def _loss(loss_mask: Tensor | None, losses: Tensor, model: GPTModel | None = None) -> tuple[Tensor, Tensor, dict]:
    loss, tokens, report = loss_func(loss_mask, losses, model=model)
    group = mpu.get_context_parallel_group()
    if group.size() > 1 and not get_args().calculate_per_token_loss:
        # Megatron divides by this rank's tokens and averages over ranks, as if all had equally many.
        total = tokens.clone()
        torch.distributed.all_reduce(total, group=group)
        loss = loss * (tokens.clamp(min=1) * group.size() / total.clamp(min=1))
    return loss, tokens, report
