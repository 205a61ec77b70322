"""Feature ``dynamic-cp``: the encoder's work is divided over context-parallel ranks, large images and videos split."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.feature import FeatureError, Witness
from k3_plugins.patching import Patch, PatchKind
from k3_plugins.vision.dynamic_cp.config import DynamicCPConfig
from k3_plugins.vision.dynamic_cp.loads import SO_FAR, wrap_training_log


class DynamicCP:
    """See the module docstring."""

    name = "dynamic-cp"
    requires: Sequence[str] = ("moonvit",)
    conflicts: Sequence[str] = ()
    config = DynamicCPConfig
    changes_parameters = False

    def patches(self) -> Sequence[Patch]:
        """The metrics; the division itself is called by the door."""
        return (
            Patch(
                id="dynamic-cp.metrics",
                target="megatron.training.training:training_log",
                kind=PatchKind.WRAP,
                implementation=wrap_training_log,
                feature=self.name,
                reason="training_log has no seam for other scalars",
                remove_when="training_log accepts additional scalars",
            ),
        )

    def validate(self, args: Namespace, config: DynamicCPConfig) -> None:
        """Refuse a layout without ranks to divide over, and an imbalance that no load can meet."""
        if args.context_parallel_size < 2:
            raise FeatureError(
                f"--context-parallel-size {args.context_parallel_size}: dynamic-cp divides the encoder's work over"
                " context-parallel ranks; give 2 or more, or drop dynamic-cp from --k3-plugins"
            )
        if not 1 <= config.dynamic_cp_imbalance < float("inf"):
            raise FeatureError(
                f"--dynamic-cp-imbalance {config.dynamic_cp_imbalance} is largest over mean load: give 1 or more, 1.05"
                " for instance"
            )

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Images were divided over the ranks of the first stage, if it had any and no other stage took them."""
        from megatron.core.utils import unwrap_model

        from k3_plugins.activation import active
        from k3_plugins.vision.training import step

        if not any(hasattr(chunk, step.ENCODER) for chunk in unwrap_model(model_chunks)):
            return Witness("no encoder on this pipeline stage", ok=True)
        ratio, before = (load / SO_FAR.mean if SO_FAR.mean else 0.0 for load in (SO_FAR.largest, SO_FAR.unsplit))
        return Witness(
            f"{SO_FAR.split} of {SO_FAR.clips} images split over {args.context_parallel_size} ranks, largest over mean"
            f" load {ratio:.3f} ({before:.3f} unsplit)",
            ok=SO_FAR.batches > 0 or step.images_seen == 0 or "vision-bubble" in active().names,
            details={"clips": SO_FAR.clips, "split": SO_FAR.split, "load": ratio, "unsplit": before},
        )


FEATURE = DynamicCP()
