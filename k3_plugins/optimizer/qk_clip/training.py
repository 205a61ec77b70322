"""Where QK-clip enters Megatron's training: the optimizer, the core attention's configuration, the metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from k3_plugins.training.metrics import logs

if TYPE_CHECKING:
    from k3_plugins.optimizer.qk_clip.clip import QKClip

MAXIMUM = "k3/qk-max"
CLIPPED = "k3/qk-clipped-heads"


class _Runtime:
    """The clip of the model in training, for the witness and the metrics."""

    clip: QKClip | None = None


RUNTIME = _Runtime()


def wrap_get_megatron_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for megatron.core.optimizer:get_megatron_optimizer."""

    @functools.wraps(original)
    def get_megatron_optimizer(config: Any, model_chunks: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.training import get_args

        from k3_plugins.optimizer.qk_clip.clip import QKClip, attach

        optimizer = original(config, model_chunks, *args, **kwargs)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        options = get_args()
        RUNTIME.clip = QKClip(model_chunks, options.qk_clip_threshold, options.qk_clip_alpha, group)
        _require_attention(RUNTIME.clip)
        attach(RUNTIME.clip, optimizer)
        return optimizer

    return get_megatron_optimizer


def _require_attention(clip: QKClip) -> None:
    """A pipeline stage may have KDA layers only; the whole model may not.

    Raises:
        FeatureError: on every rank, for a model without a head to clip.
    """
    import torch

    from k3_plugins.feature import FeatureError

    # on the group's device: NCCL takes no CPU tensors
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    count = torch.tensor(len(clip.attentions), device=device)
    torch.distributed.all_reduce(count)
    if not count:
        raise FeatureError(
            "qk-clip: the model has no softmax attention whose logits could be clipped (KDA layers have none); drop"
            " qk-clip from --k3-plugins"
        )


def wrap_transformer_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for core_transformer_config_from_args: Transformer Engine's core must be built to return maxima."""

    @functools.wraps(original)
    def core_transformer_config_from_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        config = original(args, *rest, **kwargs)
        if args.transformer_impl == "transformer_engine":
            config.log_max_attention_logit = True
        return config

    return core_transformer_config_from_args


def _summary() -> dict[str, float]:
    """The model's largest logit of the last step. Collective over all ranks."""
    if RUNTIME.clip is None:
        return {}
    largest, clipped = RUNTIME.clip.summary()
    return {MAXIMUM: largest, CLIPPED: clipped}


wrap_training_log = logs(_summary, on_every_rank=True)
