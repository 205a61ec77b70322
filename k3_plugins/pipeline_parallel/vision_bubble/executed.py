"""What a step did: the executed tasks of all ranks, and how much of the encoder's time was hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3_plugins.pipeline_parallel.vision_bubble import events
from k3_plugins.pipeline_parallel.vision_bubble.plan import Plan, Task


def order(tasks: Sequence[Task]) -> list[tuple[str, int, int]]:
    """(kind, micro-batch, part) in the order of execution."""
    return [(task.kind.value, task.microbatch, task.part) for task in tasks]


def hidden(plan: Plan, executed: Sequence[Sequence[Task]]) -> list[float]:
    """By rank: the share of its encoder time that did not lengthen the step.

    A rank with the encoder time e idles T0 - text without the encoder and T - text - e with it, where T0 and T are the
    lengths of the step. The share is what the encoder took out of the idle time, 1 - (T - T0) / e. Both lengths come
    from the executed tasks, in the executed order and with their measured durations, replayed through Megatron's sends
    and receives without and with the encoder's tasks; waiting for anything but other ranks' work is in neither. 1 for a
    rank that encoded nothing.
    """
    ran = replace(plan, ranks=tuple(map(tuple, executed)))
    text = replace(
        plan,
        ranks=tuple(tuple(task for task in tasks if task.kind.is_text) for tasks in executed),
        owner=(-1,) * len(plan.owner),
    )
    longer = max(events.run(events.programs(ran))) - max(events.run(events.programs(text)))
    shares = []
    for tasks in executed:
        encoder = sum(task.end - task.start for task in tasks if not task.kind.is_text)
        shares.append(min(1.0, max(0.0, 1.0 - longer / encoder)) if encoder else 1.0)
    return shares
