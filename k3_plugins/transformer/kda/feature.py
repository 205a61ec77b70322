"""Feature ``kda``: Kimi Delta Attention in the layers that --linear-attention-freq marks.

The layers need no patch: Megatron's ``--spec`` is the seam, and this feature points it at the K3 layer specs.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.feature import Backend, FeatureError, Witness
from k3_plugins.optimizer.mixed_dtype import fp32_first_patch
from k3_plugins.patching import Patch, PatchKind
from k3_plugins.transformer.kda.config import KDAConfig, KDASizes
from k3_plugins.transformer.kda.flops import correct_flops
from k3_plugins.transformer.kda.pattern import resolve_pattern
from k3_plugins.transformer.mtp import mtp_patch
from k3_plugins.transformer.packing import use_packed_documents

K3_SPEC = ["k3_plugins.models.kimi_k3.layer_specs", "gpt"]


class KDA:
    """See the module docstring."""

    name = "kda"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = KDAConfig
    changes_parameters = True

    def patches(self) -> Sequence[Patch]:
        """The throughput figure, fp32 parameters in bf16 models, multi-token prediction; ``--spec`` does the rest."""
        return (
            fp32_first_patch(self.name),
            mtp_patch(self.name),
            Patch(
                id="kda.flops",
                target="megatron.training.training:num_floating_point_operations",
                kind=PatchKind.WRAP,
                implementation=correct_flops,
                feature=self.name,
                reason="Megatron counts every layer as softmax attention; the count has no seam for other layers.",
                remove_when="model configs report their own FLOPs per token",
            ),
        )

    def validate(self, args: Namespace, config: KDAConfig) -> None:
        """Derive the layer pattern, check sizes, heads and backend, and point ``--spec`` at the K3 layers."""
        if args.num_layers is None:
            raise FeatureError("--num-layers is missing; give it, or choose a model with --k3-model.")
        if args.spec is not None and list(args.spec) != K3_SPEC:
            raise FeatureError(
                f"--spec {' '.join(args.spec)} builds another model than the kda feature; drop --spec, or drop kda "
                "from --k3-plugins."
            )
        args.spec = K3_SPEC
        use_packed_documents(args)
        if args.experimental_attention_variant is not None:
            raise FeatureError(
                f"--experimental-attention-variant {args.experimental_attention_variant} and the kda feature both "
                "replace attention; drop one of them."
            )
        _check_precision(args)
        try:
            args.linear_attention_freq = resolve_pattern(
                args.linear_attention_freq, args.num_layers, config.kda_last_layer_full_attention
            )
            self._check_sizes(args, config)
        except ValueError as error:
            raise FeatureError(str(error)) from error

    def _check_sizes(self, args: Namespace, config: KDAConfig) -> None:
        from k3_plugins.transformer.kda.ops import KDABackendError, resolve_backend

        kv_channels = args.kv_channels or (args.hidden_size // args.num_attention_heads)
        sizes = KDASizes.resolve(config, args.num_attention_heads, kv_channels)
        if sizes.num_heads % args.tensor_model_parallel_size:
            raise ValueError(
                f"--kda-num-heads {sizes.num_heads} cannot be split over --tensor-model-parallel-size "
                f"{args.tensor_model_parallel_size}; choose a size that divides it."
            )
        if config.kda_conv_kernel_size < 1:
            raise ValueError(f"--kda-conv-kernel-size {config.kda_conv_kernel_size} must be at least 1.")
        if config.kda_gate == "bounded" and not -math.inf < config.kda_gate_lower_bound < 0:
            raise ValueError(
                f"--kda-gate-lower-bound {config.kda_gate_lower_bound} must be a finite negative number (K3 uses -5)."
            )
        if config.kda_output_gate_bias and config.kda_output_gate != "low-rank":
            raise ValueError("--kda-output-gate-bias needs --kda-output-gate low-rank.")
        try:
            resolve_backend(config.kda_backend, _device())
        except KDABackendError as error:
            raise FeatureError(f"--kda-backend {config.kda_backend}: {error}") from error

    def backends(self, config: KDAConfig) -> Sequence[Backend]:
        """The backend that this machine runs the recurrence on, and why the others were not chosen."""
        from k3_plugins.transformer.kda.ops import resolve_backend

        chosen, rejected = resolve_backend(config.kda_backend, _device())
        why = "named by --kda-backend" if config.kda_backend != "auto" else "best available on this device"
        return [Backend(chosen, True, why), *(Backend(name, False, reason) for name, reason in rejected.items())]

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Counts this rank's KDA layers against the pattern and requires that each of them ran."""
        from megatron.core.utils import unwrap_model

        from k3_plugins.transformer.kda.layer import KimiDeltaAttention
        from k3_plugins.transformer.kda.ops import resolve_backend

        layers = [layer for chunk in unwrap_model(model_chunks) for layer in chunk.decoder.layers]
        expected = sum(args.linear_attention_freq[layer.layer_number - 1] for layer in layers)
        kda_layers = [layer.self_attention for layer in layers if isinstance(layer.self_attention, KimiDeltaAttention)]
        idle = sum(layer.forward_calls == 0 for layer in kda_layers)
        backend, _ = resolve_backend(kda_layers[0].kda_config.kda_backend, _device()) if kda_layers else ("unused", {})
        return Witness(
            summary=f"{len(kda_layers)} KDA layers of {len(layers)} on this rank, backend {backend}",
            ok=len(kda_layers) == expected and idle == 0,
            details={"kda_layers": len(kda_layers), "expected": expected, "idle": idle, "backend": backend},
        )


def _device() -> Any:
    import torch

    from k3_plugins.activation import current

    activation = current()
    on_cpu = activation is not None and activation.platform == "cpu"
    return torch.device("cpu" if on_cpu or not torch.cuda.is_available() else "cuda")


def _check_precision(args: Namespace) -> None:
    """A_log and dt_bias stay fp32; Megatron's optimizer for mixed precision without shards confuses such parameters."""
    stores = (args.save and not args.no_save_optim) or (args.load and not args.no_load_optim and not args.finetune)
    low = "--bf16" if args.bf16 else "--fp16" if args.fp16 else None
    if low and not args.use_distributed_optimizer and stores and args.ckpt_format != "torch":
        raise FeatureError(
            f"{low} with the kda feature needs --use-distributed-optimizer (any number of ranks): without it Megatron"
            f" puts optimizer states under wrong names in --ckpt-format {args.ckpt_format} checkpoints of models with"
            " fp32 parameters. Or leave the optimizer out: --no-save-optim, --no-load-optim"
        )


FEATURE = KDA()
