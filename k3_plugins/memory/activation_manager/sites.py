"""Tells the manager where in the model a forward pass is, by hooks on its modules; no module is changed.

Every module announces its name when it begins and ends; a layer begins a new group. A module whose rule is RECOMPUTE
runs through `recompute.Call`. Mixture-of-experts layers announce ``experts`` around their routed computation, because a
balanced dispatcher computes without calling the experts' module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from k3_plugins.memory.activation_manager.manager import ActivationManager
from k3_plugins.memory.activation_manager.names import short
from k3_plugins.memory.activation_manager.recompute import Call
from k3_plugins.memory.annotation import Annotation
from k3_plugins.memory.policy import Policy


@dataclass(frozen=True)
class Layer:
    """A layer of a model chunk."""

    module: nn.Module
    path: str
    """Of the module in the chunk."""
    label: str
    number: int


def megatron_layers(chunk: nn.Module) -> list[Layer]:
    """The transformer layers of a chunk (without DDP and float16 wrappers), those of MTP depths numbered after."""
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer

    layers = []
    for path, module in chunk.named_modules():
        if isinstance(module, BaseTransformerLayer):
            if getattr(module, "is_mtp_layer", False):
                number = module.layer_number + module.config.num_layers
                layers.append(Layer(module, path, f"MTP depth {module.layer_number}", number))
            else:
                layers.append(Layer(module, path, f"layer {module.layer_number}", module.layer_number))
    return layers


class Attachment:
    """The hooks on one model chunk; `remove` takes them away.

    Args:
        manager: takes what is saved.
        number: of the chunk on this rank.
        chunk: the module whose forward pass is recorded.
        layers: where groups begin.
    """

    def __init__(self, manager: ActivationManager, number: int, chunk: nn.Module, layers: Sequence[Layer]) -> None:
        self.manager, self.number, self.chunk = manager, number, chunk
        self.names: set[tuple[str, int | None]] = set()
        """Names of modules, with their layer."""
        self._handles: list[Any] = []
        self._wrapped: list[tuple[Any, str]] = []
        self._counted: list[Any] = []
        self._in_layer = False
        self._open = False
        around = {""} | {path.rpartition(".")[0] for path in _prefixes(layer.path for layer in layers)}
        inner = {id(module): layer for layer in layers for module in layer.module.modules()}
        for layer in layers:
            self._attach_layer(layer)
        for path, module in chunk.named_modules():
            if id(module) not in inner and path:
                self.names.add((path, None))
                self._announce(module, functools.partial(self._enter_outside, path, path in around))
        self._handles.append(chunk.register_forward_pre_hook(self._begin, prepend=True))
        self._handles.append(chunk.register_forward_hook(self._end, always_call=True))

    def remove(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        for module, method in self._wrapped:
            delattr(module, method)

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _attach_layer(self, layer: Layer) -> None:
        hook = functools.partial(self._enter_layer, layer)
        self._handles.append(layer.module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        self._handles.append(layer.module.register_forward_hook(self._leave_layer, always_call=True))
        sites: list[str] = []
        for path, module in layer.module.named_modules():
            if not path:
                continue
            name = short(path)
            self.names.add((name, layer.number))
            self._announce(module, functools.partial(self._enter, name))
            rule = self.manager.rules.module(name, layer.number)
            if rule is not None and not any(path.startswith(f"{site}.") for site in sites):
                sites.append(path)
                self._wrap(module, "forward", functools.partial(self._recomputed, name, rule))
            if callable(getattr(module, "routed_experts_compute", None)):
                self.names.add(("experts", layer.number))
                self._wrap(module, "routed_experts_compute", functools.partial(self._within, "experts"))

    def _announce(self, module: nn.Module, enter: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _wrap(self, module: nn.Module, method: str, around: Callable[..., Any]) -> None:
        original = getattr(module, method)
        setattr(module, method, functools.wraps(original)(functools.partial(around, original)))
        self._wrapped.append((module, method))

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, _args: Any) -> None:
        if module.training and torch.is_grad_enabled() and self.manager.recording is None:
            tensors = [*self.chunk.parameters(), *self.chunk.buffers()]
            self.manager.begin(self.number, frozenset(tensor.untyped_storage()._cdata for tensor in tensors))
            self._in_layer, self._open = False, True

    def _end(self, *_: Any) -> None:
        if self._open:
            self._open = False
            self.manager.end()

    def _enter_layer(self, layer: Layer, _module: nn.Module, args: Any, kwargs: Any) -> None:
        recording = self.manager.recording
        if recording is not None:
            recording.open_group(layer.label, layer.number)
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            if isinstance(hidden, torch.Tensor):
                recording.group.input_elements = hidden.numel()
            recording.scopes.append("")
            self._in_layer = True
        elif torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            # Megatron's full recomputation runs the layer again inside of the backward pass
            self._counted.append(self.manager.counting())
            self._counted[-1].__enter__()

    def _leave_layer(self, *_: Any) -> None:
        if self.manager.recording is not None:
            self.manager.recording.scopes.pop()
        elif self._counted:
            self._counted.pop().__exit__(None, None, None)

    def _enter_outside(self, name: str, holds_layers: bool, *_: Any) -> None:
        recording = self.manager.recording
        if recording is not None:
            if self._in_layer and not holds_layers:
                recording.open_group("after the layers", None)
                self._in_layer = False
            recording.scopes.append(name)

    def _enter(self, name: str, *_: Any) -> None:
        if self.manager.recording is not None:
            self.manager.recording.scopes.append(name)

    def _leave(self, *_: Any) -> None:
        if self.manager.recording is not None:
            self.manager.recording.scopes.pop()

    def _within(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter(name)
        try:
            return original(*args, **kwargs)
        finally:
            self._leave()

    def _recomputed(self, name: str, rule: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recording = self.manager.recording
        if recording is None or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        call = Call(
            f"{name} ({recording.group.label})", original, args, kwargs, self.manager.counting, self.manager.random
        )
        if not call.inputs:
            return original(*args, **kwargs)
        self.manager.rules.hits[rule] += 1
        return call.apply(on_result=functools.partial(_annotate_result, recording, call))


def _annotate_result(recording: Any, call: Call, index: int, result: torch.Tensor) -> None:
    recording.annotate(result, Annotation(Policy.RECOMPUTE, recompute=(call.value, index)))


def _prefixes(paths: Iterable[str]) -> Iterator[str]:
    """Every path and the paths above it."""
    for path in paths:
        while path:
            yield path
            path = path.rpartition(".")[0]
