"""`k3/attnres-entropy` through Megatron's writers, and the FLOPs of the aggregations in its throughput figure."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable

from k3_plugins.training.metrics import logs
from k3_plugins.transformer.attention_residuals.config import forward_flops_per_token

METRIC = "k3/attnres-entropy"
_FORWARD_AND_BACKWARD = 3


def _entropy() -> dict[str, float]:
    """Collective over all ranks; also refreshes the weights that a checkpoint saves."""
    from k3_plugins.transformer.attention_residuals.runtime import RUNTIME

    RUNTIME.publish_source_weights()
    entropy = RUNTIME.mean_relative_entropy()
    return {} if entropy is None else {METRIC: entropy}


wrap_training_log = logs(_entropy, on_every_rank=True)


def correct_flops(count: Callable[..., float]) -> Callable[..., float]:
    """Wrap Megatron's `num_floating_point_operations`: the aggregations are added, forward and backward."""

    @functools.wraps(count)
    def num_floating_point_operations(
        args: Namespace,
        batch_size: int,
        seqlen_squared_sum_in_batch: float | None = None,
        total_real_tokens_in_batch: float | None = None,
    ) -> float:
        from k3_plugins.activation import active

        stock = count(args, batch_size, seqlen_squared_sum_in_batch, total_real_tokens_in_batch)
        tokens = total_real_tokens_in_batch
        if tokens is None:
            tokens = batch_size * args.seq_length
        block_size = active().config("attnres").attn_res_block_size
        per_token = forward_flops_per_token(args.num_layers, block_size, args.hidden_size)
        return stock + _FORWARD_AND_BACKWARD * per_token * tokens

    return num_floating_point_operations
