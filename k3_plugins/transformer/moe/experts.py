"""Routed experts as two stacked weights, computed as segment GEMMs; takes the experts' slot of Megatron's MoELayer.

Checkpoints are interchangeable with Megatron's ``SequentialMLP`` and ``TEGroupedMLP`` and across expert-parallel and
expert-tensor-parallel sizes: the stacked tensors are described as slices of ``[E, 2 f, l]`` and ``[E, l, f]``.

Letters: E experts in all, g on this rank, n rows, l input and output width (latent or hidden), f expert width,
t expert-tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedStateDict, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from k3_plugins.transformer.moe.ops.activation import GatedActivation
from k3_plugins.transformer.moe.ops.grouped_mlp import grouped_mlp
from k3_plugins.transformer.moe.ops.rounding import EXACT, Rounding
from k3_plugins.transformer.norm import parameter_device


class GroupedExperts(MegatronModule):
    """The local experts of a mixture-of-experts layer.

    Args:
        num_local_experts: g.
        config: read for sizes, initialisation, dtype and device.
        activation: the gated activation.
        width: l; None takes ``config.hidden_size``.
        pg_collection: read for ``ep``, ``expt_tp`` and ``expt_dp``.
        name: not used.

    Raises:
        ValueError: with linear biases, an ungated unit, or widths that the parallel sizes do not divide.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        activation: GatedActivation,
        pg_collection: ProcessGroupCollection,
        width: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        del name
        if config.add_bias_linear:
            raise ValueError("stacked experts have no biases; pass --disable-bias-linear.")
        if not config.gated_linear_unit:
            raise ValueError("stacked experts are gated feed-forward networks; pass --swiglu.")
        if config.moe_apply_probs_on_input:
            raise ValueError("--moe-apply-probs-on-input is not supported by stacked experts; drop it.")
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        shards = self.tp_group.size()
        if config.moe_ffn_hidden_size % shards:
            raise ValueError(
                f"--moe-ffn-hidden-size {config.moe_ffn_hidden_size} cannot be split over "
                f"--expert-tensor-parallel-size {shards}."
            )
        self.num_local_experts = num_local_experts
        self.activation = activation
        self.width = width or config.hidden_size
        self.ffn = config.moe_ffn_hidden_size // shards
        self.weight1 = self._parameter(2 * self.ffn, self.width, partition_dim=1, stride=2)
        self.weight2 = self._parameter(self.width, self.ffn, partition_dim=2, stride=1)
        if config.perform_initialization:
            self.reset_parameters()

    def _parameter(self, rows: int, columns: int, partition_dim: int, stride: int) -> nn.Parameter:
        shape = (self.num_local_experts, rows, columns)
        # Any, as in `_draw_on_cpu`: Megatron marks parameters with attributes of its own.
        weight: Any = nn.Parameter(
            torch.empty(shape, dtype=self.config.params_dtype, device=parameter_device(self.config))
        )
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=partition_dim, stride=stride)
        # Reduced over the expert-DP group wherever that is another one: as Megatron's parallel linear layers are.
        config = self.config
        own_group = config.expert_model_parallel_size > 1
        weight.allreduce = not (own_group or config.expert_tensor_parallel_size != config.tensor_model_parallel_size)
        return weight

    def reset_parameters(self) -> None:
        """Draw the weights as Megatron's experts do, expert by expert.

        On the CPU every rank draws all E experts and keeps its own, so that every parallel layout starts from the same
        weights.
        """
        config = self.config
        plans = ((self.weight1, config.init_method), (self.weight2, config.output_layer_init_method))
        if config.use_cpu_initialization:
            first = self.ep_group.rank() * self.num_local_experts
            for e in range(self.ep_group.size() * self.num_local_experts):
                for weight, init in plans:
                    self._draw_on_cpu(weight, init, e - first)
            return
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            for e in range(self.num_local_experts):
                for weight, init in plans:
                    init(weight.data[e])

    @torch.no_grad()
    def _draw_on_cpu(self, weight: Any, init: Callable[[Tensor], None], index: int) -> None:
        shards, rank = self.tp_group.size(), self.tp_group.rank()
        shape = list(weight.shape[1:])
        shape[weight.partition_dim - 1] *= shards
        whole = torch.empty(shape)  # fp32, rounded once
        init(whole)
        if 0 <= index < self.num_local_experts:
            pieces = whole.chunk(shards * weight.partition_stride, dim=weight.partition_dim - 1)
            weight[index].copy_(torch.cat(pieces[rank::shards], dim=weight.partition_dim - 1))

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """``[n, l]`` to ``[n, l]``, weighted by ``probs [n]``; rows sorted by expert, ``tokens_per_expert [g]``."""
        ends = tokens_per_expert.to(hidden.device).cumsum(0).to(torch.int32)
        output = grouped_mlp(hidden, probs, self.weight1, self.weight2, ends, self.activation, self.rounding)
        return output, None

    @property
    def rounding(self) -> Rounding:
        """What happens to the operands of the GEMMs; quantization-aware training overrides this."""
        return EXACT

    def backward_dw(self) -> None:
        """Weight gradients are part of the backward pass; there is nothing left to do."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """The two stacks as slices of the global ``[..., E, 2 f, l]`` and ``[..., E, l, f]``.

        Raises:
            ValueError: for checkpoints that keep every expert as a tensor of its own (``singleton_local_shards``).
        """
        if (metadata or {}).get("singleton_local_shards", False):
            raise ValueError(
                "stacked experts are saved as slices of one tensor; the format with one tensor per expert "
                "(singleton_local_shards) is not supported."
            )
        outer = len(sharded_offsets)
        experts = (outer, self.ep_group.rank(), self.ep_group.size())
        rank, shards = self.tp_group.rank(), self.tp_group.size()
        replica = (0, 0, self.dp_group.rank())

        def slices(key: str, whole: Tensor, axis: int, parts: int, replica_id: ReplicaId) -> list[ShardedTensor]:
            """``parts`` halves (gate, up) of a stack, each cut over the tensor-parallel ranks along ``axis``."""
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    piece.contiguous(),
                    *sharded_offsets,
                    experts,
                    (outer + axis, part * shards + rank, parts * shards),
                    replica_id=replica_id,
                    prepend_axis_num=outer,
                )
                for part, piece in enumerate(whole.chunk(parts, dim=axis))
            ]

        def describe(name: str, weight: Tensor, axis: int, parts: int) -> ShardedTensorFactory:
            @torch.no_grad()
            def build(key: str, data: Tensor, replica_id: ReplicaId, _range: slice | None) -> list[ShardedTensor]:
                return slices(key, data, axis, parts, replica_id)

            def merge(pieces: list[Tensor]) -> Tensor:
                return torch.cat(pieces, dim=axis)

            # SequentialMLP's keys: `<layer>.mlp.experts.experts.linear_fc1.weight`.
            return ShardedTensorFactory(f"{prefix}experts.{name}.weight", weight, build, merge, replica)

        return {
            f"{prefix}weight1": describe("linear_fc1", self.weight1, axis=1, parts=2),
            f"{prefix}weight2": describe("linear_fc2", self.weight2, axis=2, parts=1),
        }
