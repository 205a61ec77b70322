"""What pipeline-zero2 cannot be combined with, by flag. Imports neither torch nor megatron."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k3_plugins.distributed.pipeline_zero2.config import PipelineZeRO2Config
from k3_plugins.feature import FeatureError


def _on(value: Any) -> bool:
    return bool(value)


def _more_than_one(value: Any) -> bool:
    return value is not None and value > 1


def _graphs(value: Any) -> bool:
    return value not in (None, "none")


@dataclass(frozen=True)
class Refusal:
    """A flag that is refused."""

    field: str
    """Its name in Megatron's argument namespace."""
    because: str
    refused: Callable[[Any], bool] = _on
    typed: str | None = None
    """The flag, where it is not the field's name."""

    @property
    def flag(self) -> str:
        """As typed."""
        return self.typed or f"--{self.field.replace('_', '-')}"


NO_FULL_BUFFER = "there is no full gradient buffer that it could use"
LATE_GRADIENTS = "its weight gradients come after their micro-batch's backward pass, into another chunk's buffer"

REFUSALS = (
    Refusal("use_megatron_fsdp", "it shards gradients in its own way"),
    Refusal("use_torch_fsdp2", "it shards gradients in its own way"),
    Refusal("use_precision_aware_optimizer", "it reads gradients from the device in its own precision"),
    Refusal("optimizer_cpu_offload", "--zero2-optimizer-device cpu takes its place"),
    Refusal("overlap_param_gather_with_optimizer_step", "it splits the optimizer by chunk"),
    Refusal("num_distributed_optimizer_instances", "its second reduction has not been verified here", _more_than_one),
    Refusal("delay_wgrad_compute", LATE_GRADIENTS),
    Refusal("defer_embedding_wgrad_compute", LATE_GRADIENTS),
    Refusal("overlap_dispatch_backward_with_experts_wgrad", LATE_GRADIENTS),
    Refusal("overlap_moe_expert_parallel_comm", "its combined forward-backward pass mixes two micro-batches"),
    Refusal("cuda_graph_impl", "a graph would keep writing to the addresses of one buffer", _graphs),
    Refusal("enable_cuda_graph", "a graph would keep writing to the addresses of one buffer"),
    Refusal("external_cuda_graph", "a graph would keep writing to the addresses of one buffer"),
    Refusal("optimizer_cuda_graph", "the graph would keep reading the addresses of one buffer"),
    Refusal("tensor_parallel_num_weight_shards", "its gradients finish outside the backward pass"),
    Refusal("expert_tensor_parallel_num_weight_shards", "its gradients finish outside the backward pass"),
    Refusal("fp8_param_gather", "quantized parameters may share memory with their gradients"),
    Refusal("fp4_param_gather", "quantized parameters may share memory with their gradients"),
    Refusal("reuse_grad_buf_for_mxfp8_param_ag", NO_FULL_BUFFER),
    Refusal("nccl_ub", NO_FULL_BUFFER, typed="--use-nccl-ub"),
    Refusal("save_wgrads_interval", NO_FULL_BUFFER),
    Refusal("perform_rl_step", "it moves the full gradient buffers in and out"),
    Refusal("ddp_param_name_patterns_for_fp32_local_accumulation", "it keeps full gradients of the named parameters"),
    Refusal("freeze_all_layers", "there are no gradients"),
)


def check(args: Namespace, config: PipelineZeRO2Config) -> None:
    """Refuse what cannot work, before Megatron validates its arguments.

    Raises:
        FeatureError: naming the flag and what to do.
    """
    if not args.use_distributed_optimizer:
        raise FeatureError(
            "pipeline-zero2 shards gradients as the distributed optimizer shards its state: pass "
            "--use-distributed-optimizer"
        )
    for refusal in REFUSALS:
        if refusal.refused(getattr(args, refusal.field)):
            raise FeatureError(
                f"{refusal.flag} cannot be combined with pipeline-zero2: {refusal.because}. Drop the flag, or drop "
                "pipeline-zero2 from --k3-plugins"
            )
    if config.zero2_group is not None and config.zero2_group < 1:
        raise FeatureError(f"--zero2-group {config.zero2_group} must be at least 1 micro-batch")
    if config.zero2_optimizer_device == "cpu":
        _check_host_step(args)
    elif config.zero2_cpu_adam != "torch":
        raise FeatureError(
            f"--zero2-cpu-adam {config.zero2_cpu_adam} is the kernel of the step on the CPU: add "
            "--zero2-optimizer-device cpu"
        )
    else:
        return
    if config.zero2_cpu_adam == "deepspeed":
        from k3_plugins.compat.optional import require

        require("deepspeed", "--zero2-cpu-adam deepspeed")


def _check_host_step(args: Namespace) -> None:
    from k3_plugins.activation import current

    activation = current()
    if activation is not None and "per-head-muon" in activation.names:
        raise FeatureError(
            "--zero2-optimizer-device cpu steps every parameter with AdamW, not with per-head-muon: pass "
            "--zero2-optimizer-device device, or drop per-head-muon from --k3-plugins"
        )
    if args.optimizer != "adam":
        raise FeatureError(
            f"--zero2-optimizer-device cpu steps with AdamW, not with --optimizer {args.optimizer}: pass "
            "--zero2-optimizer-device device"
        )
    if args.log_params_norm:
        raise FeatureError(
            "--log-params-norm reads the master weights on the device: drop it, or pass --zero2-optimizer-device device"
        )
