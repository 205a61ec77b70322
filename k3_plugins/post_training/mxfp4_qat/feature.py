"""Feature ``mxfp4-qat``: routed experts are trained with the values that their exported MXFP4 weights will have."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.compat.optional import require
from k3_plugins.feature import Backend, FeatureError, Witness
from k3_plugins.patching import Patch, PatchKind
from k3_plugins.post_training.mxfp4_qat.config import MXFP4QATConfig
from k3_plugins.post_training.mxfp4_qat.gpt import wrap_gpt_init

BLOCK = 32  # as in `formats`, which imports torch


class MXFP4QAT:
    """See the module docstring."""

    name = "mxfp4-qat"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = MXFP4QATConfig
    changes_parameters = True  # not their names: what the values of the experts' weights mean
    may_join = True

    def patches(self) -> Sequence[Patch]:
        """The model's constructor."""
        return (
            Patch(
                id="mxfp4-qat.experts",
                target="megatron.core.models.gpt.gpt_model:GPTModel.__init__",
                kind=PatchKind.WRAP,
                implementation=wrap_gpt_init,
                feature=self.name,
                reason="Megatron's pre_wrap_hooks belong to a config that each script makes for itself and run for "
                "training only; conversion and generation build the model without them. --spec does not reach "
                "multi-token-prediction layers, whose experts are routed experts too.",
                remove_when="hooks for every built model can be registered once",
            ),
        )

    def validate(self, args: Namespace, config: MXFP4QATConfig) -> None:
        """Check the sizes, and what would keep the experts' GEMMs from seeing rounded operands."""
        require("modelopt.torch.quantization", "the feature mxfp4-qat")
        if args.num_experts is None:
            raise FeatureError("mxfp4-qat quantizes routed experts: give --num-experts, or drop it from --k3-plugins.")
        self._check_widths(args)
        for flag, on, instead in (
            ("--fp8-format", args.fp8, "experts' inputs would be rounded twice"),
            ("--fp4-format", args.fp4, "experts' operands would be rounded twice"),
            (
                "--delay-wgrad-compute",
                args.delay_wgrad_compute,
                "weight gradients would go to the rounded copies of the weights",
            ),
            (
                "--use-transformer-engine-op-fuser",
                args.use_transformer_engine_op_fuser,
                "fused operators do not call the linear layers that hold the quantizers",
            ),
        ):
            if on:
                raise FeatureError(f"{flag} cannot be combined with mxfp4-qat: {instead}; drop the flag.")
        if config.mxfp4_qat_backend == "modelopt-cuda" and not _has_cuda():
            raise FeatureError(
                "--mxfp4-qat-backend modelopt-cuda needs a CUDA device, and there is none; pass --mxfp4-qat-backend "
                "torch."
            )

    @staticmethod
    def _check_widths(args: Namespace) -> None:
        """The widths that the flags give; the model is checked again, by name, when it is built."""
        shards = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        width = args.moe_latent_size or args.hidden_size
        ffn = args.moe_ffn_hidden_size or args.ffn_hidden_size
        frequency = args.moe_layer_freq
        layer = 0 if isinstance(frequency, int) or 1 not in frequency else list(frequency).index(1)
        source = "--moe-latent-size" if args.moe_latent_size else "--hidden-size"
        for linear, columns, origin in (
            ("linear_fc1", width, f"{source} {width}"),
            (
                "linear_fc2",
                (ffn or 0) / shards,
                f"--moe-ffn-hidden-size {ffn} on {shards} expert-tensor-parallel ranks",
            ),
        ):
            if columns and columns % BLOCK:
                raise FeatureError(
                    f"mxfp4-qat: decoder.layers.{layer}.mlp.experts.{linear} would have {columns:g} input columns "
                    f"({origin}), and {BLOCK} columns share a scale; choose a width that {BLOCK} divides."
                )

    def backends(self, config: MXFP4QATConfig) -> Sequence[Backend]:
        """Both, and why one was chosen."""
        chosen = config.mxfp4_qat_backend
        why = {
            "torch": "runs everywhere; bit-equal to the exported weights",
            "modelopt-cuda": "asked for by --mxfp4-qat-backend" if _has_cuda() else "needs a CUDA device",
        }
        return [Backend(name, chosen=name == chosen, why=text) for name, text in why.items()]

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Enabled quantizers are in routed experts only, in all of them, and every weight was rounded."""
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.utils import unwrap_model

        from k3_plugins.post_training.mxfp4_qat.backends import calls
        from k3_plugins.post_training.mxfp4_qat.convert import quantizers

        chunks = unwrap_model(model_chunks)
        everywhere = [quantizer for chunk in chunks for quantizer in quantizers(chunk).values()]
        layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
        experts = [quantizers(layer.experts) for layer in layers]
        inside = [quantizer for found in experts for quantizer in found.values()]
        weights = [quantizer for quantizer in inside if quantizer.is_mxfp(4)]
        inputs = [quantizer for quantizer in inside if quantizer.is_mxfp(8)]
        idle = sum(calls(quantizer) == 0 for quantizer in weights)
        bare = sum(
            not any(q.is_mxfp(4) for q in found.values()) or not any(q.is_mxfp(8) for q in found.values())
            for found in experts
        )
        outside = len(everywhere) - len(inside)
        return Witness(
            summary=f"{len(layers)} MoE layers on this rank, {len(weights)} MXFP4 weight and {len(inputs)} MXFP8 input "
            f"quantizers, {outside} outside of routed experts, {idle} weights not rounded, backend "
            f"{args.mxfp4_qat_backend}",
            ok=not (outside or idle or bare),
            details={
                "layers": len(layers),
                "weights": len(weights),
                "inputs": len(inputs),
                "inputs_used": sum(calls(quantizer) > 0 for quantizer in inputs),
                "outside": outside,
                "idle": idle,
            },
        )


def _has_cuda() -> bool:
    from k3_plugins.platform.detect import gpu

    return gpu().usable


FEATURE = MXFP4QAT()
