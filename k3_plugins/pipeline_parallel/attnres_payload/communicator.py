"""Tells a Megatron P2PCommunicator how long every message is; the exchange itself stays Megatron's.

With `variable_seq_lengths` Megatron asks `_communicate_shapes` for the shapes to receive, normally by exchanging them.
Here the plan knows them, so nothing is exchanged.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from k3_plugins.pipeline_parallel.attnres_payload import session as payload

if TYPE_CHECKING:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator as _Communicator
else:
    _Communicator = object


class PayloadCommunicator(_Communicator):
    """Mixin over a P2PCommunicator class; see `attach`."""

    _row_shape: tuple[int, ...]

    def _communicate(self, *, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, **kwargs: Any) -> Any:
        session = payload.current()
        if tensor_send_next is not None:
            session.record_send("forward", tensor_send_next)
        if tensor_send_prev is not None:
            session.record_send("backward", tensor_send_prev)
        self._row_shape = kwargs["tensor_shape"]
        return super()._communicate(tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, **kwargs)

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        session = payload.current()
        lengths = [0, 0]
        for index, (wanted, direction) in enumerate(((recv_prev, "forward"), (recv_next, "backward"))):
            if wanted:
                lengths[index] = session.next_receive_length(direction, self._row_shape)
        return [lengths[0]], [lengths[1]]


@functools.cache
def _with_mixin(communicator_class: type) -> type:
    return type(f"Payload{communicator_class.__name__}", (PayloadCommunicator, communicator_class), {})


def attach(communicator: Any) -> Any:
    """A communicator of any P2PCommunicator class that receives residual payloads; the given one is not changed."""
    attached = copy.copy(communicator)
    attached.__class__ = _with_mixin(communicator.__class__)
    attached.config = copy.copy(communicator.config)
    attached.config.variable_seq_lengths = True
    return attached
