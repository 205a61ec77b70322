"""Names of saved tensors: the short path of the module that runs inside its layer, and what the code calls the tensor.

| Megatron's path in a layer | here |
|---|---|
| ``self_attention`` | ``attention`` |
| ``input_layernorm``, ``pre_mlp_layernorm`` | ``attention_norm``, ``mlp_norm`` |
| ``mlp.router``, ``mlp.experts``, ``mlp.shared_experts`` | ``router``, ``experts``, ``shared_experts`` |
| ``local_experts.3`` | left out: all experts have the same name |
| ``activation_func`` | ``act`` |

Outside of layers a module keeps its path in the model (``embedding.word_embeddings``, ``output_layer``). A tensor
without a name of its own is called ``saved``. This module imports neither torch nor megatron.
"""

from __future__ import annotations

import re

_STARTS = (
    ("self_attention", "attention"),
    ("input_layernorm", "attention_norm"),
    ("pre_mlp_layernorm", "mlp_norm"),
    ("mlp.router", "router"),
    ("mlp.experts", "experts"),
    ("mlp.shared_experts", "shared_experts"),
)
_LOCAL_EXPERT = re.compile(r"\.local_experts(\.\d+)?")

LABELS = ("saved", "act", "gate", "aggregate")
"""What our own layers call tensors, besides ``saved``."""


def short(path: str) -> str:
    """The name of a module, from its path inside its layer."""
    for long, brief in _STARTS:
        if path == long or path.startswith(f"{long}."):
            path = brief + path[len(long) :]
            break
    path = _LOCAL_EXPERT.sub("", path)
    return ".".join("act" if part == "activation_func" else part for part in path.split("."))
