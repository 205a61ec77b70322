"""What the planner returns: every task with its rank, order and time, and how good the whole is.

Letters: p pipeline ranks, m micro-batches of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem


class TaskKind(StrEnum):
    """The four kinds of work in a step."""

    TEXT_FORWARD = "text forward"
    TEXT_BACKWARD = "text backward"
    ENCODER_FORWARD = "encoder forward"
    ENCODER_BACKWARD = "encoder backward"

    @property
    def is_text(self) -> bool:
        """Whether Megatron's schedule runs it."""
        return self in (TaskKind.TEXT_FORWARD, TaskKind.TEXT_BACKWARD)


@dataclass(frozen=True)
class Task:
    """One piece of work of one micro-batch on one rank."""

    kind: TaskKind
    rank: int
    microbatch: int
    part: int
    """The chunk of text work; the piece of an encoder backward (0 is the last layers, which run first)."""
    index: int
    """The virtual micro-batch id of text work; the micro-batch of encoder work."""
    start: float
    end: float


@dataclass(frozen=True)
class Bounds:
    """Times that the step cannot, or under the schedule's rule does not, go below."""

    text: float
    """Makespan of the text pipeline alone."""
    rule: float
    """The larger of: text makespan + the synchronous first forwards + the last backwards; the largest total work of a
    rank in this plan."""
    strict: float
    """No assignment of encoder work to ranks ends earlier: the longest path through the text order with every encoder
    task on a rank of its own, and the mean of all ranks' work."""


@dataclass(frozen=True)
class Plan:
    """A step as planned."""

    problem: BubbleProblem
    ranks: tuple[tuple[Task, ...], ...]
    """Every rank's tasks in the order of execution."""
    bounds: Bounds
    owner: tuple[int, ...] = ()
    """``[m]`` the rank that encodes each micro-batch, forward and backward; -1 without images."""
    peak_activations: tuple[int, ...] = field(default=())
    """``[p]`` the most micro-batches whose encoder activations a rank holds at a time."""

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(tasks[-1].end for tasks in self.ranks if tasks)

    @property
    def tasks(self) -> list[Task]:
        """All tasks, rank by rank."""
        return [task for rank in self.ranks for task in rank]

    @property
    def hidden(self) -> float:
        """Share of the encoder's time that does not lengthen the step: 1 - (makespan - text) / (encoder time / p)."""
        work = sum(task.end - task.start for task in self.tasks if not task.kind.is_text)
        if work == 0:
            return 1.0
        return 1.0 - (self.makespan - self.bounds.text) * self.problem.pipeline_size / work


def peak_activations(ranks: Sequence[Sequence[Task]]) -> tuple[int, ...]:
    """The most encoder forwards per rank that have started and whose backward, if there is one, has not ended."""
    peaks = []
    for tasks in ranks:
        last_piece = {task.microbatch: task for task in tasks if task.kind is TaskKind.ENCODER_BACKWARD}
        held = peak = 0
        for task in tasks:
            if task.kind is TaskKind.ENCODER_FORWARD and task.microbatch in last_piece:
                held += 1
                peak = max(peak, held)
            elif last_piece.get(task.microbatch) is task:
                held -= 1
        peaks.append(peak)
    return tuple(peaks)
