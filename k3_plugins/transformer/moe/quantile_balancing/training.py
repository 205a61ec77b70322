"""Hooks into Megatron's training loop: the bias update after the optimizer step, and the metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

IMBALANCE = "k3/qb-load-imbalance"
SPREAD = "k3/qb-bias-spread"


def wrap_train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for megatron.training.training:train_step: a batch is never routed by a bias computed from itself."""

    @functools.wraps(original)
    def train_step(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from k3_plugins.transformer.moe.quantile_balancing.router import clear, routers_of, update

        result = original(forward_step_func, data_iterator, model, *args, **kwargs)
        skipped = result[1]
        (clear if skipped else update)(routers_of(model))
        RUNTIME.routers = routers_of(model)
        return result

    return train_step


class _Runtime:
    """The routers of the model in training, for the metrics."""

    routers: list[Any] = []


RUNTIME = _Runtime()


def wrap_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for megatron.training.training:training_log: the worst layer of this pipeline stage."""

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
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    metrics = [router.last_metrics for router in RUNTIME.routers if router.last_metrics is not None]
    if not metrics or (tensorboard is None and wandb is None):
        return
    worst = {IMBALANCE: max(float(m[0]) for m in metrics), SPREAD: max(float(m[1]) for m in metrics)}
    for name, value in worst.items():
        if tensorboard is not None:
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(worst, iteration)
