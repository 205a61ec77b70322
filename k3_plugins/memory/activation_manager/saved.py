"""What autograd holds in place of a tensor, the groups of such things, and how they become tensors again."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from k3_plugins.memory.activation_manager.errors import ActivationError
from k3_plugins.memory.activation_manager.ledger import Ledger
from k3_plugins.memory.activation_manager.span import Span, View
from k3_plugins.memory.activation_manager.stored import Rebuilt, Stored


class Group:
    """What was saved between the beginnings of two layers."""

    def __init__(self, label: str, number: int | None, previous: Group | None) -> None:
        self.index: int = 0 if previous is None else previous.index + 1
        self.label = label
        self.number = number
        self.previous = previous
        self.input_elements = 0
        """Of the layer's hidden state."""
        self.saved: list[weakref.ref[Saved]] = []
        self.stored: list[weakref.ref[Stored]] = []
        self._started = False

    def begin_backward(self) -> None:
        """Fetch this group, and the one whose backward pass comes next."""
        if not self._started:
            self._started = True
            self.fetch()
            if self.previous is not None:
                self.previous.fetch()

    def fetch(self) -> None:
        """Start to bring everything back."""
        for reference in self.stored:
            if (stored := reference()) is not None and stored.waiting[self.index] > 0:
                stored.fetch()
        self.stored.clear()


class Saved:
    """What autograd holds in place of a tensor."""

    def __init__(self, tensor: Tensor, scope: str, group: Group, ledger: Ledger) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.view = View.of(tensor)
        self.scope = scope
        self.group = group
        self.form: Stored | Rebuilt | None = None
        self.start = 0
        """Element of the storage at which `form` begins."""
        self.error: str | None = None
        self.ledger = ledger
        self.held: int | None = ledger.hold(tensor.untyped_storage())

    @property
    def original(self) -> Tensor:
        """The tensor, until `become` lets go of it."""
        assert self.tensor is not None
        return self.tensor

    @property
    def span(self) -> Span:
        """The elements it covers."""
        return (self.original.untyped_storage()._cdata, self.view.offset, self.view.extent, self.view.dtype)

    def become(self, form: Stored | Rebuilt, start: int) -> None:
        """Let go of the tensor."""
        self.form, self.start = form, start
        form.waiting[self.group.index] += 1
        self.tensor = None
        self.release()

    def release(self) -> None:
        """The storage does not count any more."""
        if self.held is not None:
            self.ledger.release(self.held)
            self.held = None

    def __del__(self) -> None:
        self.release()


class Parameter:
    """What autograd holds in place of a parameter or a buffer of the model: the tensor itself."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version


def saved_or_parameter(
    tensor: Tensor, scope: str, group: Group, ledger: Ledger, parameters: frozenset[int]
) -> Saved | Parameter | Tensor:
    """What takes the place of a tensor that autograd saves.

    Args:
        scope: the name of the module that runs.
        parameters: storages of parameters and buffers.
    """
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor.detach()
    if tensor.untyped_storage()._cdata in parameters:
        return Parameter(tensor)
    # detached: a node that saves its own result would otherwise keep itself alive
    return Saved(tensor.detach(), scope, group, ledger)


def restore(saved: Saved | Parameter | Any) -> Any:
    """The tensor that was saved, with the same bits unless its policy rounds them; other objects as they are.

    Raises:
        ActivationError: if it was changed in place since, or its bytes cannot be had.
    """
    if isinstance(saved, Parameter):
        check_version(saved.tensor, saved.version, "a parameter or buffer of the model")
        return saved.tensor
    if not isinstance(saved, Saved):
        return saved
    if saved.error is not None:
        raise ActivationError(saved.error)
    name = saved.scope or "the model's forward"
    if saved.form is None:
        tensor = saved.original
        check_version(tensor, saved.version, f"a tensor saved in {name} ({saved.group.label})")
        if saved.view.count and not tensor.untyped_storage().nbytes():
            raise ActivationError(
                f"the memory of a tensor saved in {name} ({saved.group.label}) was freed after the forward pass and not"
                " filled again before its backward pass"
            )
        return tensor
    saved.group.begin_backward()
    tensor = saved.view.within(saved.form.values(), saved.start)
    saved.form.read(saved.group.index)
    return tensor


def check_version(tensor: Tensor, version: int, what: str) -> None:
    """Raise ActivationError if a saved tensor was changed in place."""
    if tensor._version != version:
        raise ActivationError(
            f"{what}, {tuple(tensor.shape)} {tensor.dtype}, was changed in place after it was saved for the backward"
            f" pass (version {tensor._version} instead of {version}): its gradients would be wrong. Use an operation"
            " that is not in place"
        )
