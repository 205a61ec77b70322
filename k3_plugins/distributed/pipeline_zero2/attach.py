"""Puts the pieces on a model and its optimizer.

zero2 = attach(model_chunks, optimizer, PipelineZeRO2Config())      # after get_megatron_optimizer
zero2.report()                                                      # bytes and reductions of the last step

`CURRENT` is what the feature attached in this process, for its witness and its metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import get_model_config

from k3_plugins.distributed.pipeline_zero2.chunk import ChunkGradients
from k3_plugins.distributed.pipeline_zero2.config import PipelineZeRO2Config
from k3_plugins.distributed.pipeline_zero2.host_step import move_to_host
from k3_plugins.distributed.pipeline_zero2.optimizer import ShardedGradients, distributed_optimizers
from k3_plugins.distributed.pipeline_zero2.slots import SlotPool
from k3_plugins.feature import FeatureError

SLOTS = 2


@dataclass(frozen=True)
class Report:
    """Bytes by storages, on this rank; reductions of the step that ended last."""

    device_bytes: int
    """Gradient slots, at any time."""
    stock_device_bytes: int
    """What Megatron's full gradient buffers take."""
    host_bytes: int
    """Gradient shards."""
    staging_bytes: int
    """Host memory through which shards leave the device."""
    reduced_bytes: int
    """Gradients that went into reduce-scatters (this rank's input)."""
    reductions: tuple[int, ...]
    """Reduce-scatters of each chunk."""
    micro_batches: tuple[int, ...]
    """Micro-batches that each chunk counted."""
    borrowed_beyond: int
    """Bytes of device shards of the optimizer step that did not fit into the slots."""


class PipelineZeRO2:
    """The gradients of all chunks of this rank."""

    def __init__(self, chunks: list[ChunkGradients], pool: SlotPool):
        self.chunks = chunks
        self.pool = pool

    def add(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """See `ChunkGradients.add`; all parameters belong to one chunk."""
        (chunk,) = {chunk for chunk in self.chunks for param in gradients if chunk.holds(param)}
        chunk.add(gradients)

    def report(self) -> Report:
        """See Report."""
        return Report(
            device_bytes=self.pool.device_bytes,
            stock_device_bytes=sum(chunk.gradient_bytes for chunk in self.chunks),
            host_bytes=sum(chunk.host.untyped_storage().nbytes() for chunk in self.chunks),
            staging_bytes=self.pool.staging_bytes,
            reduced_bytes=sum(chunk.reductions * chunk.gradient_bytes for chunk in self.chunks),
            reductions=tuple(chunk.reductions for chunk in self.chunks),
            micro_batches=tuple(chunk.count for chunk in self.chunks),
            borrowed_beyond=self.pool.borrowed_beyond,
        )


CURRENT: list[PipelineZeRO2] = []
"""The one that the training loop uses, once it is attached."""


def attach(model_chunks: Sequence[Any], optimizer: Any, config: PipelineZeRO2Config) -> PipelineZeRO2:
    """Replace the chunks' full gradient buffers by slots and host shards, and let the optimizer step from those.

    Args:
        model_chunks: in Megatron's DistributedDataParallel, with the distributed optimizer's buffers.
        optimizer: what `get_megatron_optimizer` made for them.

    Raises:
        FeatureError: if the optimizer is of another kind.
    """
    parts = distributed_optimizers(optimizer)
    group = config.zero2_group
    if group is None and len(model_chunks) > SLOTS:
        group = get_model_config(model_chunks[0]).microbatch_group_size_per_vp_stage
    for ddp in model_chunks:
        if not ddp.ddp_config.use_distributed_optimizer:
            raise FeatureError("pipeline-zero2 needs the distributed optimizer: pass --use-distributed-optimizer")
        # The groups are reduced beside the next chunk's backward; Megatron's own overlap would start a reduction of
        # its own in the middle of the last micro-batch.
        ddp.ddp_config.overlap_grad_reduce = False
    chunks = [ChunkGradients(ddp, group) for ddp in model_chunks]
    pool = SlotPool(chunks, SLOTS)
    for chunk in chunks:
        chunk.attach(pool)
    on_host = config.zero2_optimizer_device == "cpu"
    for part in parts:
        ShardedGradients(part, chunks, None if on_host else pool)
        if on_host:
            move_to_host(part, config.zero2_cpu_adam, [chunk.host for chunk in chunks])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of the buffers that existed while each chunk was wrapped
    return PipelineZeRO2(chunks, pool)
