"""Feature `pipeline-zero2`: gradients of two model chunks on the device, the shards of all in host memory."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.distributed.pipeline_zero2 import training
from k3_plugins.distributed.pipeline_zero2.buffers import without_gradient_memory
from k3_plugins.distributed.pipeline_zero2.clip import clip_with_host_gradients, norm_with_host_gradients
from k3_plugins.distributed.pipeline_zero2.config import PipelineZeRO2Config
from k3_plugins.distributed.pipeline_zero2.validate import check
from k3_plugins.feature import Backend, Witness
from k3_plugins.patching import Patch, PatchKind

MIB = 1 << 20


class PipelineZeRO2Feature:
    """See the module docstring."""

    name = "pipeline-zero2"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = PipelineZeRO2Config
    changes_parameters = False  # checkpoints are the distributed optimizer's

    def patches(self) -> Sequence[Patch]:
        """The memory, the optimizer, clipping in host memory, the metrics."""
        return (
            Patch(
                id="pipeline-zero2.buffers",
                target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__",
                kind=PatchKind.WRAP,
                implementation=without_gradient_memory,
                feature=self.name,
                reason="DistributedDataParallel allocates a full gradient buffer for every chunk when it wraps it, and "
                "takes no buffer class or allocator",
                remove_when="DistributedDataParallel can be built without gradient memory",
            ),
            Patch(
                id="pipeline-zero2.attach",
                target="megatron.core.optimizer:get_megatron_optimizer",
                kind=PatchKind.WRAP,
                implementation=training.attach_to_optimizer,
                feature=self.name,
                reason="the wrapped chunks and their optimizer are first seen together here; post_wrap_hooks run "
                "before there is an optimizer",
                remove_when="setup_model_and_optimizer calls a hook with the model and its optimizer",
            ),
            Patch(
                id="pipeline-zero2.norm",
                target="megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
                kind=PatchKind.WRAP,
                implementation=norm_with_host_gradients,
                feature=self.name,
                reason="the kernels behind it take CUDA tensors; with --zero2-optimizer-device cpu gradients lie in "
                "host memory",
                remove_when="gradient norms of tensors in host memory are supported",
            ),
            Patch(
                id="pipeline-zero2.clip",
                target="megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
                kind=PatchKind.WRAP,
                implementation=clip_with_host_gradients,
                feature=self.name,
                reason="it asserts CUDA gradients; with --zero2-optimizer-device cpu they lie in host memory",
                remove_when="clipping of tensors in host memory is supported",
            ),
            Patch(
                id="pipeline-zero2.metrics",
                target="megatron.training.training:training_log",
                kind=PatchKind.WRAP,
                implementation=training.write_metrics,
                feature=self.name,
                reason="training_log writes a fixed set of scalars; other ones have no seam",
                remove_when="training_log accepts additional scalars",
            ),
        )

    def validate(self, args: Namespace, config: PipelineZeRO2Config) -> None:
        """Refuse what cannot be combined (see `validate.py`)."""
        check(args, config)

    def backends(self, config: PipelineZeRO2Config) -> Sequence[Backend]:
        """Where and with what the optimizer steps."""
        on_cpu = config.zero2_optimizer_device == "cpu"
        chosen = config.zero2_cpu_adam if on_cpu else "device"
        why = {
            "device": "Megatron's optimizer on shards copied to the device",
            "torch": "torch's fused AdamW in host memory: --zero2-optimizer-device cpu",
            "deepspeed": "DeepSpeed's CPUAdam: --zero2-optimizer-device cpu --zero2-cpu-adam deepspeed",
        }
        return [Backend(name, name == chosen, text) for name, text in why.items()]

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Every chunk counted every micro-batch, and its DDP buffers hold no gradient memory."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        from k3_plugins.distributed.pipeline_zero2.attach import CURRENT

        if not CURRENT:
            return Witness("not attached to the optimizer", ok=False)
        zero2, expected = CURRENT[0], get_num_microbatches()
        report = zero2.report()
        held = sum(
            buffer.grad_data.untyped_storage().nbytes()
            for chunk in zero2.chunks
            for buffer in [*chunk.ddp.buffers, *chunk.ddp.expert_parallel_buffers]
        )
        ok = len(zero2.chunks) == len(model_chunks) and set(report.micro_batches) == {expected} and held == 0
        return Witness(
            summary=f"device gradients {report.device_bytes / MIB:.1f} MiB in {len(zero2.pool.slots)} buffers (full: "
            f"{report.stock_device_bytes / MIB:.1f} MiB), host shards {report.host_bytes / MIB:.1f} MiB, "
            f"{sum(report.reductions)} reduce-scatters of {len(zero2.chunks)} chunks, micro-batches "
            f"{sorted(set(report.micro_batches))} of {expected}",
            ok=ok,
            details={
                "device_bytes": report.device_bytes,
                "stock_device_bytes": report.stock_device_bytes,
                "host_bytes": report.host_bytes,
                "staging_bytes": report.staging_bytes,
                "reductions": list(report.reductions),
                "micro_batches": list(report.micro_batches),
                "left_in_ddp_buffers": held,
            },
        )


FEATURE = PipelineZeRO2Feature()
