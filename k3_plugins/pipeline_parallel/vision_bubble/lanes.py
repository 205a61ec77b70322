"""Encoder outputs to stage 0 and gradients back: messages between two ranks in an order that both know.

NCCL matches the messages of two ranks by their order alone (gloo also by tags), so the receiver posts its receives in
the sender's order, whatever order they are asked for in. Outputs and gradients each have a group of their own, apart
from that of the text pipeline: on a GPU one waiting receive would hold up everything behind it on the same
communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

AHEAD = 1
"""Receives that are posted ahead of the one that is asked for."""


def groups_beside(group: ProcessGroup, timeout: timedelta) -> tuple[ProcessGroup, ProcessGroup]:
    """Two more process groups over the ranks of ``group``. Collective over all ranks of the job."""
    ranks = tuple(dist.get_process_group_ranks(group))
    everybody = [ranks] * dist.get_world_size()
    dist.all_gather_object(everybody, ranks)
    made = {
        members: (dist.new_group(list(members), timeout=timeout), dist.new_group(list(members), timeout=timeout))
        for members in sorted(set(everybody))
    }
    return made[ranks]


class Sender:
    """Sends without waiting; what is sent is kept alive until :meth:`finish`.

    Args:
        group: a group of its own.
        peer: rank in the group.
    """

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._handles: list[tuple[dist.Work, Tensor]] = []

    def send(self, microbatch: int, tensor: Tensor) -> None:
        """Start sending a tensor that nobody changes."""
        tensor = tensor.contiguous()
        handle = dist.isend(tensor, group=self._group, group_dst=self._peer, tag=microbatch)
        assert handle is not None, "None is for ranks outside the group"
        self._handles.append((handle, tensor))

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for handle, _ in self._handles:
            handle.wait()
        self._handles.clear()


class Receiver:
    """Receives in the sender's order.

    Args:
        group, peer: as of :class:`Sender`.
        messages: (micro-batch, shape) in the order in which they are sent.
        like: an empty tensor of the dtype and device of the messages.
    """

    def __init__(
        self, group: ProcessGroup, peer: int, messages: Sequence[tuple[int, tuple[int, ...]]], like: Tensor
    ) -> None:
        self._group, self._peer, self._like = group, peer, like
        self._messages = list(messages)
        self._place = {microbatch: place for place, (microbatch, _) in enumerate(messages)}
        self._posted: dict[int, tuple[dist.Work, Tensor]] = {}
        self._next = 0
        self._post(AHEAD)

    def _post(self, count: int) -> None:
        for microbatch, shape in self._messages[self._next : count]:
            tensor = self._like.new_empty(shape)
            handle = dist.irecv(tensor, group=self._group, group_src=self._peer, tag=microbatch)
            assert handle is not None, "None is for ranks outside the group"
            self._posted[microbatch] = handle, tensor
            self._next += 1

    def take(self, microbatch: int) -> Tensor:
        """Wait for one message."""
        self._post(self._place[microbatch] + 1 + AHEAD)
        handle, tensor = self._posted.pop(microbatch)
        handle.wait()
        return tensor

    @property
    def untaken(self) -> list[int]:
        """Micro-batches that were never asked for."""
        return sorted({microbatch for microbatch, _ in self._messages[self._next :]} | self._posted.keys())
