"""One run of a pipeline schedule on one rank: encoder work at its places, its messages, and a record of all of it.

Megatron's schedule drives: it calls the forward step and the backward step, and the communicator between them. Encoder
tasks that stand behind a text task in the plan run the next time the communicator has posted its messages, or, where
Megatron has nothing to communicate, ahead of the next text task.

Letters: m image tokens in this rank's slice of a micro-batch's sequence, D width of the language model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from k3_plugins.pipeline_parallel.vision_bubble.batch import StepBatch
from k3_plugins.pipeline_parallel.vision_bubble.clock import Clock
from k3_plugins.pipeline_parallel.vision_bubble.lanes import Receiver, Sender
from k3_plugins.pipeline_parallel.vision_bubble.plan import Plan, Task, TaskKind
from k3_plugins.pipeline_parallel.vision_bubble.replica import Replica
from k3_plugins.pipeline_parallel.vision_bubble.segments import Encoding
from k3_plugins.vision.training.context import encode_slice

Work = tuple[TaskKind, int, int]
"""Kind, micro-batch, part."""


def evaluation_owners(costs: Sequence[float], p: int) -> tuple[int, ...]:
    """Who encodes what where nothing is planned: the most costly micro-batch goes to the rank with the least work."""
    load, owner = [0.0] * p, [-1] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        if costs[i]:
            owner[i] = min(range(p), key=load.__getitem__)
            load[owner[i]] += costs[i]
    return tuple(owner)


class Session:
    """See the module docstring.

    Args:
        replica: the encoder.
        groups: of outputs and of gradients, over the pipeline's ranks.
        batch: the micro-batches.
        owner: by micro-batch, the rank that encodes it; -1 without images.
        plan: None in evaluation: every rank encodes all of its micro-batches before the pipeline starts.
        pieces: of an encoder backward.
        device: where the encoder computes.
        clock: for the record.
    """

    def __init__(
        self,
        replica: Replica,
        groups: tuple[ProcessGroup, ProcessGroup],
        batch: StepBatch,
        owner: Sequence[int],
        plan: Plan | None,
        pieces: int,
        device: torch.device,
        clock: Clock,
    ) -> None:
        self.replica, self.batch, self.owner, self.plan, self.pieces = replica, batch, tuple(owner), plan, pieces
        self.device, self.clock = device, clock
        self.rank, size = groups[0].rank(), groups[0].size()
        self.trains = plan is not None and replica.trained
        self.peak_activations = 0
        self._flushed = False
        self._record: list[tuple[Work, int, Any, Any]] = []  # work, index, start, end
        forwards: list[list[int]] = [[i for i, rank in enumerate(owner) if rank == r] for r in range(size)]
        self._text: dict[bool, deque[Task]] = {True: deque(), False: deque()}
        self._behind: dict[tuple[TaskKind, int] | None, list[Work]] = {
            None: [(TaskKind.ENCODER_FORWARD, i, 0) for i in forwards[self.rank]]
        }
        if plan is not None:
            forwards = [[t.microbatch for t in tasks if t.kind is TaskKind.ENCODER_FORWARD] for tasks in plan.ranks]
            self._follow(plan.ranks[self.rank])
        self._due = self._behind[None]
        batch.read_ahead([i for i in forwards[self.rank] if batch.clips[i]])
        self._connect(groups, forwards)
        self._outputs: dict[int, Tensor] = {}  # on rank 0, its own
        self._gradients: dict[int, Tensor] = {}
        self._leaves: dict[int, Tensor] = {}
        self._alive: dict[int, Encoding] = {}

    def _follow(self, tasks: Sequence[Task]) -> None:
        place = None
        self._behind = {None: []}
        for task in tasks:
            if task.kind.is_text:
                place = task.kind, task.index
                self._behind[place] = []
                self._text[task.kind is TaskKind.TEXT_FORWARD].append(task)
            else:
                self._behind[place].append((task.kind, task.microbatch, task.part))

    def _connect(self, groups: tuple[ProcessGroup, ProcessGroup], forwards: Sequence[Sequence[int]]) -> None:
        """Outputs travel in the order of their owner's forwards, gradients in that of stage 0's backwards."""
        outputs, gradients = groups
        encoder = self.replica.encoder
        width = encoder.projector.linear_fc2.output_size
        like = torch.empty(0, width, dtype=encoder.config.params_dtype, device=self.device)
        self._none = like

        def messages(rank: int, in_order: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
            microbatches = [i for i in in_order if self.owner[i] == rank and self.batch.tokens[i]]
            return [(i, (self.batch.tokens[i], width)) for i in microbatches]

        backwards = range(len(self.owner))
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        if self.rank == 0:
            for peer in range(1, outputs.size()):
                self._receivers[peer] = Receiver(outputs, peer, messages(peer, forwards[peer]), like)
                self._senders[peer] = Sender(gradients, peer)
        else:
            self._senders[0] = Sender(outputs, 0)
            if self.trains:
                self._receivers[0] = Receiver(gradients, 0, messages(self.rank, backwards), like)

    # -- what Megatron's schedule calls --------------------------------------------------------------------------------

    def rows(self, first_stage: bool) -> Iterator[dict[str, Any]]:
        """The data iterator of a chunk; the first stage's waits for the images."""
        for i, row in enumerate(self.batch.rows):
            yield {**row, "images": self._images(i)} if first_stage else row

    def forward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's ``forward_step_func`` with its place in the step."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            return self._run_text(True, original, *arguments, **keywords)

        return run

    def backward_step(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Megatron's ``backward_step``; behind stage 0's, the gradient of the images is on its way."""
        return self._run_text(False, original, *arguments, **keywords)

    def run_due(self) -> None:
        """Run the encoder tasks whose turn has come."""
        due, self._due = self._due, []
        for kind, i, part in due:
            if kind is TaskKind.ENCODER_FORWARD:
                self._encode(i)
            else:
                self._encode_backward(i, part)

    def flush(self) -> None:
        """Behind the last text task and ahead of Megatron's reduction of gradients."""
        self.run_due()
        if self.trains:
            self.replica.reduce_gradients()
        self._flushed = True

    def finish(self) -> None:
        """End of the schedule.

        Raises:
            RuntimeError: if anything is left over or the executed order is not the plan's.
        """
        if not self._flushed:
            self.flush()
        for sender in self._senders.values():
            sender.finish()
        left = {
            "outputs": [*self._outputs, *(i for receiver in self._receivers.values() for i in receiver.untaken)],
            "gradients": [*self._gradients, *self._leaves],
            "activations": list(self._alive),
        }
        for what, microbatches in left.items():
            if microbatches:
                raise RuntimeError(
                    f"vision-bubble: the step ended on pipeline rank {self.rank} with encoder {what} of micro-batches"
                    f" {sorted(microbatches)} left over"
                )
        if self.plan is not None:
            planned = [(task.kind, task.microbatch, task.part) for task in self.plan.ranks[self.rank]]
            done = [work for work, *_ in self._record]
            if done != planned:
                place = next(
                    (k for k, pair in enumerate(zip(done, planned, strict=False)) if pair[0] != pair[1]),
                    min(len(done), len(planned)),
                )
                raise RuntimeError(
                    f"vision-bubble: pipeline rank {self.rank} did not follow its plan: task {place} was"
                    f" {done[place : place + 1]} instead of {planned[place : place + 1]}"
                )

    def executed(self) -> list[Task]:
        """The record with times in seconds; waits for the device."""
        return [
            Task(kind, self.rank, i, part, index, self.clock.seconds(start), self.clock.seconds(end))
            for (kind, i, part), index, start, end in self._record
        ]

    # -- text ----------------------------------------------------------------------------------------------------------

    def _run_text(self, is_forward: bool, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self.run_due()
        self._start = self.clock.mark()
        result = original(*arguments, **keywords)
        if self.plan is None:
            return result
        task = self._text[is_forward].popleft()
        self._record.append(((task.kind, task.microbatch, task.part), task.index, self._start, self.clock.mark()))
        if not is_forward and self.rank == 0 and task.part == 0:
            self._return_gradient(task.microbatch)
        self._due = self._behind[task.kind, task.index]
        return result

    def _images(self, i: int) -> Tensor:
        """The encoder's output for stage 0, ``[m, D]``, a leaf of the text's graph."""
        if not self.batch.tokens[i]:
            return self._none
        images = self._outputs.pop(i) if self.owner[i] == self.rank else self._receivers[self.owner[i]].take(i)
        if self.trains:
            self._leaves[i] = images.requires_grad_()
        self._start = self.clock.mark()  # waiting for another rank's encoder is not this rank's work
        return images

    def _return_gradient(self, i: int) -> None:
        images = self._leaves.pop(i, None)
        if images is None:
            return
        gradient = images.grad
        assert gradient is not None, "the images are a leaf of the text whose backward has just run"
        if self.owner[i] == self.rank:
            self._gradients[i] = gradient
        else:
            self._senders[self.owner[i]].send(i, gradient)

    # -- encoder -------------------------------------------------------------------------------------------------------

    def _encode(self, i: int) -> None:
        clips, start = self.batch.clips[i], self.clock.mark()
        if clips:
            patches = self.batch.patches(i).to(self.device, non_blocking=True)
            start = self.clock.mark()
            encoder, wanted = self.replica.encoder, self.batch.wanted[i]
            with torch.set_grad_enabled(self.trains):
                encoding = Encoding(
                    lambda between: encode_slice(encoder, patches, clips, wanted, between),
                    len(encoder.blocks),
                    self.pieces if self.trains else 1,
                )
            images = encoding.images.detach()
            if self.rank == 0 and self.batch.tokens[i]:
                self._outputs[i] = images
            elif self.batch.tokens[i]:
                self._senders[0].send(i, images)
            if self.trains:
                self._alive[i] = encoding
                self.peak_activations = max(self.peak_activations, len(self._alive))
        self._record.append(((TaskKind.ENCODER_FORWARD, i, 0), i, start, self.clock.mark()))

    def _encode_backward(self, i: int, piece: int) -> None:
        start = self.clock.mark()
        if self.batch.clips[i]:
            gradient = None
            if piece == 0:
                if not self.batch.tokens[i]:  # of images that lie in other context-parallel ranks' slices
                    gradient = self._none
                else:
                    gradient = self._gradients.pop(i) if self.rank == 0 else self._receivers[0].take(i)
                start = self.clock.mark()
            self._alive[i].backward(piece, gradient)
            if piece == self.pieces - 1:
                del self._alive[i]
        self._record.append(((TaskKind.ENCODER_BACKWARD, i, piece), i, start, self.clock.mark()))
