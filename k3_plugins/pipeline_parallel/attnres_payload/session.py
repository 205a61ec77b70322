"""One run of a pipeline schedule: which message comes next, what is cached, what was sent.

Megatron's schedules run the micro-batches of a chunk in order, and exchange messages in the order of their schedule
table, so counting calls is enough to know what every message must be; no sizes or ids are negotiated.

Shapes: s sequence, b batch, d hidden size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3_plugins.pipeline_parallel.attnres_payload.cache import BlockCache
from k3_plugins.pipeline_parallel.attnres_payload.plan import PipelinePlan
from k3_plugins.pipeline_parallel.attnres_payload.wire import Envelope, HeaderCheck, Label, message_length, pack, unpack


@dataclass
class Traffic:
    """What a rank sent in a step: (direction, hop) -> messages and bytes, headers included."""

    messages: Counter[tuple[str, int]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, int]] = field(default_factory=Counter)


class PayloadSession:
    """State of one call of a pipeline schedule on one rank.

    Args:
        plan: what every hop carries.
        rank: pipeline rank.
        table: (micro-batch, virtual stage) in the order of the schedule's forward passes.
        width: hidden size d.
    """

    def __init__(self, plan: PipelinePlan, rank: int, table: Sequence[tuple[int, int]], width: int):
        self.plan, self.rank, self.width = plan, rank, width
        self.cache = BlockCache()
        self.traffic = Traffic()
        self.row_shape: torch.Size
        """[s, b, d], known from the first message on."""
        self.check = HeaderCheck()
        size, last = plan.pipeline_size, plan.num_chunks - 1
        virtual = plan.num_chunks // size
        forward = [stage * size + rank for _, stage in table]
        backward = [(virtual - 1 - stage) * size + rank for _, stage in table]
        # hop c leaves chunk c: chunk 0 receives none, the last chunk sends none
        self._receives = {
            "forward": iter([chunk - 1 for chunk in forward if chunk > 0]),
            "backward": iter([chunk for chunk in backward if chunk < last]),
        }
        self._sends = {
            "forward": iter([chunk for chunk in forward if chunk < last]),
            "backward": iter([chunk - 1 for chunk in backward if chunk > 0]),
        }
        self._unpacked: Counter[int] = Counter()
        self._packed: Counter[int] = Counter()

    # -- the communicator's side -----------------------------------------------------------------------------------

    def next_receive_length(self, direction: str, row_shape: Sequence[int]) -> int:
        """Elements of the next message of this direction; `row_shape` is Megatron's [s, b, d] of this step."""
        self.row_shape = torch.Size(row_shape)
        hop = next(self._receives[direction])
        return message_length(self.plan.hop(hop).rows, row_shape)

    def record_send(self, direction: str, message: Tensor) -> None:
        """Count a message."""
        key = direction, next(self._sends[direction])
        self.traffic.messages[key] += 1
        self.traffic.bytes[key] += message.numel() * message.element_size()

    # -- the model's side ------------------------------------------------------------------------------------------

    def unpack(self, virtual_stage: int, message: Tensor) -> tuple[list[Tensor], Tensor]:
        """Message of the previous chunk -> (finished blocks [s, b, d] each, partial sum [s, b, d])."""
        chunk = virtual_stage * self.plan.pipeline_size + self.rank
        microbatch = self._unpacked[chunk]
        self._unpacked[chunk] += 1
        kept = self.plan.kept_on_arrival(chunk)
        envelope = self._envelope(chunk - 1, microbatch, kept)
        rows = unpack(envelope, message, self.row_shape)
        available = dict(zip(envelope.hop.row_ids, rows, strict=True))
        for block in sorted(kept):
            self.cache.put(microbatch, block, available[block], self.plan.readers(chunk, block))
        for block in self.plan.cached_for(chunk):
            available[block] = self.cache.read(microbatch, block)
        blocks = () if self.plan.past_output(chunk - 1) else self.plan.bank_before(chunk)
        return [available[block] for block in blocks], rows[-1]

    def pack(self, virtual_stage: int, blocks: Sequence[Tensor], partial: Tensor) -> Tensor:
        """Blocks and partial sum at the end of a chunk -> the message to the next one (on the last: its output)."""
        chunk = virtual_stage * self.plan.pipeline_size + self.rank
        microbatch = self._packed[chunk]
        self._packed[chunk] += 1
        if chunk == self.plan.num_chunks - 1:
            return partial
        kept = self.plan.kept_at_end(chunk)
        envelope = self._envelope(chunk, microbatch, kept)
        hop = envelope.hop
        available = {**dict(enumerate(blocks)), hop.partial_id: partial}
        for block in sorted(kept):
            self.cache.put(microbatch, block, available[block], self.plan.readers(chunk, block))
        return pack(envelope, [available[row] for row in hop.row_ids])

    def _envelope(self, hop_index: int, microbatch: int, kept: frozenset[int]) -> Envelope:
        """`kept`: the blocks of this message that this end of the hop has put into the cache."""
        hop = self.plan.hop(hop_index)

        def collect(block: int) -> Tensor | None:
            return self.cache.collect(microbatch, block) if block in kept else None

        output = Label(False, microbatch, hop_index, self.width, hop.row_ids)
        gradient = Label(True, microbatch, hop_index, self.width, hop.row_ids)
        return Envelope(hop, output, gradient, self.check, collect)

    def finish(self) -> None:
        """End of the step: nothing may be left over.

        Raises:
            RuntimeError: naming the blocks that are still cached.
            PayloadError: for a wrong header, where comparisons wait for the end of the step.
        """
        self.check.finish()
        if len(self.cache):
            left = ", ".join(f"block {block} of micro-batch {microbatch}" for microbatch, block in self.cache.keys())
            raise RuntimeError(f"attention residuals: the step ended with cached blocks: {left}")


_current: PayloadSession | None = None


def current() -> PayloadSession:
    """The session of the schedule that is running.

    Raises:
        RuntimeError: outside a wrapped schedule.
    """
    if _current is None:
        raise RuntimeError(
            "attention residuals: this model is split over pipeline stages, so it runs only inside a schedule from"
            " Megatron's get_forward_backward_func with the feature attnres active"
        )
    return _current


@contextmanager
def active(session: PayloadSession) -> Iterator[PayloadSession]:
    """Make a session current; at a normal end, check that nothing is left."""
    global _current
    if _current is not None:
        raise RuntimeError("attention residuals: a pipeline schedule was started inside another one")
    _current = session
    try:
        yield session
        session.finish()
    finally:
        _current = None
