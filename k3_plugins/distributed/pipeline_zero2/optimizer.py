"""Megatron's distributed optimizer on gradient shards that lie in host memory.

'device': each step the shards are copied into the idle gradient slots, and the optimizer, AdamW or a subclass with an
inner optimizer of its own, steps, clips and counts as it always does. 'cpu': see `host_step.py`. Either way the state
is the distributed optimizer's, so checkpoints are the same as without the feature.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from k3_plugins.distributed.pipeline_zero2.chunk import ChunkGradients, Shard
from k3_plugins.distributed.pipeline_zero2.slots import SlotPool
from k3_plugins.feature import FeatureError


def distributed_optimizers(optimizer: Any) -> list[DistributedOptimizer]:
    """The parts of Megatron's optimizer, one for dense and one for expert parameters.

    Raises:
        FeatureError: if a part does not shard its state the way the gradients are sharded.
    """
    parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    others = [type(part).__name__ for part in parts if not isinstance(part, DistributedOptimizer)]
    if others:
        raise FeatureError(
            f"pipeline-zero2 works with Megatron's DistributedOptimizer; --optimizer built {', '.join(others)}. Pass "
            "--optimizer adam, or drop pipeline-zero2 from --k3-plugins"
        )
    return parts


class ShardedGradients:
    """Hands the chunks' shards to one optimizer as the gradients of its parameters' shards.

    Args:
        optimizer: a part of Megatron's optimizer.
        chunks: of this rank.
        pool: whose idle slots hold the shards during the step; None leaves them in host memory.
    """

    def __init__(self, optimizer: DistributedOptimizer, chunks: list[ChunkGradients], pool: SlotPool | None):
        self.optimizer = optimizer
        self.chunks = chunks
        self.pool = pool
        if optimizer.is_stub_optimizer:  # every parameter of this rank is frozen
            return
        self._chunk_of = {param: chunk for chunk in chunks for param in chunk.ddp.params_with_grad}
        optimizer._copy_model_grads_to_main_grads = self.hand_over

    @torch.no_grad()
    def hand_over(self) -> None:
        """`_copy_model_grads_to_main_grads`: fp32, `[elements of the parameter on this rank]` each."""
        optimizer = self.optimizer
        for chunk in self.chunks:
            chunk.settle()
        if self.pool is None:
            self._refresh_fp32_masters()
        on_device: dict[Shard, torch.Tensor] = {}
        for models, mains in (
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ):
            for model_group, main_group in zip(models, mains, strict=True):
                for model_param, main_param in zip(model_group, main_group, strict=True):
                    shard = self._chunk_of[model_param].shard_of(model_param)
                    if self.pool is None:
                        gradients = shard.host
                    elif shard in on_device:
                        gradients = on_device[shard]
                    else:
                        gradients = on_device[shard] = self.pool.borrow(shard.host.numel())
                        gradients.copy_(shard.host, non_blocking=True)
                    place = optimizer._get_model_param_range_map(model_param)["gbuf_local"]
                    main_param.grad = gradients[place.start : place.end]

    def _refresh_fp32_masters(self) -> None:
        """Follow what others did to fp32 parameters, which are their own master weights in Megatron.

        A checkpoint loaded without the optimizer changes the parameter only, and Megatron has no reason to tell anyone.
        """
        optimizer = self.optimizer
        for model_group, main_group in zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True):
            for model_param, main_param in zip(model_group, main_group, strict=True):
                place = optimizer._get_model_param_range_map(model_param)["param"]
                main_param.data.copy_(model_param.view(-1)[place.start : place.end])
