"""Applies QK-clip to whatever Megatron's optimizers hold: whole parameters, fp32 masters, or their shards.

The clip comes after the optimizer's own update and before the masters are copied and gathered into the model, so that
every rank's model weights are again the rounded masters, and the distributed optimizer's all-gather carries the clipped
values. Maxima are reduced over data and context parallel ranks; tensor-parallel ranks hold different heads.

Shapes: n heads of one attention on this tensor-parallel rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from k3_plugins.feature import FeatureError
from k3_plugins.optimizer.qk_clip.heads import ClippedAttention, clipped_attentions


class QKClip:
    """The clip of one model on this rank.

    Args:
        model_chunks: Megatron's list of model chunks.
        threshold: tau, the largest logit that is left alone.
        alpha: share of the factor that the query takes where query and key can share it.
        group: ranks that see other tokens with the same weights (data and context parallel).
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        threshold: float,
        alpha: float,
        group: torch.distributed.ProcessGroup,
    ) -> None:
        self.attentions: list[ClippedAttention] = clipped_attentions(model_chunks, alpha)
        self.threshold = threshold
        self.group = group
        self.device = next(model_chunks[0].parameters()).device
        self.last_maxima: Tensor | None = None
        """All heads' maxima of the last step, over the group; None before the first."""
        self._eta: list[Tensor] = []

    def begin_step(self) -> None:
        """Reduce the step's maxima (one all-reduce for all layers) and compute the heads' factors."""
        if not self.attentions:
            return
        taken = [attention.take() for attention in self.attentions]
        values = [
            torch.full((attention.heads,), -torch.inf, device=self.device) if value is None else value.float()
            for attention, value in zip(self.attentions, taken, strict=True)
        ]
        maxima = torch.cat(values)
        torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX, group=self.group)
        self.last_maxima = maxima
        # An overflow ends or skips the step by Megatron's own checks; it must not set a head to zero here.
        over = maxima.isfinite() & (maxima > self.threshold)
        eta = torch.where(over, self.threshold / maxima, 1.0)
        self._eta = list(eta.split([attention.heads for attention in self.attentions]))

    def summary(self) -> tuple[float, float]:
        """(largest logit, number of clipped heads) of the last step over the whole model; a collective of all ranks."""
        device = self.device
        maxima = torch.full((1,), -torch.inf, device=device) if self.last_maxima is None else self.last_maxima
        largest = maxima.max()
        # every data-parallel rank has the reduced maxima of the same heads
        clipped = (maxima.isfinite() & (maxima > self.threshold)).sum().float() / self.group.size()
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        torch.distributed.all_reduce(clipped)
        return largest.item(), round(clipped.item())

    def end_step(self) -> None:
        """Forget the factors; an optimizer that copies its masters again later copies them as they are."""
        self._eta = []

    @torch.no_grad()
    def apply(self, optimizer: Any) -> None:
        """Scale the rows that one of Megatron's optimizers (not a chain of them) owns on this rank."""
        if not self._eta:
            return
        held = _stepped(optimizer)
        for attention, eta in zip(self.attentions, self._eta, strict=True):
            for rows in attention.rows:
                for values, first in _owned(optimizer, rows.parameter, held):
                    width = rows.parameter.numel() // rows.parameter.shape[0]
                    row = torch.arange(first, first + values.numel(), device=values.device) // width
                    values.view(-1).mul_(rows.factors(eta).to(values)[row])


def _stepped(optimizer: Any) -> set[int]:
    """ids of the tensors that the inner optimizer steps; none where every parameter of this rank is frozen."""
    inner = optimizer.optimizer
    return set() if inner is None else {id(values) for group in inner.param_groups for values in group["params"]}


def _owned(optimizer: Any, parameter: torch.nn.Parameter, held: set[int]) -> Iterator[tuple[Tensor, int]]:
    """(values to update, flat index of the first one in the parameter), nothing for another optimizer's parameter."""
    if hasattr(optimizer, "model_param_gbuf_map"):
        if parameter not in optimizer.model_param_gbuf_map:
            return
        # What the inner optimizer updates: an fp32 master, a view of an fp32 parameter, or a copy of either elsewhere.
        place = optimizer._get_model_param_range_map(parameter)["param"]
        group, order = optimizer.model_param_group_index_map[parameter]
        yield optimizer.optimizer.param_groups[group]["params"][order], place.start
        return
    master = getattr(parameter, "main_param", None)
    values = parameter if master is None else master
    if id(values) in held:
        yield values, 0


def attach(clip: QKClip, optimizer: Any) -> None:
    """Run the clip inside every step of an optimizer that `get_megatron_optimizer` returned.

    Raises:
        FeatureError: if the optimizer steps some clipped weights on no rank that can be reached.
    """
    leaves = getattr(optimizer, "chained_optimizers", [optimizer])
    _require_all_rows(clip, leaves)
    for leaf in leaves:
        # FP32Optimizer has no separate masters and therefore no copy into the model.
        name = "_copy_main_params_to_model_params"
        if hasattr(leaf, name):
            setattr(leaf, name, _before(functools.partial(clip.apply, leaf), getattr(leaf, name)))
        else:
            leaf.step_with_ready_grads = _after(functools.partial(clip.apply, leaf), leaf.step_with_ready_grads)
    step = optimizer.step

    @functools.wraps(step)
    def clipped_step(*args: Any, **kwargs: Any) -> Any:
        clip.begin_step()
        try:
            return step(*args, **kwargs)
        finally:
            clip.end_step()

    optimizer.step = clipped_step


def _require_all_rows(clip: QKClip, leaves: Sequence[Any]) -> None:
    """A clip that finds nothing to scale would be silent (frozen weights stay). Collective over the clip's group."""
    rows = [(attention.name, item.parameter) for attention in clip.attentions for item in attention.rows]
    rows = [(name, parameter) for name, parameter in rows if parameter.requires_grad]
    if not rows:
        return
    found = torch.zeros(len(rows), dtype=torch.int64, device=clip.device)
    for leaf in leaves:
        held = _stepped(leaf)
        for index, (_, parameter) in enumerate(rows):
            found[index] += sum(values.numel() for values, _ in _owned(leaf, parameter, held))
    torch.distributed.all_reduce(found, group=clip.group)
    for (name, parameter), count in zip(rows, found.tolist(), strict=True):
        if count < parameter.numel():
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
            raise FeatureError(
                f"qk-clip: {kinds} steps {count} of the {parameter.numel()} query and key weights of {name} where they "
                "can be scaled; use --optimizer adam with --use-distributed-optimizer, or drop qk-clip from "
                "--k3-plugins"
            )


def _before(action: Any, original: Any) -> Any:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action()
        return original(*args, **kwargs)

    return wrapped


def _after(action: Any, original: Any) -> Any:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        action()
        return result

    return wrapped
