"""Flags of the ``moonep`` feature. This module imports neither torch nor megatron."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoonEPConfig:
    """Expert parallelism in which every rank computes the same number of tokens."""

    moe_moonep_memory_efficient: bool = True
    """Keep only the dispatch input of the routed experts for the backward pass, and send the rows a second time there.
    Without it the received rows and the experts' hidden layer are kept."""
