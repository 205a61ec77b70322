"""Flags of the feature `pipeline-zero2`. Imports neither torch nor megatron."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PipelineZeRO2Config:
    """Gradients sharded over data-parallel ranks in host memory; the device holds two model chunks' gradients."""

    zero2_group: int | None = None
    """Micro-batches of one model chunk that are accumulated on the device before they are reduce-scattered. By default
    the micro-batches that the interleaved schedule runs in a row (--microbatch-group-size-per-virtual-pipeline-stage)
    where a rank has more than two chunks, and the whole batch otherwise, because the two buffers then hold every
    chunk."""

    zero2_optimizer_device: Literal["device", "cpu"] = "device"
    """Where the optimizer step runs. 'device': the shards are copied into the idle gradient buffers and Megatron's
    optimizer steps as usual. 'cpu': master weights and moments live in host memory too and the step runs there (Adam
    only)."""

    zero2_cpu_adam: Literal["torch", "deepspeed"] = "torch"
    """The AdamW kernel of --zero2-optimizer-device cpu: torch's fused one, or DeepSpeed's CPUAdam (compiled at first
    use)."""
