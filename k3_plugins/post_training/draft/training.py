"""Megatron's hooks for training a draft: a micro-batch through target and draft, and the loss over its steps.

Letters: b micro-batch, s sequence, K steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from megatron.training import get_args, get_timers
from torch import Tensor

from k3_plugins.failure import fail
from k3_plugins.post_training.draft.model import fingerprint
from k3_plugins.training.forward_step import get_batch


class Watch:
    """Holds the target to its word: what is frozen has the same bits at the end as before the first step."""

    def __init__(self) -> None:
        self.model: Any = None
        self.marks: dict[str, tuple[int, int]] = {}

    def start(self, model: Any) -> None:
        """Called before every micro-batch; the first one is remembered."""
        if self.model is None:
            (self.model,) = unwrap_model([model])
            self.marks = fingerprint(self.model)

    def end(self) -> str | None:
        """A line for the log; ends all ranks if a bit of the target has moved. None if nothing was trained."""
        if self.model is None:
            return None
        after = fingerprint(self.model)
        moved = sorted(name for name in after if after[name] != self.marks.get(name))
        if moved:
            fail(f"the target changed while its draft was trained: {', '.join(moved[:5])} ({len(moved)} tensors)")
        return f"draft: the target's {len(after)} tensors are unchanged"


def forward_step(watch: Watch, data_iterator: Iterator, model: Any) -> tuple[Tensor, partial]:
    """Megatron's ``forward_step_func``: ``[2, K, b, s]`` of the model, and the loss over it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator)
    timers("batch-generator").stop()
    watch.start(model)
    return model(batch["tokens"], batch["position_ids"], batch["attention_mask"]), partial(
        loss_func, batch["loss_mask"]
    )


def loss_func(loss_mask: Tensor | None, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum over steps and positions, their number, and the log: ``lk loss`` and ``acceptance k``.

    Args:
        loss_mask: ``[b, s]``, 1 where the target's prediction counts.
        output: ``[2, K, b, s]`` of `model.DraftGPTModel`.
    """
    assert loss_mask is not None, "the draft has one stage, which has the mask"
    losses, acceptance = output.float()
    mask = torch.zeros_like(losses)
    for step in range(1, len(losses) + 1):
        mask[step - 1, :, :-step] = loss_mask[:, step:].float()
    loss = (losses * mask).sum()
    counts = mask.sum((1, 2))
    tokens = counts.sum().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad and not torch.isfinite(loss):
        raise RuntimeError("the draft's loss is not finite")
    accepted = (acceptance * mask).sum((1, 2))
    log = {"lk loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}
    log |= {f"acceptance {k + 1}": torch.stack([accepted[k], counts[k]]) for k in range(len(losses))}
    return loss, tokens, log
