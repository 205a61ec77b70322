"""Feature ``gated-mla``: gated multi-head latent attention without position encoding in the full-attention layers.

The layers need no patch: Megatron's ``--spec`` is the seam, and this feature points it at the K3 layer specs.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.feature import FeatureError, Witness
from k3_plugins.patching import Patch, PatchKind
from k3_plugins.transformer.gated_mla.config import GatedMLAConfig
from k3_plugins.transformer.gated_mla.flops import add_gate_flops
from k3_plugins.transformer.mtp import mtp_patch
from k3_plugins.transformer.packing import use_packed_documents

K3_SPEC = ["k3_plugins.models.kimi_k3.layer_specs", "gpt"]


class GatedMLA:
    """See the module docstring."""

    name = "gated-mla"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = GatedMLAConfig
    changes_parameters = True

    def patches(self) -> Sequence[Patch]:
        """The throughput figure and the layer of multi-token prediction; ``--spec`` does the rest."""
        return (
            mtp_patch(self.name),
            Patch(
                id="gated-mla.flops",
                target="megatron.training.training:num_floating_point_operations",
                kind=PatchKind.WRAP,
                implementation=add_gate_flops,
                feature=self.name,
                reason="Megatron's MLA formula has no output gate; the count has no seam for it.",
                remove_when="model configs report their own FLOPs per token",
            ),
        )

    def validate(self, args: Namespace, config: GatedMLAConfig) -> None:
        """Turn on Megatron's MLA sizes, require NoPE, check heads, and point ``--spec`` at the K3 layers."""
        if args.spec is not None and list(args.spec) != K3_SPEC:
            raise FeatureError(
                f"--spec {' '.join(args.spec)} builds another model than the gated-mla feature; drop --spec, "
                "or drop gated-mla from --k3-plugins."
            )
        args.spec = K3_SPEC
        use_packed_documents(args)
        args.multi_latent_attention = True
        if args.position_embedding_type != "none":
            raise FeatureError(
                f"--position-embedding-type {args.position_embedding_type} contradicts gated-mla, which has no "
                "position encoding; pass --position-embedding-type none."
            )
        if args.num_attention_heads % args.tensor_model_parallel_size:
            raise FeatureError(
                f"--num-attention-heads {args.num_attention_heads} cannot be split over --tensor-model-parallel-size "
                f"{args.tensor_model_parallel_size}; choose a size that divides it."
            )
        for flag, value in (
            ("--q-lora-rank", args.q_lora_rank),
            ("--kv-lora-rank", args.kv_lora_rank),
            ("--qk-head-dim", args.qk_head_dim),
            ("--v-head-dim", args.v_head_dim),
        ):
            if value is not None and value <= 0:
                raise FeatureError(f"{flag} {value} must be positive.")
        if args.qk_pos_emb_head_dim < 0:
            raise FeatureError(f"--qk-pos-emb-head-dim {args.qk_pos_emb_head_dim} must not be negative.")
        if not 0 < config.mla_latent_norm_eps < math.inf:
            raise FeatureError(
                f"--mla-latent-norm-eps {config.mla_latent_norm_eps} must be a small positive number (K3 uses 1e-6)."
            )

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Counts this rank's gated MLA layers against the pattern and requires that each of them ran."""
        from megatron.core.utils import unwrap_model

        from k3_plugins.transformer.gated_mla.layer import GatedMLASelfAttention

        layers = [layer for chunk in unwrap_model(model_chunks) for layer in chunk.decoder.layers]
        pattern = args.linear_attention_freq or [0] * args.num_layers
        expected = sum(1 - pattern[layer.layer_number - 1] for layer in layers)
        mla_layers = [x.self_attention for x in layers if isinstance(x.self_attention, GatedMLASelfAttention)]
        idle = sum(layer.forward_calls == 0 for layer in mla_layers)
        gated = all(layer.mla_config.mla_output_gate for layer in mla_layers)
        kind = "gated" if gated else "no gate"
        return Witness(
            summary=f"{len(mla_layers)} MLA layers of {len(layers)} on this rank, NoPE, {kind}",
            ok=len(mla_layers) == expected and idle == 0,
            details={"mla_layers": len(mla_layers), "expected": expected, "idle": idle, "gated": gated},
        )


FEATURE = GatedMLA()
