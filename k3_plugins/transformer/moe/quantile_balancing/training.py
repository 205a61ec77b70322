"""Hooks into Megatron's training loop: the bias update after the optimizer step, and the metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from k3_plugins.training.metrics import logs, written_anywhere

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
        RUNTIME.device = next((p.device for chunk in model for p in chunk.parameters()), None)
        return result

    return train_step


class _Runtime:
    """The routers of the model in training, for the metrics."""

    routers: list[Any] = []
    device: Any = None
    """Where this rank's parameters are."""


RUNTIME = _Runtime()


def _worst() -> dict[str, float]:
    """The worst layer of the model. Collective over the pipeline: the rank that writes holds the last layers only."""
    import torch
    from megatron.core import parallel_state

    if not written_anywhere():
        return {}
    metrics = [router.last_metrics for router in RUNTIME.routers if router.last_metrics is not None]
    own = torch.full((2,), -1.0, dtype=torch.float32, device=RUNTIME.device)
    if metrics:
        own = torch.stack([torch.stack([m[0], m[1]]).float() for m in metrics]).amax(0).to(RUNTIME.device)
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        torch.distributed.all_reduce(own, torch.distributed.ReduceOp.MAX, group=group)
    imbalance, spread = own.tolist()
    return {} if imbalance < 0 else {IMBALANCE: imbalance, SPREAD: spread}


wrap_training_log = logs(_worst, on_every_rank=True)
