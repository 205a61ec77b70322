"""Hooks into Megatron's set-up and training loop. Imports neither torch nor megatron."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

METRICS = {
    "k3/zero2-device-gradient-bytes": "device_bytes",
    "k3/zero2-host-gradient-bytes": "host_bytes",
    "k3/zero2-reduce-scatter-bytes": "reduced_bytes",
}


def attach_to_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for `get_megatron_optimizer`."""

    @functools.wraps(original)
    def get_megatron_optimizer(config: Any, model_chunks: list[Any], *arguments: Any, **keywords: Any) -> Any:
        from k3_plugins import activation
        from k3_plugins.distributed.pipeline_zero2.attach import CURRENT, attach

        optimizer = original(config, model_chunks, *arguments, **keywords)
        CURRENT[:] = [attach(model_chunks, optimizer, activation.current().config("pipeline-zero2"))]
        return optimizer

    return get_megatron_optimizer


def write_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for `training_log`: the bytes of the rank that writes."""

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

    from k3_plugins.distributed.pipeline_zero2.attach import CURRENT

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if iteration % get_args().tensorboard_log_interval or not CURRENT or (tensorboard is None and wandb is None):
        return
    report = CURRENT[0].report()
    values = {name: getattr(report, field) for name, field in METRICS.items()}
    for name, value in values.items():
        if tensorboard is not None:
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(values, iteration)
