"""The metric: how long the last steps waited for pieces."""

from __future__ import annotations

from k3_plugins.optimizer.per_head_muon.runtime import OPTIMIZERS
from k3_plugins.training.metrics import logs

WAITED_MS = "k3/muon-p2p-ms"


def _waited() -> dict[str, float]:
    """On every rank: what was measured would pile up where nobody writes."""
    exchanges = [optimizer.exchange for optimizer in OPTIMIZERS if optimizer.exchange is not None]
    waited = sum(exchange.take_waited_ms() for exchange in exchanges)
    return {WAITED_MS: waited} if OPTIMIZERS else {}


wrap_training_log = logs(_waited, on_every_rank=True)
