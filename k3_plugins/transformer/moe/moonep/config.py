"""Flags of the ``moonep`` feature. This module imports neither torch nor megatron."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MoonEPConfig:
    """Expert parallelism in which every rank computes the same number of tokens."""

    moe_moonep_memory_efficient: bool = True
    """Keep only the dispatch input of the routed experts for the backward pass, and send the rows a second time there.
    Without it the received rows and the experts' hidden layer are kept."""

    moe_moonep_overlap: bool = True
    """Compute the latent projection and the shared experts while counts, weights and rows travel, forward and backward.
    Without it every exchange is waited for; the results are the same."""

    moe_moonep_transport: Literal["torch", "moonep"] = "torch"
    """What moves rows and weights: torch.distributed collectives (gloo, NCCL), or the kernels of the public moonep
    package (GPUs with NVLink, bf16)."""
