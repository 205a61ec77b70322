"""A plan as the sends, receives and waits that Megatron's schedules make of it; finds deadlocks before training.

The order of work alone does not show them: a rank that waits for its own send to be received holds up the encoder work
behind that wait, which may be what the receiver is waiting for. Every rank's program is written down in the order of
``forward_backward_pipelining_with_interleaving`` (with and without ``overlap_p2p_comm``; with
``deallocate_pipeline_outputs`` as in training; ``overlap_p2p_comm_warmup_flush`` is not modelled) and of
``..._without_interleaving``. A message is complete when both sides have posted it (rendezvous: nothing is assumed to be
buffered). Encoder work runs where the communicator can run it: after the messages behind a text task are posted, before
they are waited for. Encoder outputs and gradients are sent without waiting for the send.

    check(plan)              # DeadlockError names the circle of waits
    run(programs)            # end time of every rank under blocking communication
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from k3_plugins.pipeline_parallel.vision_bubble.plan import Plan, Task, TaskKind
from k3_plugins.pipeline_parallel.vision_bubble.text_order import visits, warm_up


class DeadlockError(RuntimeError):
    """Ranks that wait for each other in a circle."""


class Message(NamedTuple):
    """One side of a message; the other side has ``sends`` reversed."""

    what: str
    """``activation`` or ``gradient`` of text, ``encoder output`` or ``encoder gradient``."""
    stage: int
    """The text stage that receives it (stage 0 for encoder messages)."""
    microbatch: int
    sends: bool

    @property
    def peer(self) -> Message:
        """The other side."""
        return self._replace(sends=not self.sends)

    def __str__(self) -> str:
        return f"{self.what} of micro-batch {self.microbatch} for stage {self.stage}"


@dataclass(frozen=True)
class Step:
    """One step of a rank's program: exactly one of the three is set."""

    task: Task | None = None
    posts: tuple[Message, ...] = ()
    waits: tuple[Message, ...] = ()


Program = list[Step]


def programs(plan: Plan) -> list[Program]:
    """Every rank's program."""
    return [_Writer(plan, rank).write() for rank in range(plan.problem.pipeline_size)]


def check(plan: Plan) -> None:
    """Refuse a plan that cannot be executed.

    Raises:
        DeadlockError: with the circle of waits, rank by rank.
    """
    run(programs(plan))


def run(programs: Sequence[Program]) -> list[float]:
    """Execute all programs as far as they go; the time at which each rank ends.

    Raises:
        DeadlockError: if some rank cannot end.
    """
    at = [0] * len(programs)
    clock = [0.0] * len(programs)
    posted: dict[Message, float] = {}
    blocked: dict[Message, int] = {}  # the message that must be posted -> the rank that waits for it
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        program = programs[rank]
        while at[rank] < len(program):
            step = program[at[rank]]
            missing = next((message.peer for message in step.waits if message.peer not in posted), None)
            if missing is not None:
                blocked[missing] = rank
                break
            if step.task is not None:
                clock[rank] += step.task.end - step.task.start
            for message in step.posts:
                posted[message] = clock[rank]
                if message in blocked:
                    ready.append(blocked.pop(message))
            for message in step.waits:
                clock[rank] = max(clock[rank], posted[message.peer])
            at[rank] += 1
    if blocked:
        raise DeadlockError(_circle(programs, at, blocked))
    return clock


def _circle(programs: Sequence[Program], at: Sequence[int], blocked: dict[Message, int]) -> str:
    poster = {
        message: rank for rank, program in enumerate(programs) for step in program[at[rank] :] for message in step.posts
    }
    waits = {rank: message for message, rank in blocked.items()}
    rank, seen = next(iter(waits)), []
    while rank not in seen and waits[rank] in poster:
        seen.append(rank)
        rank = poster[waits[rank]]
    lines = []
    for member in seen[seen.index(rank) :] if rank in seen else [rank]:
        message = waits[member]
        other = f"rank {poster[message]}" if message in poster else "nobody"
        verb = "receive" if message.sends is False else "send"
        lines.append(f"rank {member} waits for {other} to {verb} the {message}")
    return "the plan's event graph has a cycle: " + "; ".join(lines)


class _Writer:
    """Writes the program of one rank by walking through Megatron's schedule."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank, self.owner = rank, plan.owner
        problem = plan.problem
        self.p, self.v, self.m = problem.pipeline_size, problem.chunks, problem.microbatches
        self.overlap = problem.communication == "overlap"
        self.table = visits(self.p, self.v, self.m)
        self.first = warm_up(self.p, self.v, self.m, rank)
        self.total = len(self.table)
        # Text tasks by kind and index, and the encoder tasks behind each (None: ahead of all text).
        self.text: dict[tuple[TaskKind, int], Task] = {}
        self.behind: dict[tuple[TaskKind, int] | None, list[Task]] = {None: []}
        at = None
        for task in plan.ranks[rank]:
            if task.kind.is_text:
                at = (task.kind, task.index)
                self.text[at] = task
                self.behind[at] = []
            else:
                self.behind[at].append(task)
        self.due: list[Task] = []
        self.program: Program = []

    def write(self) -> Program:
        self.due = self.behind[None]
        if self.v == 1:
            self._plain()
        else:
            self._interleaved()
        self._run_due()
        return self.program

    # What both schedules are made of.

    def _post(self, *messages: Message | None) -> tuple[Message, ...]:
        """Post messages, then run the encoder tasks that are due: the place of the hook."""
        posts = tuple(message for message in messages if message is not None)
        if posts:
            self.program.append(Step(posts=posts))
        self._run_due()
        return posts

    def _wait(self, messages: Sequence[Message]) -> None:
        if messages:
            self.program.append(Step(waits=tuple(messages)))

    def _exchange(self, *messages: Message | None) -> None:
        self._wait(self._post(*messages))

    def _run_due(self) -> None:
        for task in self.due:
            i = task.microbatch
            if task.kind is TaskKind.ENCODER_BACKWARD and task.part == 0 and self.rank != 0:
                gradient = Message("encoder gradient", 0, i, sends=False)
                self.program += [Step(posts=(gradient,)), Step(waits=(gradient,))]
            self.program.append(Step(task=task))
            if task.kind is TaskKind.ENCODER_FORWARD and self.rank != 0:
                self.program.append(Step(posts=(Message("encoder output", 0, i, sends=True),)))
        self.due = []

    def _text(self, kind: TaskKind, index: int) -> None:
        if self.due:
            due = self.due[0]
            raise ValueError(
                f"rank {self.rank}: {due.kind} of micro-batch {due.microbatch} stands between a forward and a backward,"
                " where Megatron communicates nothing and nothing can run"
            )
        task = self.text[kind, index]
        i, stage_0 = task.microbatch, self.rank == 0 and task.part == 0
        remote = stage_0 and self.owner[i] > 0
        if remote and kind is TaskKind.TEXT_FORWARD:
            output = Message("encoder output", 0, i, sends=False)
            self.program += [Step(posts=(output,)), Step(waits=(output,))]
        self.program.append(Step(task=task))
        if remote and kind is TaskKind.TEXT_BACKWARD:
            self.program.append(Step(posts=(Message("encoder gradient", 0, i, sends=True),)))
        self.due = self.behind[kind, index]

    def _message(self, forward: bool, index: int, sends: bool) -> Message | None:
        """The text message before (``sends`` False) or after the rank's forward or backward number ``index``."""
        microbatch, visit = self.table[index]
        chunk = visit if forward else self.v - 1 - visit
        stage = chunk * self.p + self.rank
        receiver = stage + ((1 if forward else -1) if sends else 0)
        sender = receiver - (1 if forward else -1)
        if not 0 <= receiver < self.p * self.v or not 0 <= sender < self.p * self.v:
            return None
        return Message("activation" if forward else "gradient", receiver, microbatch, sends)

    # Plain 1F1B.

    def _plain(self) -> None:
        forward, backward = TaskKind.TEXT_FORWARD, TaskKind.TEXT_BACKWARD
        for k in range(self.first):
            self._exchange(self._message(True, k, False))
            self._text(forward, k)
            self._exchange(self._message(True, k, True))
        remaining = self.total - self.first
        if remaining:
            self._exchange(self._message(True, self.first, False))
        for k in range(remaining):
            self._text(forward, self.first + k)
            self._exchange(self._message(True, self.first + k, True), self._message(False, k, False))
            self._text(backward, k)
            following = None if k == remaining - 1 else self._message(True, self.first + k + 1, False)
            self._exchange(self._message(False, k, True), following)
        for k in range(remaining, self.total):
            self._exchange(self._message(False, k, False))
            self._text(backward, k)
            self._exchange(self._message(False, k, True))

    # Interleaved 1F1B.

    def _next_receive(self, forward: bool, k: int) -> Message | None:
        """What is received along with forward or backward number k: the input of number k + 1, but the leading rank
        (0 forward, p - 1 backward) takes what the ending rank sends at the same moment, p - 1 numbers behind."""
        leading = self.rank == (0 if forward else self.p - 1)
        if not leading:
            return self._message(forward, k + 1, False) if k + 1 < self.total else None
        if k < self.p - 1:
            return None
        microbatch, visit = self.table[k - (self.p - 1)]
        if visit == self.v - 1:
            return None
        chunk = visit + 1 if forward else self.v - 2 - visit
        return Message("activation" if forward else "gradient", chunk * self.p + self.rank, microbatch, sends=False)

    def _interleaved(self) -> None:
        self._exchange(self._message(True, 0, False))
        remaining = self.total - self.first
        forward_receives: list[Message] = []
        backward_receives: list[Message] = []
        for k in range(self.first):
            self._text(TaskKind.TEXT_FORWARD, k)
            messages = [self._message(True, k, True), self._next_receive(True, k) if k < self.total - 1 else None]
            first_backward = self._message(False, 0, False) if k == self.first - 1 and remaining else None
            if not self.overlap:
                messages.append(first_backward)
            self._exchange(*messages)
            if self.overlap and first_backward is not None:
                backward_receives += self._post(first_backward)
        if self.overlap:
            last_send = self._steady_overlapped(forward_receives, backward_receives)
        else:
            last_send = []
            self._steady_blocking()
        if not remaining:
            self._exchange(self._message(False, 0, False))
        for k in range(remaining, self.total):
            if k > 0 and backward_receives and self._message(False, k, False) is not None:
                self._wait([backward_receives.pop(0)])
            self._text(TaskKind.TEXT_BACKWARD, k)
            self._exchange(self._message(False, k, True), self._next_receive(False, k) if k < self.total - 1 else None)
        self._wait(last_send)

    def _steady_blocking(self) -> None:
        remaining = self.total - self.first
        for k in range(remaining):
            self._text(TaskKind.TEXT_FORWARD, self.first + k)
            self._text(TaskKind.TEXT_BACKWARD, k)
            self._exchange(
                self._message(True, self.first + k, True),
                self._message(False, k, True),
                self._next_receive(True, self.first + k) if k < remaining - 1 else None,
                self._next_receive(False, k),
            )

    def _steady_overlapped(self, forward_receives: list[Message], backward_receives: list[Message]) -> list[Message]:
        """Returns the send of the last backward, which is waited for at the end of the step."""
        remaining = self.total - self.first
        backward_send: list[Message] = []
        for k in range(remaining):
            f = self.first + k
            if forward_receives and self._message(True, f, False) is not None:
                self._wait([forward_receives.pop(0)])
            self._text(TaskKind.TEXT_FORWARD, f)
            posts = self._post(self._message(True, f, True), self._next_receive(True, f) if k < remaining - 1 else None)
            self._wait([message for message in posts if message.sends])  # the output's memory is given up at once
            forward_receives += [message for message in posts if not message.sends]
            if backward_receives and self._message(False, k, False) is not None:
                self._wait([backward_receives.pop(0)])
            self._text(TaskKind.TEXT_BACKWARD, k)
            posts = self._post(self._message(False, k, True), self._next_receive(False, k))
            self._wait(backward_send)
            backward_send = [message for message in posts if message.sends]
            backward_receives += [message for message in posts if not message.sends]
        return backward_send
