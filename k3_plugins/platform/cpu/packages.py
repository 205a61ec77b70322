"""Packages whose kernels exist for CUDA only are treated as not installed.

Megatron prefers Transformer Engine and apex wherever they import. On a GPU machine they do, and then reject CPU tensors
in the first optimizer step.
"""

from __future__ import annotations

import importlib.util
import sys

_CUDA_ONLY = (
    "transformer_engine",
    "apex",
    "amp_C",
    "flash_attn",
    "flash_attn_3",
    "flash_mla",
    "flashattn_hopper",
    "causal_conv1d",
    "mamba_ssm",
    "grouped_gemm",
    "deep_ep",
)


def install() -> list[str]:
    """Make importing an installed CUDA-only package raise ModuleNotFoundError; returns the names of those hidden."""
    hidden = [name for name in _CUDA_ONLY if name not in sys.modules and importlib.util.find_spec(name) is not None]
    # None in sys.modules is Python's own marker for "do not import"; find_spec honours it too.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # typeshed leaves out None
    return hidden
