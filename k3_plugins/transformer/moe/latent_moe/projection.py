"""The two shared projections of LatentMoE, with the norm before the second, for tensor and sequence parallelism.

Megatron's own latent projections need Transformer Engine and have no norm. Under tensor parallelism Megatron trains MoE
layers on sequence shards only, so each rank multiplies its own tokens by the WHOLE matrix, and the weight gradient is
the sum over ranks. ``duplicated`` keeps the matrix on every rank (Megatron sums the gradients of parameters marked
``sequence_parallel``); ``sharded`` keeps a slice of the rows and gathers them for each use, with a reduce-scatter of
the gradient.

Letters: s sequence (shard), b batch, i input width, o output width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from k3_plugins.transformer.norm import RMSNorm, mark_sequence_parallel, parameter_device


class LatentProjection(MegatronModule):
    """``W RMSNorm(x)`` or ``W x``, bias-free, in the return convention of Megatron's linear layers.

    Args:
        input_size: i.
        output_size: o.
        config: read for dtype, device, initialisation and sequence parallelism.
        pg_collection: read for ``tp``.
        init_method: how the weight is drawn.
        sharded: keep ``o / TP`` rows of the weight on each tensor-parallel rank.
        norm_eps: epsilon of an RMSNorm on the input; None for no norm.

    Raises:
        ValueError: sharded, and TP does not divide ``o``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        init_method: Callable[[Tensor], None],
        *,
        sharded: bool,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.sharded = sharded and self.tp_group.size() > 1
        self.init_method = init_method
        if self.sharded and output_size % self.tp_group.size():
            raise ValueError(
                f"--moe-latent-projection sharded: width {output_size} cannot be split over "
                f"--tensor-model-parallel-size {self.tp_group.size()}; use duplicated."
            )
        rows = output_size // self.tp_group.size() if self.sharded else output_size
        shape = (rows, input_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=parameter_device(config)))
        if self.sharded:
            set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        else:
            mark_sequence_parallel(self.weight, config.sequence_parallel)
        self.norm = None
        if norm_eps is not None:
            self.norm = RMSNorm(config, input_size, norm_eps)
        if config.perform_initialization:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the whole matrix in fp32 from the generator that all tensor-parallel ranks share, and keep a slice."""
        shards = self.tp_group.size() if self.sharded else 1
        whole = torch.empty(
            self.weight.shape[0] * shards, self.weight.shape[1], dtype=torch.float32, device=self.weight.device
        )
        self.init_method(whole)
        rank = self.tp_group.rank() if self.sharded else 0
        self.weight.copy_(whole.chunk(shards)[rank])

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """``[s, b, i]`` to ``[s, b, o]``."""
        if self.norm is not None:
            x = self.norm(x)
        weight = self.weight
        if self.sharded:
            # Backward: reduce-scatter of the ranks' gradients where they hold different tokens, else this rank's rows.
            weight = gather_from_sequence_parallel_region(
                weight, tensor_parallel_output_grad=self.config.sequence_parallel, group=self.tp_group
            )
        return nn.functional.linear(x, weight), None

    def backward_dw(self) -> None:
        """Weight gradients are part of the backward pass; there is nothing left to do."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """The whole matrix in either form, so that checkpoints move between them and between TP sizes."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0} if self.sharded else {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
