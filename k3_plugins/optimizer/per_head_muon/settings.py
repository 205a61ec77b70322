"""The numbers of Muon: Moonlight's conventions, with Megatron's ``--muon-*`` flags on top.

Moonlight (arXiv 2502.16982): 5 Newton-Schulz steps with (3.4445, -4.7750, 2.0315), Nesterov momentum 0.95, an update of
0.2 * sqrt(max(rows, columns)) * orthogonal, which has the root mean square of an AdamW update, and decoupled weight
decay. The momentum here is the running mean m <- mu m + (1 - mu) g, as in Megatron's Muon; Moonlight's sum differs from
it by the constant factor 1 - mu, which orthogonalisation removes.

Imports neither torch nor megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3_plugins.optimizer.per_head_muon.config import PerHeadMuonConfig

MOONLIGHT: dict[str, Any] = {
    "muon_momentum": 0.95,
    "muon_coefficient_type": "simple",
    "muon_num_ns_steps": 5,
    "muon_scale_mode": "spectral",
    "muon_extra_scale_factor": 0.2,
    "muon_tp_mode": "duplicated",
}
"""What Megatron's flags default to while the feature is on, by argparse destination."""


@dataclass(frozen=True)
class MuonSettings:
    """Everything the optimizer needs to know, resolved."""

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    coefficients: str = "simple"
    scale_mode: str = "spectral"
    extra_scale: float = 0.2
    matmul_precision: str = "medium"
    """``medium`` iterates in bf16, as Moonlight does; ``high`` in TF32 or fp32."""
    per_head: bool = True
    split_qkv: bool = True
    """False (``--muon-no-split-qkv``) takes a fused query-key-value projection as one matrix."""
    owner: str = "balanced"
    batch_elements: int = 2**26
    adamw_lr: float | None = None
    adamw_min_lr: float | None = None
    adamw_checkpoint: str = "refuse"

    @classmethod
    def resolve(cls, optimizer_config: Any, flags: PerHeadMuonConfig) -> MuonSettings:
        """From Megatron's ``OptimizerConfig`` (or its argument namespace) and the feature's flags."""
        return cls(
            momentum=optimizer_config.muon_momentum,
            nesterov=not flags.muon_heavy_ball,
            steps=optimizer_config.muon_num_ns_steps,
            coefficients=optimizer_config.muon_coefficient_type,
            scale_mode=optimizer_config.muon_scale_mode,
            extra_scale=optimizer_config.muon_extra_scale_factor,
            matmul_precision=optimizer_config.muon_fp32_matmul_prec,
            per_head=flags.muon_per_head,
            split_qkv=optimizer_config.muon_split_qkv,
            owner=flags.muon_owner,
            batch_elements=flags.muon_batch_elements,
            adamw_lr=flags.muon_adamw_lr,
            adamw_min_lr=flags.muon_adamw_min_lr,
            adamw_checkpoint=flags.muon_adamw_checkpoint,
        )
