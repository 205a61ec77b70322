"""Moves the pieces: one batched isend/irecv per chunk and direction, one message per pair of ranks.

Counts the elements it moves, and measures how long this rank waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from k3_plugins.optimizer.per_head_muon.planner import Message, Place, message_size


@dataclass
class Pending:
    """A batch of messages under way. The send buffers live until it is waited for."""

    works: list
    sent: list[Tensor]
    received: dict[Place, Tensor]


@dataclass
class Exchange:
    """Point-to-point traffic of one optimizer's grid of ranks.

    Args:
        ranks: global rank of every place.
        group: the process group that the messages use; None is the world.
        device: where messages live (the gradients may live elsewhere).
    """

    ranks: Mapping[Place, int]
    group: dist.ProcessGroup | None
    device: torch.device
    elements_received: int = 0
    """Since the start."""
    _waits: list[tuple] = field(default_factory=list)

    def post(self, sends: Mapping[Place, Tensor], receives: Mapping[Place, Message]) -> Pending:
        """Start one batch.

        Args:
            sends: a flat fp32 tensor for every peer.
            receives: the pieces that every peer sends.
        """
        buffers = {
            peer: torch.empty(message_size(pieces), dtype=torch.float32, device=self.device)
            for peer, pieces in receives.items()
        }
        operations = [dist.P2POp(dist.irecv, buffers[peer], self.ranks[peer], self.group) for peer in buffers]
        operations += [dist.P2POp(dist.isend, tensor, self.ranks[peer], self.group) for peer, tensor in sends.items()]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(works, list(sends.values()), buffers)

    def wait(self, pending: Pending) -> dict[Place, Tensor]:
        """The received messages; on a GPU the current stream waits, elsewhere the process."""
        if pending.works:
            start = self._now()
            for work in pending.works:
                work.wait()
            self._waits.append((start, self._now()))
        pending.sent.clear()
        self.elements_received += sum(buffer.numel() for buffer in pending.received.values())
        return pending.received

    def _now(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take_waited_ms(self) -> float:
        """Milliseconds spent waiting since the last call."""
        waits: Sequence[tuple] = self._waits
        self._waits = []
        if self.device.type != "cuda":
            return sum(1000 * (end - start) for start, end in waits)
        torch.cuda.synchronize(self.device)
        return sum(start.elapsed_time(end) for start, end in waits)
