"""What a step is planned with: times of text work by rank and chunk, and of the encoder by cost of the images.

Letters: p pipeline ranks, v model chunks per rank, m micro-batches. A cost is a count of the encoder's multiplications
and additions; times are in seconds where they are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3_plugins.pipeline_parallel.vision_bubble.plan import Task, TaskKind
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem, Communication


@dataclass(frozen=True)
class Times:
    """See the module docstring."""

    forward: np.ndarray
    """``[p, v]``."""
    backward: np.ndarray
    encoder_forward: float
    """For a cost of 1."""
    encoder_backward: float

    def problem(
        self, costs: Sequence[float], pieces: int, trained: bool, communication: Communication
    ) -> BubbleProblem:
        """A step of ``m`` micro-batches with these encoder costs (0: no images)."""
        p, v = self.forward.shape
        cost = np.asarray(costs)
        return BubbleProblem(
            pipeline_size=p,
            chunks=v,
            microbatches=len(cost),
            forward=self.forward,
            backward=self.backward,
            encoder_forward=self.encoder_forward * cost,
            encoder_backward=self.encoder_backward * cost if trained else 0.0,
            pieces=pieces,
            communication=communication,
        )


def given(times: tuple[float, float, float, float], costs: Sequence[float], p: int, v: int) -> Times:
    """The same text times everywhere; the encoder's are for the average cost of the micro-batches that have images."""
    forward, backward, encoder_forward, encoder_backward = times
    with_images = [cost for cost in costs if cost]
    mean = float(np.mean(with_images)) if with_images else 1.0
    return Times(np.full((p, v), forward), np.full((p, v), backward), encoder_forward / mean, encoder_backward / mean)


@dataclass(frozen=True)
class Measured:
    """What one rank measured in one step."""

    forward: tuple[float, ...]
    """``[v]`` mean seconds of a chunk's forward."""
    backward: tuple[float, ...]
    encoder: tuple[float, float, float, float]
    """Seconds and cost of all forwards, seconds and cost of all backwards."""


def measure(tasks: Sequence[Task], costs: Sequence[float], v: int) -> Measured:
    """The means over one rank's executed tasks."""
    text = TaskKind.TEXT_FORWARD, TaskKind.TEXT_BACKWARD
    seconds: dict[tuple[TaskKind, int], list[float]] = {(kind, chunk): [] for kind in text for chunk in range(v)}
    encoder = dict.fromkeys((TaskKind.ENCODER_FORWARD, TaskKind.ENCODER_BACKWARD), 0.0)
    cost = dict.fromkeys(encoder, 0.0)
    for task in tasks:
        if task.kind.is_text:
            seconds[task.kind, task.part].append(task.end - task.start)
        else:
            encoder[task.kind] += task.end - task.start
            cost[task.kind] += costs[task.microbatch] if task.part == 0 else 0.0
    return Measured(
        tuple(float(np.mean(seconds[TaskKind.TEXT_FORWARD, chunk])) for chunk in range(v)),
        tuple(float(np.mean(seconds[TaskKind.TEXT_BACKWARD, chunk])) for chunk in range(v)),
        (
            encoder[TaskKind.ENCODER_FORWARD],
            cost[TaskKind.ENCODER_FORWARD],
            encoder[TaskKind.ENCODER_BACKWARD],
            cost[TaskKind.ENCODER_BACKWARD],
        ),
    )


def combine(ranks: Sequence[Measured], before: Times) -> Times:
    """All pipeline ranks' measurements; an encoder that nobody ran keeps its times.

    The encoder is the same on every rank, so its times are means over them. A clock's resolution is the least time of a
    text task, which a plan cannot have as 0.
    """
    forward, forward_cost, backward, backward_cost = np.array([rank.encoder for rank in ranks]).sum(0)
    return Times(
        np.maximum([rank.forward for rank in ranks], 1e-9),
        np.maximum([rank.backward for rank in ranks], 1e-9),
        forward / forward_cost if forward_cost else before.encoder_forward,
        backward / backward_cost if backward_cost else before.encoder_backward,
    )
