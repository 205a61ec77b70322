"""The forms in which saved values wait for the backward pass: as bytes somewhere, or as a way to compute them.

Letters: n elements.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from k3_plugins.memory.activation_manager.errors import ActivationError
from k3_plugins.memory.activation_manager.fp8 import decode, encode
from k3_plugins.memory.activation_manager.span import View

if TYPE_CHECKING:
    from k3_plugins.memory.activation_manager.ledger import Ledger
    from k3_plugins.memory.activation_manager.transfer import Arrival, Carrier, Parcel


class Stored:
    """``[n]`` values as bytes, on the device or elsewhere; shared by all saved tensors that cover them.

    Args:
        source: the values.
        coded: whether to round them to 8 bits.
        only_e4m3: see `fp8.encode`.
        carrier: who takes the bytes away; None leaves them on the device.
        origin: the storage that the saved tensors lay in.
        name: of the first tensor, for messages.
    """

    def __init__(
        self,
        source: Tensor,
        *,
        coded: bool,
        only_e4m3: bool = False,
        carrier: Carrier[Any] | None,
        ledger: Ledger,
        origin: torch.UntypedStorage,
        name: str,
    ) -> None:
        self.name = name
        self.origin = StorageWeakRef(origin)  # while this lives no other storage has its identity
        self.waiting: Counter[int] = Counter()
        """Group -> saved tensors in it that were not read yet."""
        self._count, self._dtype, self._device, self._coded = source.numel(), source.dtype, source.device, coded
        self._ledger, self._carrier = ledger, carrier
        self._parcel: Parcel | None = None
        self._payload: Tensor | None = None
        self._held: int | None = None
        self._arrival: Arrival | None = None
        self._values: Tensor | None = None
        payload = encode(source, only_e4m3=only_e4m3) if coded else source.contiguous().view(torch.uint8)
        self.nbytes = payload.numel()
        if carrier is None:
            self._payload = payload
            self._held = ledger.hold(payload.untyped_storage())
        else:
            self._parcel = carrier.send(payload, name)

    def fetch(self) -> None:
        """Start to bring the bytes back, unless they are here or on their way."""
        if self._payload is None and self._arrival is None and self._values is None:
            assert self._carrier is not None
            into = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
            self._ledger.watch(into.untyped_storage())
            self._arrival = self._carrier.fetch(self._parcel, into)

    def values(self) -> Tensor:
        """``[n]`` in the original dtype."""
        if self._values is None:
            payload = self._payload
            if payload is None:
                self.fetch()
                assert self._arrival is not None
                payload = self._arrival.wait()
                self._arrival = None
            self._values = decode(payload, self._count, self._dtype) if self._coded else payload.view(self._dtype)
            self._ledger.watch(self._values.untyped_storage())
        return self._values

    def read(self, group: int) -> None:
        """A saved tensor of the group was read: after the last one the values go, unless the next group reads them."""
        self.waiting[group] -= 1
        if self.waiting[group] <= 0:
            del self.waiting[group]
            if group - 1 not in self.waiting:
                self._values = None

    def __del__(self) -> None:
        if self._held is not None:
            self._ledger.release(self._held)
        if self._parcel is not None:
            if self._arrival is not None:
                with contextlib.suppress(ActivationError):  # nobody needs the bytes any more
                    self._arrival.wait()  # a copy under way must not read a buffer that has found its next user
            self._parcel.discard()


class Rebuilt:
    """Values that are computed again from stored ones; shared by all saved tensors that cover them.

    Args:
        function: gives the values.
        arguments: its arguments; those that are `Saved` are restored first.
        view: the layout of the result in the forward pass.
        origin: the storage that the saved tensors lay in.
        name: of the first tensor, for messages.
    """

    def __init__(
        self,
        function: Any,
        arguments: list[Any],
        restore: Any,
        view: View,
        *,
        origin: torch.UntypedStorage,
        name: str,
    ) -> None:
        self.name = name
        self.origin = StorageWeakRef(origin)  # as in `Stored`
        self.waiting: Counter[int] = Counter()
        self.view = view
        self._function, self._arguments, self._restore = function, arguments, restore
        self._values: Tensor | None = None

    def fetch(self) -> None:
        """Nothing is on its way; the arguments are fetched by their own groups."""

    def values(self) -> Tensor:
        """The result, with the strides it had."""
        if self._values is None:
            with torch.no_grad():
                result = self._function(*(self._restore(argument) for argument in self._arguments))
            if tuple(result.shape) != self.view.size or tuple(result.stride()) != self.view.stride:
                raise ActivationError(
                    f"{self.name} was computed again with shape {tuple(result.shape)}, strides {result.stride()}"
                    f" instead of {self.view.size}, {self.view.stride}: the function given to annotate must return"
                    " what was saved"
                )
            self._values = result.detach()
        return self._values

    def read(self, group: int) -> None:
        """See `Stored.read`."""
        self.waiting[group] -= 1
        if self.waiting[group] <= 0:
            del self.waiting[group]
            self._values = None
