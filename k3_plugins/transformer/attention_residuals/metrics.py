"""`k3/attnres-entropy` through Megatron's writers, and the FLOPs of the aggregations in its throughput figure."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from k3_plugins.transformer.attention_residuals.config import forward_flops_per_token

METRIC = "k3/attnres-entropy"
_FORWARD_AND_BACKWARD = 3


def wrap_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for megatron.training.training:training_log; called on every rank after every step."""

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

    from k3_plugins.transformer.attention_residuals.runtime import RUNTIME

    if iteration % get_args().tensorboard_log_interval:
        return
    RUNTIME.publish_source_weights()
    entropy = RUNTIME.mean_relative_entropy()
    if entropy is None:
        return
    if (writer := get_tensorboard_writer()) is not None:
        writer.add_scalar(METRIC, entropy, iteration)
    if (wandb := get_wandb_writer()) is not None:
        wandb.log({METRIC: entropy}, iteration)


def correct_flops(count: Callable[..., float]) -> Callable[..., float]:
    """Wrap Megatron's `num_floating_point_operations`: the aggregations are added, forward and backward."""

    @functools.wraps(count)
    def num_floating_point_operations(
        args: Namespace,
        batch_size: int,
        seqlen_squared_sum_in_batch: float | None = None,
        total_real_tokens_in_batch: float | None = None,
    ) -> float:
        from k3_plugins.activation import current

        stock = count(args, batch_size, seqlen_squared_sum_in_batch, total_real_tokens_in_batch)
        tokens = total_real_tokens_in_batch
        if tokens is None:
            tokens = batch_size * args.seq_length
        block_size = current().config("attnres").attn_res_block_size
        per_token = forward_flops_per_token(args.num_layers, block_size, args.hidden_size)
        return stock + _FORWARD_AND_BACKWARD * per_token * tokens

    return num_floating_point_operations
