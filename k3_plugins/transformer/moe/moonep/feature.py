"""Feature ``moonep``: perfectly balanced expert parallelism; the layer comes in through the K3 layer specs."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.feature import FeatureError, Witness
from k3_plugins.patching import Patch
from k3_plugins.transformer.moe.moonep.config import MoonEPConfig
from k3_plugins.transformer.moe.validate import check_moe
from k3_plugins.transformer.mtp import mtp_patch

K3_SPEC = ["k3_plugins.models.kimi_k3.layer_specs", "gpt"]


class MoonEP:
    """See the module docstring."""

    name = "moonep"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = MoonEPConfig
    changes_parameters = False  # checkpoints are those of Megatron's dispatchers

    def patches(self) -> Sequence[Patch]:
        """Only for multi-token prediction: a subclass of MoELayer in the spec is the seam."""
        return (mtp_patch(self.name),)

    def validate(self, args: Namespace, config: MoonEPConfig) -> None:
        """Check the layout and what the balanced layer cannot do, and point ``--spec`` at the K3 layers."""
        if args.spec is not None and list(args.spec) != K3_SPEC:
            raise FeatureError(
                f"--spec {' '.join(args.spec)} builds another model than the moonep feature; drop --spec, or drop "
                "moonep from --k3-plugins."
            )
        args.spec = K3_SPEC
        check_moe(args, self.name)
        if args.transformer_impl != "local":
            raise FeatureError(
                f"--transformer-impl {args.transformer_impl}: moonep computes stacked experts of its own; pass "
                "--transformer-impl local."
            )
        if args.moe_shared_expert_overlap:
            raise FeatureError("--moe-shared-expert-overlap belongs to Megatron's dispatchers; drop it.")
        if args.overlap_moe_expert_parallel_comm:
            raise FeatureError("--overlap-moe-expert-parallel-comm schedules Megatron's dispatchers; drop it.")
        if args.moe_expert_capacity_factor is not None:
            raise FeatureError("--moe-expert-capacity-factor drops tokens, moonep never does; drop it.")
        if (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) > 1:
            raise FeatureError("moonep does not cut experts: pass --expert-tensor-parallel-size 1.")
        if config.moe_moonep_transport == "moonep":
            self._check_package(args)

    def _check_package(self, args: Namespace) -> None:
        import torch

        from k3_plugins.transformer.moe.moonep import package

        try:
            package.load()
            dtype = torch.bfloat16 if args.bf16 else torch.float32
            package.check_widths(args.moe_latent_size or args.hidden_size, args.moe_ffn_hidden_size, dtype)
        except package.PackageError as error:
            raise FeatureError(str(error)) from error

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Every layer computed exactly this rank's share of the group's rows: S*K where there is no padding."""
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.utils import unwrap_model

        from k3_plugins.transformer.moe.moonep.layer import is_balanced

        layers = [m for chunk in unwrap_model(model_chunks) for m in chunk.modules() if isinstance(m, MoELayer)]
        balanced = [layer for layer in layers if is_balanced(layer) and layer.report is not None]
        reports = [layer.report for layer in balanced]
        rows = [int(report.rows) for report in reports]
        shares = [int(report.share) for report in reports]
        sent = [report.sent for report in reports]
        slots = max((int(report.slots) for report in reports), default=0)
        transports = sorted({layer.moonep_config.moe_moonep_transport for layer in balanced})
        return Witness(
            summary=f"{len(reports)} balanced MoE layers, transport {' '.join(transports) or 'none'}, rows "
            f"{min(rows, default=0)} to {max(rows, default=0)} "
            f"{'= S*K on every layer' if rows == sent else '(padding was left out)'}, up to {slots} slots used",
            ok=len(reports) == len(layers) and rows == shares,
            details={
                "layers": len(reports),
                "moe_layers": len(layers),
                "rows": rows,
                "shares": shares,
                "sent": sent,
                "slots": slots,
            },
        )


FEATURE = MoonEP()
