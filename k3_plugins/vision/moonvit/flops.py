"""FLOPs of the vision encoder in Megatron's throughput figure, which knows nothing of images.

Megatron's convention: 2 per multiply-add, times 3 for forward, data gradient and weight gradient; 1 for an encoder that
is not trained. Images differ in size, so the images of each step are counted, not an average.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from k3_plugins.vision.moonvit.config import MoonViTConfig

if TYPE_CHECKING:
    from k3_plugins.vision.moonvit.geometry import Clip

FORWARD_BACKWARD = 3
FMA = 2
MERGE = 2
CHANNELS = 3


def forward_flops(vit: MoonViTConfig, text_width: int, clips: Sequence[Clip]) -> int:
    """Of the encoder and its projector, all tensor-parallel ranks together.

    Args:
        text_width: hidden size of the language model.
        clips: grids of the images and videos, in patches.
    """
    d, inner = vit.moonvit_hidden_size, vit.moonvit_num_heads * vit.moonvit_head_dim
    attention, mlp = 4 * d * inner, 2 * d * vit.moonvit_ffn_size  # q, k, v and output; both matrices
    token = MERGE**2 * d
    projector = token * token + token * text_width
    total = 0
    for t, h, w in clips:
        patches = t * h * w
        block = attention + mlp + 2 * inner * h * w  # scores and weighted sum over a frame
        if t > 1:
            block += attention + 2 * inner * t
        embedding = CHANNELS * vit.moonvit_patch_size**2 * d
        total += patches * (embedding + vit.moonvit_num_layers * block) + h * w // MERGE**2 * projector
    return FMA * total


class StepFlops:
    """What the encoder computes in a training step, over all ranks.

    Megatron asks after every step, and once more where it writes a line of its log: that line's time is the mean of the
    steps since the line before, so its FLOPs are their mean, too.
    """

    def __init__(self) -> None:
        self._mine = 0.0
        self._step: int | None = None
        self._steps: list[float] = []
        self._logged = False

    def add(self, vit: MoonViTConfig, text_width: int, clips: Sequence[Clip], trained: bool) -> None:
        """One micro-batch that this rank's first stage trains on."""
        self._mine += (FORWARD_BACKWARD if trained else 1) * forward_flops(vit, text_width, clips)

    def total(self, step: int) -> float:
        """Of the step that has just ended; asked again, the mean of the steps since that was done before.

        The first call after a step is collective over all ranks.

        Args:
            step: a number that is new after every step.
        """
        if step == self._step:
            self._logged = True
            return sum(self._steps) / len(self._steps)
        if self._logged:
            self._steps, self._logged = [], False
        self._steps.append(_over_ranks(self._mine))
        self._step, self._mine = step, 0.0
        return self._steps[-1]


STEP = StepFlops()


def _over_ranks(mine: float) -> float:
    """Sum over data-parallel ranks; the tensor- and context-parallel ranks of a first stage hold the same number."""
    import torch
    from megatron.core import mpu

    total = torch.tensor(mine, dtype=torch.float64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(total)
    copies = mpu.get_tensor_model_parallel_world_size() * mpu.get_context_parallel_world_size()
    return float(total) / copies


def add_encoder_flops(count: Callable[..., float]) -> Callable[..., float]:
    """Wrap Megatron's ``num_floating_point_operations``, which every rank calls after every step."""

    @functools.wraps(count)
    def num_floating_point_operations(
        args: Namespace,
        batch_size: int,
        seqlen_squared_sum_in_batch: float | None = None,
        total_real_tokens_in_batch: float | None = None,
    ) -> float:
        text = count(args, batch_size, seqlen_squared_sum_in_batch, total_real_tokens_in_batch)
        return text + STEP.total(args.consumed_train_samples)

    return num_floating_point_operations
