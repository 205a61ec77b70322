"""Feature ``qk-clip``: the weights of attention heads whose logits exceed a threshold are scaled back to it."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.feature import FeatureError, Witness
from k3_plugins.optimizer.qk_clip.training import (
    RUNTIME,
    wrap_get_megatron_optimizer,
    wrap_training_log,
    wrap_transformer_config,
)
from k3_plugins.patching import Patch, PatchKind

_UNREACHED_MASTERS = {
    "reuse_grad_buf_for_mxfp8_param_ag": "copies the masters outside of the optimizer step, after qk-clip",
    "use_precision_aware_optimizer": "keeps masters inside the fused optimizer, where qk-clip does not reach them: the"
    " next step would undo the clip",
    "optimizer_cpu_offload": "updates copies of the weights in host memory, which qk-clip does not reach: the next step"
    " would undo the clip",
    "use_megatron_fsdp": "shards weights in a way that qk-clip does not know",
    "use_torch_fsdp2": "shards weights in a way that qk-clip does not know",
}
"""Flags with which the weights that the optimizer really steps are elsewhere, and why."""


class QKClipFeature:
    """See the module docstring. Its flags are Megatron's --qk-clip-threshold and --qk-clip-alpha."""

    name = "qk-clip"
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    config = None
    changes_parameters = False

    def patches(self) -> Sequence[Patch]:
        """The optimizer, the configuration of Transformer Engine's attention, and the metrics."""
        wrap: dict[str, Any] = {"kind": PatchKind.WRAP, "feature": self.name}
        return (
            Patch(
                id="qk-clip.optimizer",
                target="megatron.core.optimizer:get_megatron_optimizer",
                implementation=wrap_get_megatron_optimizer,
                reason="Megatron's own qk-clip edits whole fp32 masters after the step, which sharded optimizers do not"
                " have; nothing of the user's is called between the update and the copy into the model.",
                remove_when="Megatron's qk_clip works on sharded masters and with any core attention",
                **wrap,
            ),
            Patch(
                id="qk-clip.maxima",
                target="megatron.training.arguments:core_transformer_config_from_args",
                implementation=wrap_transformer_config,
                reason="Transformer Engine's attention returns maxima only if the config says so at construction, and"
                " the flag that says so would start Megatron's own reading of them.",
                remove_when="Megatron's qk_clip works on sharded masters and with any core attention",
                **wrap,
            ),
            Patch(
                id="qk-clip.metrics",
                target="megatron.training.training:training_log",
                implementation=wrap_training_log,
                reason="The training loop has no callback for user metrics.",
                remove_when="Megatron offers a registry of metrics or a logging callback",
                **wrap,
            ),
        )

    def validate(self, args: Namespace, config: None) -> None:
        """Refuse Megatron's own clip beside this one, and values that clip nothing or everything."""
        for flag in ("qk_clip", "log_max_attention_logit"):
            if getattr(args, flag):
                raise FeatureError(
                    f"--{flag.replace('_', '-')} is Megatron's own reading of attention maxima, which works on whole"
                    " fp32 masters only; with qk-clip in --k3-plugins drop the flag (k3/qk-max is logged)"
                )
        if not args.qk_clip_threshold > 0:
            raise FeatureError(f"--qk-clip-threshold {args.qk_clip_threshold} must be greater than 0")
        if not 0 < args.qk_clip_alpha < 1:
            raise FeatureError(f"--qk-clip-alpha {args.qk_clip_alpha} must be between 0 and 1, exclusive")
        if args.qk_layernorm and not args.multi_latent_attention:
            raise FeatureError(
                "--qk-layernorm normalises queries and keys, so scaling their weights does not bound the logits; drop"
                " it, or drop qk-clip from --k3-plugins"
            )
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        if not args.multi_latent_attention and groups < args.tensor_model_parallel_size:
            raise FeatureError(
                f"--num-query-groups {groups} is less than --tensor-model-parallel-size"
                f" {args.tensor_model_parallel_size}: a rank's weights are then not those of its heads, and qk-clip"
                " cannot scale them; use at most as many tensor-parallel ranks as query groups"
            )
        for flag, because in _UNREACHED_MASTERS.items():
            if getattr(args, flag):
                raise FeatureError(f"--{flag.replace('_', '-')} {because}; drop it, or drop qk-clip from --k3-plugins")

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Maxima were collected from every softmax attention of this rank."""
        clip = RUNTIME.clip
        if clip is None:
            return Witness("the optimizer was built without the clip", ok=False)
        maxima = clip.last_maxima
        heads = sum(attention.heads for attention in clip.attentions)
        silent = 0 if maxima is None else int((maxima == -float("inf")).sum())
        largest = "none" if maxima is None else f"{float(maxima.max()):.2f}"
        return Witness(
            summary=f"{len(clip.attentions)} attentions, {heads} heads, largest logit {largest} of"
            f" {args.qk_clip_threshold:g}",
            ok=(maxima is not None or not clip.attentions) and silent == 0,
            details={"attentions": len(clip.attentions), "heads": heads, "silent_heads": silent},
        )


FEATURE = QKClipFeature()
