"""The draft's input: outputs of three Attention Residual blocks, fused by one matrix.

Letters: s sequence, b batch, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

FUSED = 3
"""Blocks that are fused: the first, the fourth and the last."""


class BlockFusion(MegatronModule):
    """``W_E3 [h_1; h_4; h_last]``, without bias. ``W_E3 [d, 3 d]`` starts as ``[0 0 I]``: the result is the last one.

    Args:
        config: Megatron's; gives d and the dtype.
        saved: whether the checkpoint that is loaded holds the matrix. A target's does not: there it keeps its start.
    """

    def __init__(self, config: TransformerConfig, saved: bool) -> None:
        super().__init__(config=config)
        d = config.hidden_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.zeros(d, FUSED * d, dtype=config.params_dtype, device=device)
        weight[:, -d:].fill_diagonal_(1)
        self.weight = torch.nn.Parameter(weight)
        self.described = saved

    def forward(self, blocks: Sequence[Tensor]) -> Tensor:
        """``[s, b, d]`` from three of them."""
        return torch.nn.functional.linear(torch.cat(list(blocks), -1), self.weight)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Megatron's description for checkpoints; empty while weights of a target are loaded."""
        return super().sharded_state_dict(*args, **kwargs) if self.described else {}
