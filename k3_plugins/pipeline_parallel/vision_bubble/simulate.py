"""Checks of a plan that share nothing with the planner, and the step without scheduling for comparison."""

from __future__ import annotations

from k3_plugins.pipeline_parallel.vision_bubble.board import Board
from k3_plugins.pipeline_parallel.vision_bubble.plan import Plan, Task, TaskKind
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem
from k3_plugins.pipeline_parallel.vision_bubble.text_order import text_order


def coupled(problem: BubbleProblem) -> float:
    """Makespan with the encoder inside stage 0's forward and backward, as without this feature."""
    return Board(problem, encoder_on_stage_0=True).makespan


def violations(plan: Plan) -> list[str]:
    """Everything that is wrong with a plan's order and times; empty for a good plan.

    Every task must be there once and last as long as the problem says; a rank does one thing at a time, and its text
    work in Megatron's order; nothing starts before what it needs has ended; encoder pieces stay with their forward.
    """
    problem, faults = plan.problem, []
    p, v, m = problem.pipeline_size, problem.chunks, problem.microbatches
    # Sums of the same times in another order differ by rounding.
    slack = 1e-9 * max(plan.makespan, 1.0)

    seen: dict[tuple[TaskKind, int, int], Task] = {}
    for task in plan.tasks:
        stage = task.part * p + task.rank if task.kind.is_text else task.part
        key = (task.kind, task.microbatch, stage)
        if key in seen:
            faults.append(f"{key} stands twice")
        seen[key] = task
        length = {
            TaskKind.TEXT_FORWARD: lambda t: problem.forward[t.rank, t.part],
            TaskKind.TEXT_BACKWARD: lambda t: problem.backward[t.rank, t.part],
            TaskKind.ENCODER_FORWARD: lambda t: problem.encoder_forward[t.microbatch],
            TaskKind.ENCODER_BACKWARD: lambda t: problem.encoder_backward[t.microbatch] / problem.pieces,
        }[task.kind](task)
        if abs(task.end - task.start - length) > slack:
            faults.append(f"{key} lasts {task.end - task.start:g} instead of {length:g}")

    needed: dict[tuple[TaskKind, int, int], tuple[TaskKind, int, int] | None] = {}
    last = p * v - 1
    for i in range(m):
        has_forward, has_backward = problem.encoder_forward[i] > 0, problem.encoder_backward[i] > 0
        for stage in range(p * v):
            previous: tuple[TaskKind, int, int] | None = (TaskKind.TEXT_FORWARD, i, stage - 1)
            if stage == 0:
                previous = (TaskKind.ENCODER_FORWARD, i, 0) if has_forward else None
            needed[TaskKind.TEXT_FORWARD, i, stage] = previous
            following = (TaskKind.TEXT_BACKWARD, i, stage + 1)
            needed[TaskKind.TEXT_BACKWARD, i, stage] = following if stage < last else (TaskKind.TEXT_FORWARD, i, last)
        if has_forward:
            needed[TaskKind.ENCODER_FORWARD, i, 0] = None
        if has_backward:
            for piece in range(problem.pieces):
                needed[TaskKind.ENCODER_BACKWARD, i, piece] = (
                    (TaskKind.ENCODER_BACKWARD, i, piece - 1) if piece else (TaskKind.TEXT_BACKWARD, i, 0)
                )
                owner = seen.get((TaskKind.ENCODER_FORWARD, i, 0))
                part = seen.get((TaskKind.ENCODER_BACKWARD, i, piece))
                if owner is None or part is None or owner.rank != part.rank:
                    faults.append(f"encoder backward {piece} of micro-batch {i} is not where its forward is")
    faults += [f"{key} is missing" for key in needed if key not in seen]
    faults += [f"{key} is not part of the step" for key in seen if key not in needed]
    for key, source in needed.items():
        if source and key in seen and source in seen and seen[key].start < seen[source].end - slack:
            faults.append(f"{key} starts at {seen[key].start:g}, before {source} ends at {seen[source].end:g}")

    for rank, tasks in enumerate(plan.ranks):
        for one, two in zip(tasks[:-1], tasks[1:], strict=True):
            if two.start < one.end - slack:
                faults.append(f"rank {rank} starts {two.kind} of {two.microbatch} before {one.kind} has ended")
        text = [(task.kind is TaskKind.TEXT_FORWARD, task.part, task.microbatch) for task in tasks if task.kind.is_text]
        if text != [op[:3] for op in text_order(p, v, m, rank)]:
            faults.append(f"rank {rank} does not run its text work in Megatron's order")
    return faults
