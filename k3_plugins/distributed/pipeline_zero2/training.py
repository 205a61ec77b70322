"""Hooks into Megatron's set-up and training loop. Imports neither torch nor megatron."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from k3_plugins.training.metrics import logs

METRICS = {
    "k3/zero2-device-gradient-bytes": "device_bytes",
    "k3/zero2-host-gradient-bytes": "host_bytes",
    "k3/zero2-reduce-scatter-bytes": "reduced_bytes",
}


def attach_to_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for `get_megatron_optimizer`."""

    @functools.wraps(original)
    def get_megatron_optimizer(config: Any, model_chunks: list[Any], *arguments: Any, **keywords: Any) -> Any:
        from k3_plugins import activation
        from k3_plugins.distributed.pipeline_zero2.attach import CURRENT, attach

        optimizer = original(config, model_chunks, *arguments, **keywords)
        CURRENT[:] = [attach(model_chunks, optimizer, activation.active().config("pipeline-zero2"))]
        return optimizer

    return get_megatron_optimizer


def _bytes() -> dict[str, float]:
    """Of the rank that writes."""
    from k3_plugins.distributed.pipeline_zero2.attach import CURRENT

    if not CURRENT:
        return {}
    report = CURRENT[0].report()
    return {name: getattr(report, field) for name, field in METRICS.items()}


write_metrics = logs(_bytes, on_every_rank=False)
