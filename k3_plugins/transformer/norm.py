"""RMSNorm for every place a K3 layer needs one.

Megatron's torch norm (``WrappedTorchNorm``) refuses sequence parallelism and Transformer Engine's needs a GPU; this one
runs on any device and marks its weight for Megatron's sequence-parallel gradient all-reduce.
"""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


def parameter_device(config: TransformerConfig) -> torch.device | str | int:
    """Where Megatron wants new parameters: the meta device, the CPU, or this rank's GPU."""
    if config.init_model_with_meta_device:
        return "meta"
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def mark_sequence_parallel(parameter: nn.Parameter, sharded: bool) -> None:
    """Say whether a parameter sees a sequence shard only, so that Megatron sums its gradient over the TP group."""
    marked: Any = parameter
    marked.sequence_parallel = sharded


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension in at least fp32, weight included; the result keeps that precision.

    Args:
        x: ``[..., d]``, any floating dtype.
        weight: ``[d]``.
        eps: added to the mean square.

    Returns:
        ``[..., d]`` in fp32, or fp64 for fp64 inputs.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    return nn.functional.rms_norm(x.to(compute), (x.shape[-1],), weight.to(compute), eps)


class RMSNorm(nn.Module):
    """RMSNorm that satisfies Megatron's ``LayerNormBuilder`` protocol.

    Args:
        config: read for ``params_dtype``, ``sequence_parallel`` and ``use_cpu_initialization``.
        hidden_size: width of the last dimension.
        eps: added to the mean square.
        sequence_parallel: whether the input is a sequence shard under sequence parallelism, so that the weight's
            gradient must be summed over the tensor-parallel group. ``None`` follows the config.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, sequence_parallel: bool | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=parameter_device(config))
        )
        sharded = config.sequence_parallel and (sequence_parallel is None or sequence_parallel)
        mark_sequence_parallel(self.weight, sharded)

    def reset_parameters(self) -> None:
        """Set the weight to one (used by Megatron after a meta-device initialisation)."""
        with torch.no_grad():
            self.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d]`` to ``[..., d]``, in the input's dtype."""
        return rms_norm(x, self.weight, self.eps).to(x.dtype)
