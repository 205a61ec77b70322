"""Feature ``latent-moe``: latent routed experts and SiTU-GLU, through the K3 layer specs (no patch of the layers)."""

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.feature import FeatureError, Witness
from k3_plugins.patching import Patch
from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig
from k3_plugins.transformer.moe.validate import check_moe
from k3_plugins.transformer.mtp import mtp_patch

K3_SPEC = ["k3_plugins.models.kimi_k3.layer_specs", "gpt"]


class LatentMoE:
    """See the module docstring."""

    name = "latent-moe"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = LatentMoEConfig
    changes_parameters = True

    def patches(self) -> Sequence[Patch]:
        """Only for multi-token prediction; ``--spec`` is the seam, and its FLOP count knows --moe-latent-size."""
        return (mtp_patch(self.name),)

    def validate(self, args: Namespace, config: LatentMoEConfig) -> None:
        """Check sizes and what Megatron's latent path cannot do, and point ``--spec`` at the K3 layers."""
        if args.spec is not None and list(args.spec) != K3_SPEC:
            raise FeatureError(
                f"--spec {' '.join(args.spec)} builds another model than the latent-moe feature; drop --spec, or drop "
                "latent-moe from --k3-plugins."
            )
        args.spec = K3_SPEC
        for flag, value in (
            ("--k3-situ-beta-gate", config.k3_situ_beta_gate),
            ("--k3-situ-beta-up", config.k3_situ_beta_up),
            ("--moe-latent-norm-eps", config.moe_latent_norm_eps),
        ):
            if not 0 < value < math.inf:
                raise FeatureError(f"{flag} {value} must be a positive, finite number.")
        if not args.swiglu:
            raise FeatureError("latent-moe needs gated feed-forward networks: pass --swiglu.")
        if args.num_experts is None:
            if args.moe_latent_size is not None:
                raise FeatureError("--moe-latent-size needs --num-experts.")
            return  # SiTU in a dense model
        check_moe(args, self.name)
        if args.moe_latent_size is not None and args.moe_shared_expert_overlap:
            raise FeatureError(
                "--moe-shared-expert-overlap cannot be combined with --moe-latent-size in Megatron; drop it."
            )

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Counts this rank's MoE layers, requires the latent width in their experts and that each of them ran."""
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.utils import unwrap_model

        from k3_plugins.transformer.moe.latent_moe.layer import LatentMoELayer
        from k3_plugins.transformer.moe.latent_moe.mlp import GatedMLP, GatedSharedExperts

        modules = [module for chunk in unwrap_model(model_chunks) for module in chunk.modules()]
        layers = [module for module in modules if isinstance(module, MoELayer)]
        ours = [layer for layer in layers if isinstance(layer, LatentMoELayer)]
        idle = sum(layer.forward_calls == 0 for layer in ours)
        dense = sum(isinstance(module, GatedMLP) for module in modules)
        shared = sum(isinstance(module, GatedSharedExperts) for module in modules)
        width = args.moe_latent_size or args.hidden_size
        activation = next((layer.latent_config.k3_activation for layer in ours), "")
        return Witness(
            summary=f"{len(ours)} MoE layers on this rank, latent width {width}, {activation or 'dense'} activation",
            ok=len(ours) == len(layers) and idle == 0,
            details={"layers": len(ours), "moe_layers": len(layers), "idle": idle, "dense": dense, "shared": shared},
        )


FEATURE = LatentMoE()
