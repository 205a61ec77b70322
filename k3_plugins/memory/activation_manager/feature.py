"""Feature `activation-manager`: a storage policy for every tensor that is saved for the backward pass."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from k3_plugins.feature import FeatureError, Witness
from k3_plugins.memory.activation_manager import training
from k3_plugins.memory.activation_manager.config import ActivationManagerConfig
from k3_plugins.memory.activation_manager.record import check_folder
from k3_plugins.memory.activation_manager.rules import parse_rules
from k3_plugins.patching import Patch, PatchKind

MIB = 1 << 20


def _on(value: Any) -> bool:
    return bool(value) and value != "none"


REFUSED: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (
        "gradient_accumulation_fusion",
        "saved-tensor hooks give its weight-gradient kernel a weight without main_grad; pass"
        " --no-gradient-accumulation-fusion",
        _on,
    ),
    ("cpu_offloading_num_layers", "it offloads saved tensors itself; drop it and write cpu policies", _on),
    ("fine_grained_activation_offloading", "it offloads saved tensors itself; drop it and write cpu policies", _on),
    ("cuda_graph_impl", "a graph reads its activations at fixed addresses; drop it", _on),
    ("enable_cuda_graph", "a graph reads its activations at fixed addresses; drop it", _on),
    ("external_cuda_graph", "a graph reads its activations at fixed addresses; drop it", _on),
    (
        "overlap_moe_expert_parallel_comm",
        "it runs the parts of two micro-batches' layers in turn, and a saved tensor would not know its layer; drop it",
        _on,
    ),
    ("distribute_saved_activations", "it replaces the memory of saved tensors; drop it", _on),
    ("use_megatron_fsdp", "its parameters are not recognised by their storage; drop it", _on),
    ("use_torch_fsdp2", "its parameters are not recognised by their storage; drop it", _on),
    ("fp8", "Transformer Engine saves quantized tensors, which are not plain memory; drop it", _on),
    ("fp4", "Transformer Engine saves quantized tensors, which are not plain memory; drop it", _on),
)
"""(field of Megatron's arguments, why and what to do, when)"""

TYPED = {
    "gradient_accumulation_fusion": "Megatron's fused gradient accumulation",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
}
"""Where the flag is not the field's name."""


class ActivationManagerFeature:
    """See the module docstring."""

    name = "activation-manager"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = ActivationManagerConfig
    changes_parameters = False

    def patches(self) -> Sequence[Patch]:
        """Where the model is complete, where a step fails, and the metrics."""
        return (
            Patch(
                id="activation-manager.attach",
                target="megatron.core.optimizer:get_megatron_optimizer",
                kind=PatchKind.WRAP,
                implementation=training.attach_before_optimizer,
                feature=self.name,
                reason="pre_wrap_hooks belong to the model config that the user's script makes; this is the first call"
                " that gets every chunk of the model in training",
                remove_when="pretrain calls a hook with the model it built",
            ),
            Patch(
                id="activation-manager.failure",
                target="megatron.training.training:train_step",
                kind=PatchKind.WRAP,
                implementation=training.explain_failures,
                feature=self.name,
                reason="a rank whose lender died fails in the collective it is in; nothing else sees that exception",
                remove_when="train calls a hook with the exception that ends it",
            ),
            Patch(
                id="activation-manager.metrics",
                target="megatron.training.training:training_log",
                kind=PatchKind.WRAP,
                implementation=training.write_metrics,
                feature=self.name,
                reason="training_log writes a fixed set of scalars; other ones have no seam",
                remove_when="training_log accepts additional scalars",
            ),
        )

    def validate(self, args: Namespace, config: ActivationManagerConfig) -> None:
        """Read the rules, and refuse what stores or moves activations in another way."""
        if config.activation_policy is None:
            raise FeatureError(
                "activation-manager needs rules: give for example --activation-policy 'attention.*=fp8+cpu', or drop it"
                " from --k3-plugins"
            )
        rules = parse_rules(config.activation_policy)
        if any(rule.policy.place == "remote" for rule in rules):
            self._check_remote(args, config)
        if config.activation_min_bytes < 0:
            raise FeatureError(f"--activation-min-bytes {config.activation_min_bytes} must be at least 0")
        if config.activation_host_pool_mib is not None and not config.activation_host_pool_mib > 0:
            raise FeatureError(f"--activation-host-pool-mib {config.activation_host_pool_mib} must be more than 0")
        if config.activation_report is not None:
            check_folder(config.activation_report)
        for field, advice, refused in REFUSED:
            if refused(getattr(args, field)):
                flag = TYPED.get(field, f"--{field.replace('_', '-')}")
                raise FeatureError(f"{flag} cannot be combined with activation-manager: {advice}")

    def _check_remote(self, args: Namespace, config: ActivationManagerConfig) -> None:
        from k3_plugins.memory.remote.engine import load

        if args.pipeline_model_parallel_size < 2:
            raise FeatureError(
                f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}: policy remote levels the memory"
                " of pipeline ranks and needs at least 2; write cpu"
            )
        if not 5 <= config.activation_remote_timeout <= 10:
            raise FeatureError(
                f"--activation-remote-timeout {config.activation_remote_timeout} must be 5 to 10 seconds: Mooncake's"
                " shortest, and what still ends every rank soon"
            )
        if not 0 <= config.activation_remote_headroom <= 10:
            raise FeatureError(f"--activation-remote-headroom {config.activation_remote_headroom} must be 0 to 10")
        load()

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Every chunk's passes were recorded, every rule matched something on some rank, and nothing is left over."""
        manager = training.RUNTIME.manager
        if manager is None:
            return Witness("not attached to the model", ok=False)
        idle = training.idle_rules(manager)  # a collective: on every rank
        totals = manager.bytes_by_policy()
        stored = ", ".join(f"{policy} {totals[policy] / MIB:.2f} MiB" for policy in sorted(totals))
        left = manager.pool.used
        problems = [training.explain_idle(rule) for rule in idle]
        if left:
            problems.append(f"{left} bytes of host buffers were not given back after the step")
        unrecorded = [i for i in range(len(model_chunks)) if not manager.rows.get(i)]
        if unrecorded:
            problems.append(f"no forward pass of model chunks {unrecorded} was recorded")
        peak = manager.ledger.peak
        details = {
            "bytes_by_policy": totals,
            "peak_device_bytes": peak,
            "peak_host_bytes": manager.pool.peak,
            "passes": manager.passes,
            "hits": dict(zip(map(str, manager.rules.rules), manager.rules.hits, strict=True)),
        }
        lending = training.start_lending(manager, args)  # another one
        summary = (
            f"per micro-batch: {stored}; peak on the device {peak / MIB:.2f} MiB, host buffers"
            f" {manager.pool.peak / MIB:.2f} MiB{f'; {lending.describe()}' if lending else ''}"
        )
        return Witness("; ".join(problems) or summary, ok=not problems, details=details)


FEATURE = ActivationManagerFeature()
