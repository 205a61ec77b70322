"""Hooks into Megatron's training loop: the bias update after the optimizer step, and the metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from k3_plugins.training.metrics import logs

IMBALANCE = "k3/qb-load-imbalance"
SPREAD = "k3/qb-bias-spread"


def wrap_train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for megatron.training.training:train_step: a batch is never routed by a bias computed from itself."""

    @functools.wraps(original)
    def train_step(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from k3_plugins.transformer.moe.quantile_balancing.router import clear, routers_of, update

        result = original(forward_step_func, data_iterator, model, *args, **kwargs)
        skipped = result[1]
        (clear if skipped else update)(routers_of(model))
        RUNTIME.routers = routers_of(model)
        return result

    return train_step


class _Runtime:
    """The routers of the model in training, for the metrics."""

    routers: list[Any] = []


RUNTIME = _Runtime()


def _worst() -> dict[str, float]:
    """Of the layers of this pipeline stage."""
    metrics = [router.last_metrics for router in RUNTIME.routers if router.last_metrics is not None]
    if not metrics:
        return {}
    return {IMBALANCE: max(float(m[0]) for m in metrics), SPREAD: max(float(m[1]) for m in metrics)}


wrap_training_log = logs(_worst, on_every_rank=False)
