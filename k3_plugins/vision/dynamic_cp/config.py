"""Flags of the encoder's context parallelism. This module imports neither torch nor megatron."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DynamicCPConfig:
    """How the encoder's work is divided over ranks."""

    dynamic_cp_imbalance: float = field(default=1.05, metadata={"changes_parameters": False})
    """Largest load of a rank over the mean load from which on no further image or video is split."""
