"""Flags of the ``mxfp4-qat`` feature. This module imports neither torch nor megatron."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class MXFP4QATConfig:
    """Quantization-aware training of routed experts: weights in MXFP4, their inputs in MXFP8."""

    mxfp4_qat_backend: Literal["torch", "modelopt-cuda"] = field(
        default="torch", metadata={"changes_parameters": False}
    )
    """What rounds. torch runs on every device and equals the exported packed weights bit for bit; modelopt-cuda is
    ModelOpt's fused kernel, which is compiled with nvcc on first use."""
