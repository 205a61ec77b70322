"""The device's gradient memory: a few slots that the model chunks of a rank take in turn.

    slot = pool.take(chunk)      # zeroed, exclusively the chunk's until it is handed in
    pool.hand_in(slot, copies)   # reduced shards -> staging memory -> host shards, beside the next chunk's backward

A slot goes through: free -> taken -> draining -> free. It is given out again only when its shards have been added to
the host shards, so nothing ever overwrites a gradient that is still being copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from k3_plugins.distributed.pipeline_zero2.chunk import ChunkGradients

ALIGNMENT = 256
"""Bytes. What CUDA allocations have, and more than any vector load of a gradient kernel needs."""


def align(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Slot:
    """Gradient memory for one model chunk, and host memory for that chunk's reduced shard on its way out."""

    def __init__(self, nbytes: int, staging_nbytes: int):
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=torch.cuda.current_device())
        self.staging = torch.zeros(staging_nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.stream = torch.cuda.Stream()
        self.bound: dict[ChunkGradients, Any] = {}
        """Views into `memory`, by chunk; built once."""
        self._drained: Future[None] | None = None

    def drain(
        self,
        worker: ThreadPoolExecutor,
        event: Any,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        first: bool,
    ) -> None:
        """Have `worker` add the staged shards to the host shards once `event` (their copy to the host) is over."""
        self._drained = worker.submit(_add_to_host, event, copies, first)

    def wait(self) -> None:
        """Return when the last drain is over; what went wrong in it is raised here."""
        if self._drained is not None:
            drained, self._drained = self._drained, None
            drained.result()


def _add_to_host(event: Any, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], first: bool) -> None:
    event.synchronize()
    for staged, host in copies:
        if first:
            host.copy_(staged)
        else:
            host.add_(staged)


class SlotPool:
    """The slots of all chunks of this rank: one for each chunk, or `count` for more chunks than that.

    Args:
        chunks: of this rank.
        count: 2 lets one chunk accumulate while another drains.
    """

    def __init__(self, chunks: Sequence[ChunkGradients], count: int):
        self._own: dict[ChunkGradients, Slot] = {}
        if len(chunks) <= count:
            self._own = {chunk: Slot(chunk.nbytes, chunk.staging_nbytes) for chunk in chunks}
            self.slots = list(self._own.values())
        else:
            sizes = max(chunk.nbytes for chunk in chunks), max(chunk.staging_nbytes for chunk in chunks)
            self.slots = [Slot(*sizes) for _ in range(count)]
        self._free = list(self.slots)
        self._taken: OrderedDict[ChunkGradients, Slot] = OrderedDict()
        # One worker: the groups of a chunk are added in the order in which they were reduced, in every run.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pipeline-zero2")
        self._lent = [0] * len(self.slots)
        self.borrowed_beyond = 0
        """Bytes of the last step's device shards that did not fit into the slots."""

    @property
    def device_bytes(self) -> int:
        """Gradient memory on the device, by storages."""
        return sum(slot.memory.untyped_storage().nbytes() for slot in self.slots)

    @property
    def staging_bytes(self) -> int:
        """Host memory through which shards leave the device, by storages."""
        return sum(slot.staging.untyped_storage().nbytes() for slot in self.slots)

    def take(self, chunk: ChunkGradients) -> Slot:
        """The slot in which the chunk accumulates: the one it holds, or a zeroed one.

        With every slot taken (a schedule that alternates between more chunks than there are slots within a group), the
        chunk that has waited longest hands its own in early: more reduce-scatters, the same gradients.
        """
        if chunk in self._taken:
            self._taken.move_to_end(chunk)
            return self._taken[chunk]
        if not self._free:
            next(iter(self._taken)).reduce()
        slot = self._own.get(chunk, self._free[0])
        self._free.remove(slot)
        slot.wait()
        torch.cuda.current_stream().wait_stream(slot.stream)
        self._taken[chunk] = slot
        return slot

    def hand_in(
        self, chunk: ChunkGradients, event: Any, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], first: bool
    ) -> None:
        """The chunk's gradients are reduced and on their way to the staging memory."""
        slot = self._taken.pop(chunk)
        slot.drain(self._worker, event, copies, first)
        self._free.append(slot)

    def wait(self) -> None:
        """Return when every shard that was handed in is in the host shards."""
        for slot in self.slots:
            slot.wait()

    def reset(self) -> None:
        """Start of a step: take the slots back from the optimizer and from a backward that was given up."""
        self.wait()
        self._taken.clear()
        self._free = list(self.slots)
        self._lent = [0] * len(self.slots)
        self.borrowed_beyond = 0

    def borrow(self, numel: int) -> torch.Tensor:
        """fp32 device memory for the optimizer step, `[numel]`, from the idle slots as far as they reach.

        It is the caller's until the next `reset`.
        """
        if self._taken:
            raise RuntimeError("the optimizer asks for the gradient slots while gradients are accumulated in them")
        nbytes = numel * 4
        for index, slot in enumerate(self.slots):
            offset = self._lent[index]
            if offset + nbytes <= slot.memory.numel():
                self._lent[index] = offset + align(nbytes)
                return slot.memory[offset : offset + nbytes].view(torch.float32)
        self.borrowed_beyond += nbytes
        return torch.empty(numel, dtype=torch.float32, device=torch.cuda.current_device())
