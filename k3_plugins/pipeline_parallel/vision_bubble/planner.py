"""Places encoder forwards and layer-split encoder backwards in the bubbles of the text pipeline.

The encoder runs data-parallel over the p pipeline ranks. Micro-batch i < p is encoded by rank i before the pipeline
starts; every other micro-batch gets the rank and the place in that rank's order where the step grows least. Backward
pieces stay on the rank that holds the activations. Among places that do not lengthen the step, forwards take late ones
(outputs and activations are kept from then on), backwards early ones. The last p micro-batches have p different
ranks, because nothing is left to hide their backwards behind.

The estimate of an insertion is exact (see `paths`), so a task that fits a bubble delays nothing. A few rules for the
order in which tasks are placed are tried; if the best plan is not within ``GOOD_ENOUGH`` of what any plan needs,
micro-batches are taken out and placed again. A plan whose messages would wait for each other in a circle is eased until
they do not. Everything is deterministic.

    plan(BubbleProblem(pipeline_size=16, chunks=4, microbatches=128)).makespan
"""

from __future__ import annotations

from k3_plugins.pipeline_parallel.vision_bubble import events
from k3_plugins.pipeline_parallel.vision_bubble.board import Board
from k3_plugins.pipeline_parallel.vision_bubble.plan import Bounds, Plan, TaskKind, peak_activations
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem, PlanError

GOOD_ENOUGH = 1.0 + 1e-6
# Repair looks at this many tasks in all (one attempt looks at every task of the step).
REPAIR_WORK = 4_000_000


def plan(problem: BubbleProblem) -> Plan:
    """Plan one step.

    Raises:
        PlanError: if Megatron's sends and receives cannot run the plan (a cycle in its event graph).
    """
    best = _placed(problem, descending=True, latest=True)
    for latest in (True, False):
        if best.makespan <= best.goal * GOOD_ENOUGH:
            break
        placement = _placed(problem, descending=False, latest=latest)
        if placement.makespan < best.makespan:
            best = placement
    best.repair()
    while True:
        result = best.plan()
        try:
            events.check(result)
        except events.DeadlockError as error:
            # Places are chosen by times alone; a wait for a neighbour to take a message can close a circle with them.
            if not best.ease():
                raise PlanError(f"the plan cannot be executed: {error}") from error
        else:
            return result


def bounds(problem: BubbleProblem, owner: list[int]) -> Bounds:
    """What a step with these owners of encoder work cannot go below (see :class:`Bounds`)."""
    p, m = problem.pipeline_size, problem.microbatches
    forward, backward = problem.encoder_forward, problem.encoder_backward
    text_only = BubbleProblem(p, problem.chunks, m, problem.forward, problem.backward, 0.0, 0.0)
    text = Board(text_only).makespan
    work = problem.text_work.copy()
    for i, rank in enumerate(owner):
        if rank >= 0:
            work[rank] += forward[i] + backward[i]
    rule = max(text + forward[:p].max() + backward[-p:].max(), work.max())
    # Encoder work can be moved to ranks with less text work, but not off the rank with the most.
    level = max(problem.text_work.max(), (problem.text_work.sum() + forward.sum() + backward.sum()) / p)
    return Bounds(text, float(rule), float(max(Board(problem).makespan, level)))


def _placed(problem: BubbleProblem, descending: bool, latest: bool) -> _Placement:
    placement = _Placement(problem, descending, latest)
    placement.place_all()
    return placement


class _Placement:
    """One pass over all encoder tasks by one rule for the order."""

    def __init__(self, problem: BubbleProblem, descending: bool, latest: bool) -> None:
        self.problem, self.latest = problem, latest
        self.board = Board(problem)
        p, m = problem.pipeline_size, problem.microbatches
        self.owner = [-1] * m
        self.work = problem.text_work.copy()
        total = self.work.sum() + problem.encoder_forward.sum() + problem.encoder_backward.sum()
        self.goal = max(self.board.makespan, float(self.work.max()), total / p) * (1.0 + 1e-12)
        images = [i for i in range(p, m) if problem.encoder_forward[i]]
        self.sequence = images[::-1] if descending else images

    @property
    def makespan(self) -> float:
        return self.board.makespan

    def plan(self) -> Plan:
        """The plan as it stands."""
        ranks = tuple(self.board.tasks(rank) for rank in range(self.problem.pipeline_size))
        return Plan(self.problem, ranks, bounds(self.problem, self.owner), tuple(self.owner), peak_activations(ranks))

    def ease(self) -> bool:
        """Move every encoder forward ahead of the task before it, or, once all stand at the start, every encoder
        backward behind the task after it. With all forwards first and all backwards last nothing waits for them.

        Returns:
            False if all of them stand there.
        """
        board, moved = self.board, False
        for kind, step in ((TaskKind.ENCODER_FORWARD, 1), (TaskKind.ENCODER_BACKWARD, -1)):
            for rank in range(self.problem.pipeline_size):
                order = board.order(rank)[::step]
                for k in range(1, len(order)):
                    here, ahead = (board.kinds[order[n]][0] for n in (k, k - 1))
                    if here is kind and ahead is not kind:
                        order[k - 1], order[k], moved = order[k], order[k - 1], True
                board.reorder(rank, order[::step])
            if moved:
                break
        board.refresh()
        return moved

    def place_all(self) -> None:
        p, m = self.problem.pipeline_size, self.problem.microbatches
        for i in range(min(p, m)):
            if self.board.encoder_forward[i] >= 0:
                self._own(i, i)
                self.board.insert(self.board.encoder_forward[i], i, -1)
        for i in self.sequence:
            self._place_forward(i)
        for i in range(m):
            self._place_backward(i)

    def _own(self, i: int, rank: int) -> None:
        self.owner[i] = rank
        self.work[rank] += self.problem.encoder_forward[i] + self.problem.encoder_backward[i]

    def _place_forward(self, i: int) -> None:
        """The rank and place with the smallest makespan, then push, then rank load, then the latest start."""
        problem, board = self.problem, self.board
        p, m = problem.pipeline_size, problem.microbatches
        cost = problem.encoder_forward[i] + problem.encoder_backward[i]
        taken = set(self.owner[max(p, m - p) : m] + self.owner[m - p : min(p, m)]) if i >= m - p else set()
        best, best_key = None, None
        for rank in range(p):
            if rank in taken:
                continue
            place = board.best_place(board.encoder_forward[i], rank, latest=self.latest, goal=self.goal)
            if place is None:
                continue
            makespan, push, start, behind = place
            key = (max(makespan, self.work[rank] + cost), push, self.work[rank], -start if self.latest else start)
            if best_key is None or key < best_key:
                best, best_key = (rank, behind), key
        if best is None:
            raise PlanError(f"micro-batch {i} has no place for its encoder forward on any rank")
        self._own(i, best[0])
        board.insert(board.encoder_forward[i], best[0], best[1])

    def _place_backward(self, i: int) -> None:
        """Piece by piece, each behind the one before it."""
        board, rank = self.board, self.owner[i]
        behind = -1
        for x in board.encoder_backward[i]:
            place = board.best_place(x, rank, behind=behind, latest=False, goal=self.goal)
            if place is None:
                raise PlanError(f"micro-batch {i} has no place for its encoder backward on rank {rank}")
            board.insert(x, rank, place[3])
            behind = x

    def repair(self) -> None:
        """Take micro-batches with a task on a longest path out, and place them again, while that shortens the step."""
        board, p = self.board, self.problem.pipeline_size
        attempts = REPAIR_WORK // len(board.time)
        improved = True
        while improved and attempts > 0 and self.makespan > self.goal * GOOD_ENOUGH:
            improved = False
            for i in self._critical():
                if attempts == 0:
                    return
                attempts -= 1
                before, kept = self.makespan, self._state()
                rank = self.owner[i]
                for x in board.encoder_backward[i]:
                    board.remove(x, rank)
                if i >= p:
                    board.remove(board.encoder_forward[i], rank)
                    self.work[rank] -= self.problem.encoder_forward[i] + self.problem.encoder_backward[i]
                    self.owner[i] = -1
                board.refresh()
                if i >= p:
                    self._place_forward(i)
                self._place_backward(i)
                if self.makespan < before * (1.0 - 1e-9):
                    improved = True
                else:
                    self._restore(kept)

    def _critical(self) -> list[int]:
        board = self.board
        long = board.head + board.time + board.tail >= self.makespan * (1.0 - 1e-9)
        return sorted({board.kinds[x][1] for x in range(len(board.time)) if long[x] and not board.kinds[x][0].is_text})

    def _state(self) -> tuple:
        board = self.board
        arrays = (board.before, board.after, board.head, board.tail, self.work)
        return [array.copy() for array in arrays], list(board.first), list(self.owner)

    def _restore(self, state: tuple) -> None:
        board = self.board
        (board.before, board.after, board.head, board.tail, self.work), board.first, self.owner = state
