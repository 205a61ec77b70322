"""The forward pass of a micro-batch through a model chunk: what autograd saves in it, and which form each tensor gets.

Policies are decided when a layer ends, not when a tensor is saved: by then it is known what was annotated later, which
views share a storage, and which memory another mechanism (Megatron's discarded checkpoints, attention residuals without
this feature) has emptied to fill it again itself; such memory is left alone.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from k3_plugins.memory.activation_manager.errors import ActivationError
from k3_plugins.memory.activation_manager.saved import (
    Group,
    Parameter,
    Saved,
    check_version,
    restore,
    saved_or_parameter,
)
from k3_plugins.memory.activation_manager.span import Span, View, flat_span, packed_stride
from k3_plugins.memory.activation_manager.stored import Rebuilt, Stored
from k3_plugins.memory.annotation import Annotation
from k3_plugins.memory.policy import FP8_BLOCK, Policy

if TYPE_CHECKING:
    from k3_plugins.memory.activation_manager.manager import ActivationManager

NARROW = 8
"""A tensor with fewer elements than the layer's input divided by this holds statistics and is never rounded."""


@dataclass
class Row:
    """What one stored piece of a micro-batch's forward pass costs; the unit of reports. Sizes in bytes."""

    layer: str
    number: int | None
    """Layer number, from 1 over the model; None outside of layers."""
    name: str
    policy: str
    nbytes: int
    """In the original dtype."""
    stored: int
    """In the form it waits in, wherever that is."""
    elements: int
    codable: bool
    rebuildable: bool


@dataclass
class _Tag:
    """An annotation and the state of its tensor when it was made."""

    annotation: Annotation
    scope: str
    version: int
    view: View
    origin: StorageWeakRef


@dataclass
class _Decision:
    """A saved tensor and what becomes of it."""

    saved: Saved
    name: str
    policy: Policy
    tag: _Tag | None
    codable: bool


@dataclass
class Recording:
    """The forward pass of one micro-batch through one model chunk."""

    manager: ActivationManager
    chunk: int
    parameters: frozenset[int]
    """Storages that never leave."""
    group: Group = field(init=False)
    scopes: list[str] = field(default_factory=lambda: [""])
    rows: list[Row] = field(default_factory=list)
    _tags: dict[tuple[int, int, int], _Tag] = field(default_factory=dict)
    _forms: dict[tuple[Any, ...], weakref.ref[Stored]] = field(default_factory=dict)
    _policies: dict[Span, Policy] = field(default_factory=dict)
    _kept: dict[int, StorageWeakRef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.group = Group("before the layers", None, None)

    # -- the forward pass ------------------------------------------------------------------------------------------

    def open_group(self, label: str, number: int | None) -> None:
        """A layer, or what comes after the layers, begins."""
        self.close_group()
        self.group = Group(label, number, self.group)

    def pack(self, tensor: Tensor) -> Saved | Parameter | Tensor:
        """Hook of autograd."""
        saved = saved_or_parameter(tensor, self.scopes[-1], self.group, self.manager.ledger, self.parameters)
        if isinstance(saved, Saved):
            self.group.saved.append(weakref.ref(saved))
        return saved

    def annotate(self, tensor: Tensor, what: Annotation) -> None:
        """See `annotation.annotate`."""
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return
        view, storage = View.of(tensor), tensor.untyped_storage()
        key = (storage._cdata, view.offset, view.extent)
        self._tags[key] = _Tag(what, self.scopes[-1], tensor._version, view, StorageWeakRef(storage))

    # -- the end of a layer ----------------------------------------------------------------------------------------

    def close_group(self) -> None:
        """Give everything that was saved in the group the form of its policy."""
        group = self.group
        pending = [saved for reference in group.saved if (saved := reference()) is not None]
        group.saved.clear()
        decisions = [self._decide(saved) for saved in pending if self._settled(saved)]
        decisions.sort(key=lambda decision: (decision.policy is Policy.RECOMPUTE, decision.policy.coded))
        shares = _shares(decisions)
        for decision in decisions:
            self._policies[decision.saved.span] = decision.policy
            if decision.policy is Policy.RECOMPUTE:
                self._drop(decision, shares)
            else:
                self._store(decision, shares)
        # recipes hold their arguments: they are of no use once the layer is done
        self._tags = {key: tag for key, tag in self._tags.items() if tag.annotation.recompute is None}

    def _settled(self, saved: Saved) -> bool:
        """Whether there is something to decide: not for memory that another mechanism manages, or a damaged tensor."""
        if saved.tensor._version != saved.version:
            try:
                check_version(saved.tensor, saved.version, f"a tensor saved in {saved.scope} ({saved.group.label})")
            except ActivationError as error:
                saved.error = str(error)
            return False
        if not saved.tensor.untyped_storage().nbytes():
            saved.release()
            return False
        return True

    def _decide(self, saved: Saved) -> _Decision:
        storage, start, extent, _ = saved.span
        tag = self._tags.get((storage, start, extent))
        said = tag.annotation if tag is not None else Annotation()
        scope = tag.scope if said.name is not None else saved.scope
        name = ".".join(filter(None, (scope, said.name or "saved")))
        group, options = saved.group, self.manager
        policy = options.rules.tensor(name, group.number, said.policy, said.recompute is not None)
        codable = (
            saved.view.dtype.is_floating_point
            and group.number is not None
            and not said.exact
            and saved.view.count >= FP8_BLOCK
            and saved.view.count * NARROW >= group.input_elements
            and not name.startswith("router.")
        )
        if policy.coded and not codable:
            policy = policy.exact
        small = saved.view.count * saved.view.dtype.itemsize < options.smallest
        if small and policy is not Policy.RECOMPUTE:
            policy = Policy.KEEP
        return _Decision(saved, name, policy, tag, codable)

    def _row(self, decision: _Decision, policy: Policy, nbytes: int, stored: int) -> None:
        saved, tag = decision.saved, decision.tag
        self.rows.append(
            Row(
                saved.group.label,
                saved.group.number,
                decision.name,
                policy.value,
                nbytes,
                stored,
                nbytes // saved.view.dtype.itemsize,
                decision.codable,
                tag is not None and tag.annotation.recompute is not None,
            )
        )

    def _store(self, decision: _Decision, shares: dict[int, int]) -> None:
        saved, policy = decision.saved, decision.policy
        storage, nbytes = saved.tensor.untyped_storage(), saved.view.count * saved.view.dtype.itemsize
        if policy is Policy.KEEP:
            if storage._cdata not in self._kept:
                self._kept[storage._cdata] = StorageWeakRef(storage)
                self._row(decision, policy, storage.nbytes(), storage.nbytes())
            return
        whole = saved.view.has_gaps and shares[storage._cdata] * 5 >= storage.nbytes() * 4
        if whole:
            start, length = 0, storage.nbytes() // saved.view.dtype.itemsize
        elif saved.view.has_gaps:
            start, length = saved.view.offset, -1
        else:
            start, length = saved.view.offset, saved.view.extent
        key = (storage._cdata, start, length, saved.view.dtype, saved.version)
        if length < 0:
            key += (saved.view.size, saved.view.stride)
            saved.view = View(saved.view.size, packed_stride(saved.view.size, saved.view.stride), 0, saved.view.dtype)
        form = self._existing(key, policy)
        if form is None:
            if length < 0:
                source = torch.empty_strided(
                    saved.view.size, saved.view.stride, dtype=saved.view.dtype, device=saved.tensor.device
                ).copy_(saved.tensor)
                source, nbytes = flat_span(source, 0, saved.view.count), nbytes
            else:
                source = flat_span(saved.tensor, start, length)
                nbytes = length * saved.view.dtype.itemsize
            name = f"{decision.name} ({saved.group.label})"
            form = self.manager.store(source, policy, storage, name)
            self._forms[(*key, policy.coded)] = weakref.ref(form)
            self._row(decision, policy, nbytes, form.nbytes)
        saved.group.stored.append(weakref.ref(form))
        saved.become(form, 0 if length < 0 else start)

    def _existing(self, key: tuple[Any, ...], policy: Policy) -> Stored | None:
        """The same elements stored before in this pass: exactly, or rounded if that is allowed here too."""
        for coded in (False, True) if policy.coded else (False,):
            reference = self._forms.get((*key, coded))
            if reference is not None and (form := reference()) is not None:
                return form
        return None

    # -- recomputation ---------------------------------------------------------------------------------------------

    def _drop(self, decision: _Decision, shares: dict[int, int]) -> None:
        saved, tag = decision.saved, decision.tag
        if tag.version != saved.version:
            raise ActivationError(
                f"{decision.name} ({saved.group.label}) was changed in place after annotate() said how to compute it"
                " again; annotate it after the change"
            )
        key = (*saved.span, saved.version, "recompute")
        reference = self._forms.get(key)
        form = reference() if reference is not None else None
        if form is None:
            function, *arguments = tag.annotation.recompute
            stored = [self._argument(argument, decision, shares) for argument in arguments]
            form = Rebuilt(function, stored, restore, tag.view, f"{decision.name} ({saved.group.label})")
            form.origin = StorageWeakRef(saved.tensor.untyped_storage())
            self._forms[key] = weakref.ref(form)
            self._row(decision, Policy.RECOMPUTE, saved.view.count * saved.view.dtype.itemsize, 0)
        saved.become(form, tag.view.offset)

    def _argument(self, argument: Any, decision: _Decision, shares: dict[int, int]) -> Any:
        """Store a tensor argument of a recipe by the policy under which its elements were saved, if they were."""
        if not isinstance(argument, Tensor):
            return argument
        packed = self.pack(argument)
        if not isinstance(packed, Saved):
            return packed
        self.group.saved.pop()
        packed.group = decision.saved.group
        packed.scope = decision.tag.scope
        inner = self._decide(packed)
        inner.policy = self._policies.get(packed.span, inner.policy)
        shares[packed.tensor.untyped_storage()._cdata] += packed.view.count * packed.view.dtype.itemsize
        if inner.policy is Policy.RECOMPUTE and inner.tag is not None and inner.tag.annotation.recompute is not None:
            self._drop(inner, shares)
        elif inner.policy is not Policy.RECOMPUTE:
            self._store(inner, shares)
        return packed

    # -- the end of the pass ---------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The chunk's forward pass is over."""
        self.close_group()
        self._tags.clear()
        self._forms.clear()
        self._policies.clear()
        self._kept.clear()


def _shares(decisions: Iterable[_Decision]) -> dict[int, int]:
    """Bytes of the distinct views that will leave each storage."""
    views: dict[int, dict[View, int]] = defaultdict(dict)
    for decision in decisions:
        if decision.policy not in (Policy.KEEP, Policy.RECOMPUTE):
            view = decision.saved.view
            storage = decision.saved.tensor.untyped_storage()._cdata
            views[storage][view] = view.count * view.dtype.itemsize
    return defaultdict(int, {storage: sum(sizes.values()) for storage, sizes in views.items()})
