"""Feature ``per-head-muon``: Muon head by head, orthogonalised peer to peer on the distributed optimizer.

To Megatron the optimizer is an Adam (``--optimizer adam``): so it is one ``DistributedOptimizer`` over one inner
optimizer, its checkpoints are Adam's, and none of the special cases for other optimizers applies, which clear
``--use-distributed-optimizer``. ``--optimizer muon`` means the same while the feature is on.
"""

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from k3_plugins.feature import FeatureError, Witness
from k3_plugins.optimizer.per_head_muon.config import PerHeadMuonConfig
from k3_plugins.optimizer.per_head_muon.settings import MOONLIGHT
from k3_plugins.optimizer.per_head_muon.training import wrap_training_log
from k3_plugins.patching import Patch, PatchKind

ONE_BUCKET = 2**62
"""Elements of a bucket that every model chunk fits into."""


def _wrap_factory(original: Any) -> Any:
    from k3_plugins.optimizer.per_head_muon.megatron_optimizer import wrap_factory

    return wrap_factory(original)


class PerHeadMuonFeature:
    """See the module docstring."""

    name = "per-head-muon"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = PerHeadMuonConfig
    changes_parameters = False
    changes_optimizer = True  # the other way round, state is compared when it is loaded, parameter by parameter

    def patches(self) -> Sequence[Patch]:
        """The optimizer, and the metric."""
        return (
            Patch(
                id="per-head-muon.optimizer",
                target="megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
                kind=PatchKind.WRAP,
                implementation=_wrap_factory,
                feature=self.name,
                reason="the registry of emerging optimizers knows whole parameters only: arguments.py clears "
                "use_distributed_optimizer for its entries and the factory chains several optimizers over one buffer",
                remove_when="a registered optimizer may be built on the distributed optimizer's shards",
            ),
            Patch(
                id="per-head-muon.metrics",
                target="megatron.training.training:training_log",
                kind=PatchKind.WRAP,
                implementation=wrap_training_log,
                feature=self.name,
                reason="training_log has no seam for other scalars",
                remove_when="training_log accepts additional scalars",
            ),
        )

    def argument_defaults(self) -> Mapping[str, Any]:
        """Moonlight's numbers as the defaults of Megatron's ``--muon-*``."""
        return MOONLIGHT

    def validate(self, args: Namespace, config: PerHeadMuonConfig) -> None:
        """Check the flags, give every model chunk one bucket, and let Megatron see an Adam."""
        if args.optimizer not in ("adam", "muon"):
            raise FeatureError(f"--optimizer {args.optimizer} and per-head-muon are two optimizers; drop one of them.")
        args.optimizer = "adam"
        _check_numbers(args, config)
        _check_combinations(args, config)
        _check_package(args)
        args.muon_nesterov = not config.muon_heavy_ball  # Megatron's flag can only turn it on
        if args.overlap_grad_reduce and args.ddp_bucket_size is None and args.ddp_num_buckets is None:
            args.ddp_bucket_size = ONE_BUCKET

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Every trainable parameter was updated by these optimizers, and every planned matrix and element was seen."""
        from k3_plugins.optimizer.per_head_muon.runtime import OPTIMIZERS

        owned = planned = done = received = 0
        for optimizer in OPTIMIZERS:
            plans = [chunk.plan for chunk in optimizer.work]
            matrices = sum(len(plan.local) + len(plan.owned) for plan in plans)
            owned += matrices
            planned += optimizer.steps * sum(plan.elements_received for plan in plans)
            done += optimizer.orthogonalised - optimizer.steps * matrices
            received += 0 if optimizer.exchange is None else optimizer.exchange.elements_received
        here = [p for chunk in model_chunks for p in chunk.parameters()]
        bound = {id(p) for optimizer in OPTIMIZERS for p in optimizer.trained}
        others = sum(p.requires_grad and id(p) not in bound for p in here)
        faults = (
            (others, f"{others} trainable parameters belong to no Per-Head Muon optimizer"),
            (bound - {id(p) for p in here}, "one of its optimizers belongs to another model"),
            (any(not optimizer.steps for optimizer in OPTIMIZERS), "an optimizer made no update in the first step"),
            (done, f"{abs(done)} matrices {'more' if done > 0 else 'less'} than planned were orthogonalised"),
            (planned != received, f"{planned} elements were planned"),
        )
        found = [text for wrong, text in faults if wrong]
        return Witness(
            summary=", ".join([f"{owned} matrices owned", f"{received} elements received", *found]),
            ok=not found,
            details={"owned": owned, "received": received, "planned": planned, "faults": found},
        )


def _check_numbers(args: Namespace, config: PerHeadMuonConfig) -> None:
    scale = args.muon_extra_scale_factor
    for flag, value, good, want in (
        ("--muon-momentum", args.muon_momentum, 0 <= args.muon_momentum < 1, "at least 0 and less than 1"),
        ("--muon-num-ns-steps", args.muon_num_ns_steps, args.muon_num_ns_steps >= 1, "at least 1"),
        ("--muon-extra-scale-factor", scale, 0 < scale < math.inf, "positive and finite"),
        ("--muon-batch-elements", config.muon_batch_elements, config.muon_batch_elements >= 1, "at least 1"),
    ):
        if not good:
            raise FeatureError(f"{flag} {value} must be {want}.")
    for flag, value in (
        ("--muon-adamw-lr", config.muon_adamw_lr),
        ("--muon-adamw-min-lr", config.muon_adamw_min_lr),
    ):
        if value is not None and not 0 <= value < math.inf:
            raise FeatureError(f"{flag} {value} must be a finite number, not negative.")
    if config.muon_adamw_min_lr is not None and config.muon_adamw_lr is None:
        raise FeatureError("--muon-adamw-min-lr needs --muon-adamw-lr.")
    if (
        config.muon_adamw_min_lr is not None
        and config.muon_adamw_lr is not None
        and config.muon_adamw_min_lr > config.muon_adamw_lr
    ):
        raise FeatureError(
            f"--muon-adamw-min-lr {config.muon_adamw_min_lr} is greater than --muon-adamw-lr {config.muon_adamw_lr}."
        )


def _check_combinations(args: Namespace, config: PerHeadMuonConfig) -> None:
    """Options of Megatron's that Muon on shards cannot honour."""
    tensor, experts = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    refused = (
        (args.muon_nesterov and config.muon_heavy_ball, "--muon-nesterov and --muon-heavy-ball", "keep one"),
        (args.muon_scalar_optimizer != "adam", f"--muon-scalar-optimizer {args.muon_scalar_optimizer}", "use adam"),
        (args.muon_fp32_matmul_prec == "low", "--muon-fp32-matmul-prec low", "torch knows medium and high"),
        (
            tensor > 1 and args.muon_tp_mode != "duplicated",
            f"--muon-tp-mode {args.muon_tp_mode}",
            "the update is always that of whole matrices, whatever the tensor-parallel size; drop the flag",
        ),
        (args.fp16, "--fp16", "use --bf16"),
        (args.use_megatron_fsdp, "--use-megatron-fsdp", "use --use-distributed-optimizer"),
        (args.use_torch_fsdp2, "--use-torch-fsdp2", "use --use-distributed-optimizer"),
        (args.optimizer_cpu_offload, "--optimizer-cpu-offload", "drop it"),
        (args.use_precision_aware_optimizer, "--use-precision-aware-optimizer", "drop it"),
        (args.optimizer_cuda_graph, "--optimizer-cuda-graph", "drop it"),
        (args.fp8_param_gather, "--fp8-param-gather", "drop it"),
        (args.fp4_param_gather, "--fp4-param-gather", "drop it"),
        (args.overlap_param_gather_with_optimizer_step, "--overlap-param-gather-with-optimizer-step", "drop it"),
        (
            args.num_distributed_optimizer_instances > 1,
            f"--num-distributed-optimizer-instances {args.num_distributed_optimizer_instances}",
            "use 1",
        ),
        (args.use_mup, "--use-mup", "Muon's own scale already does not depend on the width; drop it"),
        (
            args.tensor_parallel_num_weight_shards not in (None, 1, tensor),
            f"--tensor-parallel-num-weight-shards {args.tensor_parallel_num_weight_shards}",
            "drop it",
        ),
        (
            args.num_experts and args.expert_model_parallel_size == 1 and experts not in (None, tensor),
            f"--expert-tensor-parallel-size {experts}",
            f"without expert parallelism it must be --tensor-model-parallel-size {tensor}",
        ),
    )
    for wrong, what, instead in refused:
        if wrong:
            raise FeatureError(f"per-head-muon cannot be combined with {what}: {instead}.")


def _check_package(args: Namespace) -> None:
    try:
        from emerging_optimizers.orthogonalized_optimizers.muon_utils import NSCoeffT
    except Exception as error:  # a package can be broken in many ways
        raise FeatureError(
            f"per-head-muon needs emerging_optimizers ({type(error).__name__}: {error}): "
            "pip install emerging-optimizers==0.3.0"
        ) from error
    known = [name for name in NSCoeffT.__args__ if name != "custom"]
    if args.muon_coefficient_type not in known:
        raise FeatureError(f"--muon-coefficient-type {args.muon_coefficient_type} is none of {', '.join(known)}.")


FEATURE = PerHeadMuonFeature()
