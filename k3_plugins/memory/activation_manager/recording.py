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
from k3_plugins.memory.policy import FP8_BLOCK, Policy, coded_bytes
from k3_plugins.memory.remote.region import ALIGNMENT

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
class _Place:
    """The part of a storage that serves a saved tensor."""

    decision: _Decision
    policy: Policy
    key: tuple[Any, ...]
    """The same for all tensors that it serves."""
    start: int
    length: int | None
    """Elements from `start`; None for a copy without gaps of the tensor alone."""
    nbytes: int

    def source(self) -> Tensor:
        """The elements, one-dimensional."""
        saved = self.decision.saved
        if self.length is not None:
            return flat_span(saved.original, self.start, self.length)
        view = saved.view
        packed = torch.empty_strided(
            view.size, packed_stride(view.size, view.stride), dtype=view.dtype, device=saved.original.device
        )
        return flat_span(packed.copy_(saved.original), 0, view.count)

    @property
    def aligned_bytes(self) -> int:
        """Room that it takes at a lender."""
        count = self.nbytes // self.decision.saved.view.dtype.itemsize
        nbytes = coded_bytes(count) if self.policy.coded else self.nbytes
        return -(-nbytes // ALIGNMENT) * ALIGNMENT


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
    _rebuilt: dict[tuple[Any, ...], weakref.ref[Rebuilt]] = field(default_factory=dict)
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
        self._policies.update({decision.saved.span: decision.policy for decision in decisions})
        to_store = [decision for decision in decisions if decision.policy is not Policy.RECOMPUTE]
        for decision in decisions:
            if decision.policy is Policy.RECOMPUTE:
                self._drop(decision, to_store)
        # exact forms first: they serve those who would take rounded values too
        to_store.sort(key=lambda decision: decision.policy.coded)
        shares = _shares(to_store)
        places = [self._place(decision, shares) for decision in to_store]
        remote = [place for place in places if place.policy.place == "remote"]
        for place in places:
            if place.policy.place != "remote":
                self._store(place)
        if remote:
            self._store_remote(remote)
        # recipes hold their arguments: they are of no use once the layer is done
        self._tags = {key: tag for key, tag in self._tags.items() if tag.annotation.recompute is None}

    def _settled(self, saved: Saved) -> bool:
        """Whether there is something to decide: not for memory that another mechanism manages, or a damaged tensor."""
        if saved.original._version != saved.version:
            try:
                check_version(saved.original, saved.version, f"a tensor saved in {saved.scope} ({saved.group.label})")
            except ActivationError as error:
                saved.error = str(error)
            return False
        if not saved.original.untyped_storage().nbytes():
            saved.release()
            return False
        return True

    def _decide(self, saved: Saved) -> _Decision:
        storage, start, extent, _ = saved.span
        tag = self._tags.get((storage, start, extent))
        said = tag.annotation if tag is not None else Annotation()
        scope = tag.scope if tag is not None and said.name is not None else saved.scope
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

    def _place(self, decision: _Decision, shares: dict[int, int]) -> _Place:
        """Which part of its storage serves a tensor."""
        view, storage = decision.saved.view, decision.saved.original.untyped_storage()
        itemsize = view.dtype.itemsize
        if not view.has_gaps:
            start, length = view.offset, view.extent
        elif shares[storage._cdata] * 5 >= storage.nbytes() * 4:
            start, length = 0, storage.nbytes() // itemsize
        else:
            start, length = view.offset, None
        key: tuple[Any, ...] = (storage._cdata, start, length, view.dtype, decision.saved.version)
        if length is None:
            key += (view.size, view.stride)
        nbytes = (view.count if length is None else length) * itemsize
        return _Place(decision, decision.policy, key, start, length, nbytes)

    def _store(self, place: _Place) -> None:
        saved, policy = place.decision.saved, place.policy
        storage = saved.original.untyped_storage()
        if policy is Policy.KEEP:
            if storage._cdata not in self._kept:
                self._kept[storage._cdata] = StorageWeakRef(storage)
                self._row(place.decision, policy, storage.nbytes(), storage.nbytes())
            return
        form = self._existing(place.key, policy)
        if form is None:
            form = self.manager.store(place.source(), policy, storage, f"{place.decision.name} ({saved.group.label})")
            self._forms[(*place.key, policy.coded)] = weakref.ref(form)
            self._row(place.decision, policy, place.nbytes, form.nbytes)
        saved.group.stored.append(weakref.ref(form))
        if place.length is None:
            view = saved.view
            saved.view = View(view.size, packed_stride(view.size, view.stride), 0, view.dtype)
        saved.become(form, 0 if place.length is None else place.start)

    def _store_remote(self, places: list[_Place]) -> None:
        """All of a layer goes to a lender, or stays: as the plan's level says."""
        fresh = {place.key: place for place in places if self._existing(place.key, place.policy) is None}
        stored = sum(place.aligned_bytes for place in fresh.values())
        with self.manager.remote_layer(
            stored, sum(place.nbytes for place in fresh.values()), self.group.label
        ) as leaves:
            for place in places:
                if not leaves:
                    place.policy = Policy.FP8 if place.policy.coded else Policy.KEEP
                self._store(place)

    def _existing(self, key: tuple[Any, ...], policy: Policy) -> Stored | None:
        """The same elements stored before in this pass: exactly, or rounded if that is allowed here too."""
        for coded in (False, True) if policy.coded else (False,):
            reference = self._forms.get((*key, coded))
            if reference is not None and (form := reference()) is not None:
                return form
        return None

    # -- recomputation ---------------------------------------------------------------------------------------------

    def _drop(self, decision: _Decision, to_store: list[_Decision]) -> None:
        """Let go of a tensor that can be computed again; what it is computed from joins those to store."""
        saved, tag = decision.saved, decision.tag
        assert tag is not None and tag.annotation.recompute is not None, "recompute is the policy of such tensors only"
        if tag.version != saved.version:
            raise ActivationError(
                f"{decision.name} ({saved.group.label}) was changed in place after annotate() said how to compute it"
                " again; annotate it after the change"
            )
        key = (*saved.span, saved.version)
        reference = self._rebuilt.get(key)
        form = reference() if reference is not None else None
        if form is None:
            function, *arguments = tag.annotation.recompute
            stored = [self._argument(argument, tag.scope, saved.group, to_store) for argument in arguments]
            form = Rebuilt(
                function,
                stored,
                restore,
                tag.view,
                origin=saved.original.untyped_storage(),
                name=f"{decision.name} ({saved.group.label})",
            )
            self._rebuilt[key] = weakref.ref(form)
            self._row(decision, Policy.RECOMPUTE, saved.view.count * saved.view.dtype.itemsize, 0)
        saved.become(form, tag.view.offset)

    def _argument(self, argument: Any, scope: str, group: Group, to_store: list[_Decision]) -> Any:
        """What a recipe keeps of an argument; a tensor has the policy under which its elements were saved, if any."""
        if not isinstance(argument, Tensor):
            return argument
        packed = saved_or_parameter(argument, scope, group, self.manager.ledger, self.parameters)
        if isinstance(packed, Saved):
            inner = self._decide(packed)
            inner.policy = self._policies.get(packed.span, inner.policy)
            rebuildable = inner.tag is not None and inner.tag.annotation.recompute is not None
            if inner.policy is not Policy.RECOMPUTE:
                to_store.append(inner)
            elif rebuildable:
                self._drop(inner, to_store)
        return packed

    # -- the end of the pass ---------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The chunk's forward pass is over."""
        self.close_group()
        self._tags.clear()
        self._forms.clear()
        self._rebuilt.clear()
        self._policies.clear()
        self._kept.clear()


def _shares(decisions: Iterable[_Decision]) -> dict[int, int]:
    """Bytes of the distinct views that will leave each storage."""
    views: dict[int, dict[View, int]] = defaultdict(dict)
    for decision in decisions:
        if decision.policy is not Policy.KEEP:
            view = decision.saved.view
            storage = decision.saved.original.untyped_storage()._cdata
            views[storage][view] = view.count * view.dtype.itemsize
    return defaultdict(int, {storage: sum(sizes.values()) for storage, sizes in views.items()})
