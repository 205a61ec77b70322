"""The KDA operator: `kda` over whole sequences, `kda_step` for one token, `kda_gate` for the decay."""

from k3_plugins.transformer.kda.ops.dispatch import BACKENDS, KDABackendError, kda, resolve_backend
from k3_plugins.transformer.kda.ops.gate import kda_gate
from k3_plugins.transformer.kda.ops.naive import kda_step

__all__ = ["BACKENDS", "KDABackendError", "kda", "kda_gate", "kda_step", "resolve_backend"]
