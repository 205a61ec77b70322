"""All tasks of a step as arrays, and the order of each rank as it grows (see `paths` for the arrays' meaning).

Encoder tasks are on the board from the start, as if each ran on a rank of its own: paths count them before they are
placed, so that the makespan of an unfinished board is a lower bound for the finished one.
"""

from __future__ import annotations

import numpy as np

from k3_plugins.pipeline_parallel.vision_bubble import paths
from k3_plugins.pipeline_parallel.vision_bubble.plan import Task, TaskKind
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem
from k3_plugins.pipeline_parallel.vision_bubble.text_order import text_order, warm_up


class Board:
    """The tasks of one problem.

    Args:
        problem: sizes and times.
        encoder_on_stage_0: no encoder tasks; their time is added to stage 0's forward and backward instead.
    """

    def __init__(self, problem: BubbleProblem, encoder_on_stage_0: bool = False) -> None:
        self.problem = problem
        p, v, m = problem.pipeline_size, problem.chunks, problem.microbatches
        self.kinds: list[tuple[TaskKind, int, int, int]] = []  # kind, micro-batch, part, index
        times: list[float] = []
        self.text: dict[tuple[bool, int, int], int] = {}  # (is forward, stage, micro-batch) -> task
        self.orders: list[list[int]] = []
        self.closed_list: list[int] = []
        for rank in range(p):
            order = []
            first = warm_up(p, v, m, rank)
            for op in text_order(p, v, m, rank):
                task = len(times)
                order.append(task)
                self.text[op.is_forward, op.chunk * p + rank, op.microbatch] = task
                time = (problem.forward if op.is_forward else problem.backward)[rank, op.chunk]
                if encoder_on_stage_0 and rank == 0 and op.chunk == 0:
                    extra = problem.encoder_forward if op.is_forward else problem.encoder_backward
                    time += extra[op.microbatch]
                times.append(time)
                kind = TaskKind.TEXT_FORWARD if op.is_forward else TaskKind.TEXT_BACKWARD
                self.kinds.append((kind, op.microbatch, op.chunk, op.index))
                if v > 1 and problem.communication == "blocking" and not op.is_forward and op.index < m * v - first:
                    self.closed_list.append(task)
            self.orders.append(order)
        needs: list[int] = [-1] * len(times)
        last = p * v - 1
        for (is_forward, stage, microbatch), task in self.text.items():
            if is_forward and stage > 0:
                needs[task] = self.text[True, stage - 1, microbatch]
            elif not is_forward:
                needs[task] = self.text[stage == last, min(stage + 1, last), microbatch]
        self.encoder_forward = [-1] * m
        self.encoder_backward: list[list[int]] = [[] for _ in range(m)]
        if not encoder_on_stage_0:
            for i in range(m):
                if problem.encoder_forward[i]:
                    task = len(times)
                    self.encoder_forward[i] = task
                    times.append(problem.encoder_forward[i])
                    needs.append(-1)
                    needs[self.text[True, 0, i]] = task
                    self.kinds.append((TaskKind.ENCODER_FORWARD, i, 0, i))
                if problem.encoder_backward[i]:
                    source = self.text[False, 0, i]
                    for piece in range(problem.pieces):
                        task = len(times)
                        self.encoder_backward[i].append(task)
                        times.append(problem.encoder_backward[i] / problem.pieces)
                        needs.append(source)
                        self.kinds.append((TaskKind.ENCODER_BACKWARD, i, piece, i))
                        source = task
        n = len(times)
        self.time = np.array(times, dtype=np.float64)
        self.needs = np.array(needs, dtype=np.int64)
        self.feeds = np.full(n, -1, dtype=np.int64)
        self.feeds[self.needs[self.needs >= 0]] = np.flatnonzero(self.needs >= 0)
        self.closed = np.zeros(n, dtype=np.bool_)
        self.closed[self.closed_list] = True
        self.before, self.after = np.full(n, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)
        for order in self.orders:
            self.before[order[1:]], self.after[order[:-1]] = order[:-1], order[1:]
        self.first = [order[0] for order in self.orders]
        self.head, self.tail = np.zeros(n), np.zeros(n)
        self._queue, self._queued = np.zeros(n + 1, dtype=np.int64), np.zeros(n, dtype=np.bool_)
        self._found = np.zeros(3)
        self.refresh()

    def refresh(self) -> None:
        """Compute all paths anew.

        Raises:
            RuntimeError: if the order has a cycle, which no insertion here can make.
        """
        arrays = (self.time, self.before, self.after, self.needs, self.feeds, self.head, self.tail)
        ordered = paths.longest_paths(*arrays)
        if ordered < len(self.time):
            raise RuntimeError(f"{len(self.time) - ordered} tasks wait for each other in a circle")

    @property
    def makespan(self) -> float:
        """The longest path."""
        return float((self.head + self.time).max())

    def insert(self, x: int, rank: int, a: int) -> None:
        """Put task ``x`` behind task ``a`` of a rank (-1: at its start)."""
        b = int(self.after[a]) if a >= 0 else self.first[rank]
        if a < 0:
            self.first[rank] = x
        paths.insert(
            x, a, b, self.time, self.before, self.after, self.needs, self.feeds, self.head, self.tail, self._queue,
            self._queued,
        )  # fmt: skip

    def remove(self, x: int, rank: int) -> None:
        """Take a placed task out of its rank's order; ``refresh`` must follow."""
        a, b = self.before[x], self.after[x]
        if a >= 0:
            self.after[a] = b
        else:
            self.first[rank] = int(b)
        if b >= 0:
            self.before[b] = a
        self.before[x] = self.after[x] = -1

    def best_place(
        self, x: int, rank: int, *, behind: int = -1, latest: bool, goal: float
    ) -> tuple[float, float, float, int] | None:
        """(makespan, push, start, task to insert behind) of the best place of a rank, or None; see `paths`."""
        b = int(self.after[behind]) if behind >= 0 else self.first[rank]
        a = paths.best_place(
            x, behind, b, latest, goal, self.time, self.after, self.needs, self.feeds, self.head, self.tail,
            self.closed, self._found,
        )  # fmt: skip
        return None if a == -2 else (float(self._found[0]), float(self._found[1]), float(self._found[2]), a)

    def order(self, rank: int) -> list[int]:
        """The tasks of a rank, in order."""
        tasks, x = [], self.first[rank]
        while x >= 0:
            tasks.append(x)
            x = int(self.after[x])
        return tasks

    def reorder(self, rank: int, order: list[int]) -> None:
        """Give a rank's tasks another order; ``refresh`` must follow."""
        self.first[rank] = order[0]
        self.before[order[0]] = self.after[order[-1]] = -1
        self.before[order[1:]], self.after[order[:-1]] = order[:-1], order[1:]

    def tasks(self, rank: int) -> tuple[Task, ...]:
        """The tasks of a rank with their times."""
        result = []
        for x in self.order(rank):
            kind, microbatch, part, index = self.kinds[x]
            start = float(self.head[x])
            result.append(Task(kind, rank, microbatch, part, index, start, start + float(self.time[x])))
        return tuple(result)
