"""Feature ``moonvit``: the vision encoder in the first stage, trained by ``k3_plugins.pretrain_vlm``.

Only the throughput figure is patched: Megatron's model builder has hooks, which the door uses.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.feature import FeatureError, Witness
from k3_plugins.patching import Patch, PatchKind
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.flops import add_encoder_flops

DOOR = "k3_plugins.pretrain_vlm"
TOOLS = (
    "k3_plugins.models.kimi_k3.convert",
    "k3_plugins.models.kimi_k3.generate",
    "k3_plugins.vision.image_shuffle",
)
"""Programs that build the encoder beside the language model, but do not train."""


class MoonViTFeature:
    """See the module docstring."""

    name = "moonvit"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = MoonViTConfig
    changes_parameters = True

    def patches(self) -> Sequence[Patch]:
        """The throughput figure; the encoder itself comes in through a hook of the model builder."""
        return (
            Patch(
                id="moonvit.flops",
                target="megatron.training.training:num_floating_point_operations",
                kind=PatchKind.WRAP,
                implementation=add_encoder_flops,
                feature=self.name,
                reason="Megatron counts the layers of the language model; the count has no seam for other modules.",
                remove_when="model configs report their own FLOPs per token",
            ),
        )

    def validate(self, args: Namespace, config: MoonViTConfig) -> None:
        """Refuse other doors, sizes that do not fit, and layouts in which the encoder was not tried."""
        from k3_plugins.activation import current

        activation = current()
        if activation is not None and activation.door not in (DOOR, *TOOLS):  # None: the doctor asks
            raise FeatureError(
                f"moonvit trains through python -m {DOOR}; start that, or drop moonvit from --k3-plugins"
            )
        for name in ("num_layers", "hidden_size", "num_heads", "head_dim", "ffn_size", "patch_size", "position_grid",
                     "max_patches", "max_frames"):  # fmt: skip
            value = getattr(config, f"moonvit_{name}")
            if value < 1:
                raise FeatureError(f"--moonvit-{name.replace('_', '-')} {value} must be at least 1")
        for name in ("norm_eps", "projector_norm_eps"):
            value = getattr(config, f"moonvit_{name}")
            if not value > 0:
                raise FeatureError(f"--moonvit-{name.replace('_', '-')} {value} must be greater than 0")
        if config.moonvit_head_dim % 4:
            raise FeatureError(f"--moonvit-head-dim {config.moonvit_head_dim} must be a multiple of 4")
        tp = args.tensor_model_parallel_size
        for flag, value in (
            ("--moonvit-num-heads", config.moonvit_num_heads),
            ("--moonvit-ffn-size", config.moonvit_ffn_size),
            ("--moonvit-hidden-size", config.moonvit_hidden_size),
        ):
            if value % tp:
                raise FeatureError(f"{flag} {value} cannot be split over --tensor-model-parallel-size {tp}")
        if args.micro_batch_size != 1:
            raise FeatureError(
                f"--micro-batch-size {args.micro_batch_size}: training with images runs with 1 only in this version"
            )
        if args.mtp_num_layers:
            raise FeatureError("--mtp-num-layers: image tokens are not predicted further ahead; drop it")

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Patches went through the encoder of the first stage."""
        from megatron.core.utils import unwrap_model

        from k3_plugins.activation import active
        from k3_plugins.vision.training import step

        encoders = [getattr(chunk, step.ENCODER, None) for chunk in unwrap_model(model_chunks)]
        patches = sum(encoder.patches_encoded for encoder in {*encoders, step.encoder_beside()} if encoder is not None)
        layers = sum(len(encoder.blocks) for encoder in encoders if encoder is not None)
        if not any(encoder is not None for encoder in encoders):
            return Witness("no encoder on this pipeline stage", ok=True)
        # Then a rank may be left without a piece; those features' witnesses tell.
        divided = not {"dynamic-cp", "vision-bubble"}.isdisjoint(active().names)
        return Witness(
            f"{layers} encoder blocks, {patches} patches encoded",
            ok=patches > 0 or step.images_seen == 0 or divided,
            details={"patches": patches},
        )


FEATURE = MoonViTFeature()
