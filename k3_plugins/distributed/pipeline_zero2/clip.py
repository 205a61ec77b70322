"""Norm and clipping of gradients in host memory, around Megatron's functions. Imports neither torch nor megatron.

Megatron's clipping asserts CUDA tensors and the kernels behind its norm take nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class _InHostMemory:
    params: set[int] = field(default_factory=set)
    """ids of master-weight shards; they live as long as the optimizer, which is as long as the process."""
    gradients: set[int] = field(default_factory=set)
    """Addresses of the memory their gradients lie in."""


IN_HOST_MEMORY = _InHostMemory()


def norm_with_host_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for `get_grad_norm_fp32`: gradients in host memory enter as one number, their norm."""

    @functools.wraps(original)
    def get_grad_norm_fp32(
        grads_for_norm: Sequence[torch.Tensor] | torch.Tensor,
        norm_type: float = 2,
        grad_stats_parallel_group: Any = None,
    ) -> Any:
        import torch

        if not IN_HOST_MEMORY.gradients or isinstance(grads_for_norm, torch.Tensor):
            return original(grads_for_norm, norm_type, grad_stats_parallel_group)
        mine = [grad for grad in grads_for_norm if grad.untyped_storage().data_ptr() in IN_HOST_MEMORY.gradients]
        others = [grad for grad in grads_for_norm if grad.untyped_storage().data_ptr() not in IN_HOST_MEMORY.gradients]
        if mine:
            norms = torch.stack([torch.linalg.vector_norm(grad, norm_type) for grad in mine])
            norm = torch.linalg.vector_norm(norms, norm_type)
            others.append(torch.tensor([norm.item()], dtype=torch.float32, device=torch.cuda.current_device()))
        return original(others, norm_type, grad_stats_parallel_group)

    return get_grad_norm_fp32


def clip_with_host_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Patch body for `clip_grad_by_total_norm_fp32`: gradients in host memory are scaled there."""

    @functools.wraps(original)
    def clip_grad_by_total_norm_fp32(
        parameters: Sequence[torch.Tensor] | torch.Tensor,
        max_norm: float,
        total_norm: float,
        use_decoupled_grad: bool = False,
    ) -> None:
        import torch

        if not IN_HOST_MEMORY.params or isinstance(parameters, torch.Tensor):
            return original(parameters, max_norm, total_norm, use_decoupled_grad)
        parameters = list(parameters)
        others = [param for param in parameters if id(param) not in IN_HOST_MEMORY.params]
        if others or not parameters:
            original(others, max_norm, total_norm, use_decoupled_grad)
        factor = float(max_norm / (total_norm + 1.0e-6))  # Megatron's formula
        if factor < 1.0:
            for param in parameters:
                if id(param) in IN_HOST_MEMORY.params and param.grad is not None:
                    param.grad.mul_(factor)
        return None

    return clip_grad_by_total_norm_fp32
