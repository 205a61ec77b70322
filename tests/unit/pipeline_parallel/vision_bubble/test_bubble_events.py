"""The plan as sends and receives: deadlocks are found, and plans run when every wait is real."""

import threading
import time

import pytest

from k3_plugins.pipeline_parallel.vision_bubble import events, planner
from k3_plugins.pipeline_parallel.vision_bubble.plan import Bounds, Plan
from k3_plugins.pipeline_parallel.vision_bubble.planner import plan
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem, PlanError
from tests.unit.pipeline_parallel.vision_bubble.bubble_cases import ahead_of_own_forward

INTERLEAVED = [(3, 2, 6), (4, 2, 8), (4, 3, 8), (8, 2, 16)]
COMMUNICATION = ["overlap", "blocking"]


def ended_in_time(programs, limit):
    """Run every rank's program in a thread of its own, with rendezvous messages; False if time runs out."""
    posted = {}
    for program in programs:
        for step in program:
            for message in (*step.posts, *step.waits):
                posted.setdefault(message, threading.Event())
                posted.setdefault(message.peer, threading.Event())
    stop = time.monotonic() + limit
    ended = [False] * len(programs)

    def rank(number):
        for step in programs[number]:
            for message in step.posts:
                posted[message].set()
            for message in step.waits:
                if not posted[message.peer].wait(max(0.0, stop - time.monotonic())):
                    return
        ended[number] = True

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit + 10)
    return all(ended)


def test_tasks_ahead_of_their_own_forward_deadlock():
    """Regression, with a time limit: every rank encodes just before its own forward. The last rank waits until rank 0
    receives its output, and rank 0 receives after a forward that waits for the last rank's encoder."""
    problem = BubbleProblem(4, 2, 8)
    assert not ended_in_time(events.programs(ahead_of_own_forward(problem)), limit=1.0)
    assert ended_in_time(events.programs(plan(problem)), limit=10.0)


@pytest.mark.parametrize("communication", COMMUNICATION)
@pytest.mark.parametrize("sizes", INTERLEAVED)
def test_the_event_graph_shows_that_deadlock(sizes, communication):
    problem = BubbleProblem(*sizes, communication=communication)
    with pytest.raises(events.DeadlockError, match="the plan's event graph has a cycle") as caught:
        events.check(ahead_of_own_forward(problem))
    text = str(caught.value)
    assert "waits for rank 0 to receive the activation" in text
    assert "rank 0 waits for rank" in text and "encoder output" in text


@pytest.mark.parametrize("communication", COMMUNICATION)
@pytest.mark.parametrize("sizes", [*INTERLEAVED, (2, 1, 1), (2, 2, 4), (4, 1, 2), (4, 1, 8), (2, 2, 2), (4, 2, 4)])
def test_text_alone_and_every_plan_run_to_the_end(sizes, communication):
    """Also with sends that wait for their receiver; every message has both sides."""
    silent = BubbleProblem(*sizes, encoder_forward=0.0, encoder_backward=0.0, communication=communication)
    for problem in (silent, BubbleProblem(*sizes, communication=communication)):
        planned = plan(problem)
        programs = events.programs(planned)
        messages = [message for program in programs for step in program for message in step.posts]
        assert len(messages) == len(set(messages))
        assert {message.peer for message in messages} == set(messages)
        waits = [message for program in programs for step in program for message in step.waits]
        assert len(waits) == len(set(waits)) and set(waits) <= set(messages)
        # Everything but the sends of encoder outputs and gradients is waited for.
        assert all("encoder" in message.what and message.sends for message in set(messages) - set(waits))
        tasks = [[step.task for step in program if step.task] for program in programs]
        assert tasks == [list(rank) for rank in planned.ranks]
        assert max(events.run(programs)) >= planned.makespan * (1 - 1e-9)


def test_a_text_activation_travels_over_every_hop():
    p, v, m = 4, 2, 8
    programs = events.programs(plan(BubbleProblem(p, v, m)))
    sent = [message for program in programs for step in program for message in step.posts if message.sends]
    for what, stages in (("activation", range(1, p * v)), ("gradient", range(p * v - 1))):
        hops = {(message.stage, message.microbatch) for message in sent if message.what == what}
        assert hops == {(stage, i) for stage in stages for i in range(m)}


def test_a_plan_with_a_cycle_is_refused(monkeypatch):
    """What the planner itself does when its result cannot run."""
    problem = BubbleProblem(4, 2, 8)
    bad = events.programs(ahead_of_own_forward(problem))
    monkeypatch.setattr(events, "programs", lambda planned: bad)
    with pytest.raises(PlanError, match="cannot be executed: the plan's event graph has a cycle"):
        planner.plan(problem)


def test_nothing_runs_between_a_forward_and_a_backward_without_overlap():
    """Megatron communicates after both: a task there has no hook, and the planner never puts one there."""
    problem = BubbleProblem(4, 2, 8, communication="blocking")
    free = plan(BubbleProblem(4, 2, 8))
    moved = Plan(problem, free.ranks, Bounds(0, 0, 0), free.owner, free.peak_activations)
    with pytest.raises(ValueError, match="stands between a forward and a backward"):
        ranks = list(moved.ranks)
        tasks = list(ranks[3])
        place = next(k for k, task in enumerate(tasks) if task.kind.is_text and "backward" in task.kind)
        encoder = next(k for k, task in enumerate(tasks) if not task.kind.is_text)
        task = tasks.pop(encoder)
        tasks.insert(place - 1, task)
        ranks[3] = tuple(tasks)
        events.programs(Plan(problem, tuple(ranks), moved.bounds, moved.owner, moved.peak_activations))
    events.check(plan(problem))
