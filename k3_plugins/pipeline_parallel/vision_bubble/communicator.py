"""Where encoder work gets its turn: a P2PCommunicator that runs it after posting messages and before waiting for them.

Working before posting would hold the neighbour up. Megatron's batched messages can only be waited for at once, so
messages are posted one by one, as Megatron itself does with ``overlap_p2p_comm``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator as _Communicator
else:
    _Communicator = object


class BubbleCommunicator(_Communicator):
    """Mixin over a P2PCommunicator class; see :func:`attach`."""

    _work: Callable[[], None]

    def _communicate(self, *, wait_on_reqs: bool = True, **kwargs: Any) -> Any:
        from_previous, from_next, requests = super()._communicate(wait_on_reqs=False, **kwargs)
        self._work()
        if wait_on_reqs:
            for request in requests.values():
                request.wait()
            requests = None
        return from_previous, from_next, requests


@functools.cache
def _with_mixin(communicator_class: type) -> type:
    return type(f"Bubble{communicator_class.__name__}", (BubbleCommunicator, communicator_class), {})


def attach(communicator: Any, work: Callable[[], None]) -> Any:
    """A communicator of any P2PCommunicator class that calls ``work``; the given one is not changed."""
    attached = copy.copy(communicator)
    attached.__class__ = _with_mixin(communicator.__class__)
    attached.config = copy.copy(communicator.config)
    attached.config.batch_p2p_comm = False
    attached._work = work
    return attached
