"""Hook into Megatron's training: the metric."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from k3_plugins.optimizer.per_head_muon.runtime import OPTIMIZERS

WAITED_MS = "k3/muon-p2p-ms"


def wrap_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for megatron.training.training:training_log: how long the last steps waited for pieces."""

    @functools.wraps(original)
    def training_log(
        loss_dict: dict, total_loss_dict: dict, learning_rate: float | None, iteration: int, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
        _write(iteration)
        return result

    return training_log


def _write(iteration: int) -> None:
    from megatron.training import get_args
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    if iteration % get_args().tensorboard_log_interval:
        return
    # On every rank: what was measured would pile up where nobody writes.
    waited = sum(optimizer.exchange.take_waited_ms() for optimizer in OPTIMIZERS)
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if not OPTIMIZERS:
        return
    if tensorboard is not None:
        tensorboard.add_scalar(WAITED_MS, waited, iteration)
    if wandb is not None:
        wandb.log({WAITED_MS: waited}, iteration)
