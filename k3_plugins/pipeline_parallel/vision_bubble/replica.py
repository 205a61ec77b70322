"""The encoder on every pipeline rank: stage 0's is the model's, the others follow it.

Only stage 0's encoder is part of the model, so that the optimizer, the gradient norm and the checkpoint see it once,
as without this feature. Before a step the others take its weights; after a step's last encoder backward their
gradients are added to its own, ahead of Megatron's reduction over data parallelism.

Where the model's own parameters take gradients only inside their chunk's backward pass (pipeline-zero2), stage 0 too
computes with a copy beside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from k3_plugins.vision.moonvit.encoder import MoonViT


class Replica:
    """One rank's encoder.

    Args:
        encoder: what computes: the model's own, or one with any weights.
        source: the model's own, on pipeline rank 0.
        group: the pipeline's ranks.
        device: where it computes.
        trained: whether gradients are wanted.
        add_gradients: on pipeline rank 0, if ``encoder`` is a copy there: takes the step's gradients of the source's
            parameters, fp32.
    """

    def __init__(
        self,
        encoder: MoonViT,
        source: MoonViT | None,
        group: ProcessGroup,
        device: torch.device,
        trained: bool,
        add_gradients: Callable[[Mapping[nn.Parameter, Tensor]], None] | None = None,
    ) -> None:
        self.encoder, self.group, self.trained = encoder, group, trained
        self.is_source = encoder is source
        self._add_gradients = add_gradients
        self._current = False
        dtypes = [[(name, parameter.dtype) for name, parameter in (source or encoder).named_parameters()]]
        dist.broadcast_object_list(dtypes, group=group, group_src=0, device=device)
        if not self.is_source:
            self._become_like(dict(dtypes[0]), device)
        self.parameters = list(encoder.parameters())
        self.source_parameters = None if source is None else list(source.parameters())

    def _become_like(self, dtypes: dict[str, torch.dtype], device: torch.device) -> None:
        """Take device and dtypes of the source (Megatron converts the model after it is built), and make gradients."""
        named = dict(self.encoder.named_parameters())
        if named.keys() != dtypes.keys():
            raise RuntimeError(
                f"vision-bubble: the encoders of the pipeline ranks differ in {sorted(named.keys() ^ dtypes.keys())}"
            )
        for name, parameter in named.items():
            parameter.data = parameter.data.to(device=device, dtype=dtypes[name])
        self.encoder.requires_grad_(self.trained)
        if not self.trained:
            return
        self._gradients = torch.zeros(sum(p.numel() for p in named.values()), device=device)
        start = 0
        for parameter in named.values():
            # fp32 sums over micro-batches, under the name that fused kernels write to.
            parameter.main_grad = self._gradients[start : start + parameter.numel()].view(parameter.shape)
            parameter.grad_added_to_main_grad = False
            parameter.register_post_accumulate_grad_hook(_accumulate)
            start += parameter.numel()

    def outdated(self) -> None:
        """The source's weights are about to change."""
        self._current = self._current and not self.trained

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the source's weights, unless nothing has changed since. Collective over the pipeline."""
        if self._current:
            return
        sources = self.source_parameters or self.parameters
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.parameters):
            flat = torch.cat([parameter.flatten() for parameter in sources if parameter.dtype == dtype])
            dist.broadcast(flat, group=self.group, group_src=0)
            if not self.is_source:
                _scatter(flat, [parameter for parameter in self.parameters if parameter.dtype == dtype])
        self._current = True

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Add all ranks' gradients of the step to the source's. Collective over the pipeline."""
        if self.is_source:
            gradients = [parameter.main_grad for parameter in self.parameters]
            flat = torch.cat([gradient.flatten().float() for gradient in gradients])
            dist.reduce(flat, group=self.group, group_dst=0)
            _scatter(flat, gradients)
            return
        dist.reduce(self._gradients, group=self.group, group_dst=0)
        if self.source_parameters is not None:
            assert self._add_gradients is not None, "stage 0 computes with a copy"
            sums = [parameter.main_grad for parameter in self.parameters]
            self._add_gradients(dict(zip(self.source_parameters, sums, strict=True)))
        self._gradients.zero_()
        for parameter in self.parameters:
            parameter.grad_added_to_main_grad = False


def _accumulate(parameter: Any) -> None:
    """As Megatron's DistributedDataParallel does; a fused kernel may have written the gradient already."""
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
