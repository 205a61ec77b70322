"""Tensor and sequence parallelism for attention layers that read one input through many projections.

Megatron's ``ColumnParallelLinear`` communicates on its own: six projections of one input would gather the sequence six
times and reduce six input gradients. Here the input enters the tensor-parallel region ONCE (``enter_region``) and the
projections are purely local. Low-rank "down" projections are replicated, as Transformer Engine's
``parallel_mode="duplicated"`` does, and their narrow output enters the region instead of the wide input.

Shapes: s sequence (s/TP under sequence parallelism before the region), b batch, d input width, o output width.
"""

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from k3_plugins.transformer.norm import mark_sequence_parallel, parameter_device


def enter_region(x: Tensor, config: TransformerConfig, tp_group: ProcessGroup) -> Tensor:
    """Hand a tensor to computation that is split by heads over the tensor-parallel group.

    Forward: the whole sequence on every rank. Backward: the sum over ranks of the partial gradients, each rank keeping
    its sequence shard under sequence parallelism.

    Args:
        x: ``[s, b, d]``, or ``[s/TP, b, d]`` under sequence parallelism.

    Returns:
        ``[s, b, d]``.
    """
    if config.sequence_parallel and tp_group.size() > 1:
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=tp_group)
    return copy_to_tensor_model_parallel_region(x, group=tp_group)


def share_over_region(weight: Tensor, tp_group: ProcessGroup) -> Tensor:
    """A replicated parameter in head-sharded computation: identity forward, gradient summed over ranks backward."""
    return copy_to_tensor_model_parallel_region(weight, group=tp_group)


def local_column_linear(
    input_size: int,
    output_size: int,
    config: TransformerConfig,
    tp_group: ProcessGroup,
    *,
    bias: bool = False,
    init_method: Callable[[Tensor], None] | None = None,
    name: str | None = None,
) -> ColumnParallelLinear:
    """A ``ColumnParallelLinear`` that neither gathers its input nor reduces its input's gradient.

    Its weight, initialisation and checkpoint layout stay Megatron's. The input must come from ``enter_region``.
    """
    linear = ColumnParallelLinear(
        input_size,
        output_size,
        config=config,
        init_method=init_method or config.init_method,
        bias=bias,
        gather_output=False,
        skip_bias_add=False,
        is_expert=False,
        disable_grad_reduce=True,
        tp_group=tp_group,
        name=name,
    )
    linear.sequence_parallel = False
    return linear


class ReplicatedLinear(nn.Module):
    """A bias-free linear layer whose weight is the same on every tensor-parallel rank.

    Under sequence parallelism it runs on the rank's sequence shard and Megatron sums its weight gradient over the
    group (``weight.sequence_parallel``); otherwise every rank computes the same, complete gradient, provided the
    output enters the head-sharded part through ``enter_region``.
    """

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig) -> None:
        super().__init__()
        self.init_method = config.init_method
        shape = (output_size, input_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=parameter_device(config)))
        mark_sequence_parallel(self.weight, config.sequence_parallel)
        if config.perform_initialization:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from the default generator, which Megatron seeds alike on all tensor-parallel ranks.

        The draw is made in fp32 and rounded once, as Megatron's CPU initialisation does, so that bf16 and fp32 runs
        start from the same numbers.
        """
        with torch.no_grad():
            master = torch.empty_like(self.weight, dtype=torch.float32)
            self.init_method(master)
            self.weight.copy_(master)

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, d]`` to ``[s, b, o]``."""
        return nn.functional.linear(x, self.weight)
