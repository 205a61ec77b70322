"""The bubble planner: dependencies, bounds, the published table, refusals."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from benchmarks.vision_bubble import random_plans
from k3_plugins.pipeline_parallel.vision_bubble import events
from k3_plugins.pipeline_parallel.vision_bubble.plan import TaskKind
from k3_plugins.pipeline_parallel.vision_bubble.planner import _Placement, plan
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem, PlanError
from k3_plugins.pipeline_parallel.vision_bubble.simulate import coupled, violations
from k3_plugins.pipeline_parallel.vision_bubble.text_order import visits, warm_up
from tests.unit.pipeline_parallel.vision_bubble.bubble_cases import problems


@settings(max_examples=300)
@given(problems())
def test_no_plan_violates_a_dependency(problem):
    planned = plan(problem)
    assert violations(planned) == []
    assert planned.makespan >= planned.bounds.strict * (1 - 1e-9)
    events.check(planned)


def test_a_placement_whose_messages_wait_in_a_circle_is_eased():
    """Found by the test above: a forward that costs many text tasks, behind a message that rank 0 takes late."""
    chunks = np.full((2, 2), 0.125)
    encoder = np.array([0, 0, 0, 1, 0, 2])
    problem = BubbleProblem(2, 2, 6, chunks, chunks, encoder, np.zeros(6), pieces=1, communication="overlap")
    planned = plan(problem)
    events.check(planned)
    assert violations(planned) == []
    backwards = BubbleProblem(2, 2, 6, chunks, chunks, encoder, encoder, pieces=2, communication="blocking")
    assert violations(plan(backwards)) == []


def test_easing_ends_with_forwards_first_and_backwards_last():
    placement = _Placement(BubbleProblem(4, 2, 8, pieces=2), True, True)
    placement.place_all()
    while placement.ease():
        assert violations(placement.plan()) == []
    final = placement.plan()
    events.check(final)
    for tasks in final.ranks:
        kinds = [task.kind.is_text or task.kind for task in tasks]
        assert kinds == sorted(kinds, key=[TaskKind.ENCODER_FORWARD, True, TaskKind.ENCODER_BACKWARD].index)


def test_the_check_itself_sees_every_kind_of_fault():
    """What the property test relies on: each fault, put into a good plan, is reported."""
    good = plan(BubbleProblem(4, 2, 8))
    assert violations(good) == []

    def broken(rank, position, **changes):
        tasks = list(good.ranks[rank])
        tasks[position] = dataclasses.replace(tasks[position], **changes)
        return dataclasses.replace(good, ranks=(*good.ranks[:rank], tuple(tasks), *good.ranks[rank + 1 :]))

    first_text = next(k for k, task in enumerate(good.ranks[0]) if task.kind.is_text)
    piece = next(k for k, task in enumerate(good.ranks[1]) if task.kind is TaskKind.ENCODER_BACKWARD)
    shorter = tuple(good.ranks[2][:-1])
    swapped = (good.ranks[3][1], good.ranks[3][0], *good.ranks[3][2:])
    faults = {
        "before": broken(0, first_text, start=0.5, end=1.5),
        "lasts": broken(0, first_text, end=9.0),
        "stands twice": broken(1, piece, part=1),
        "is missing": dataclasses.replace(good, ranks=(*good.ranks[:2], shorter, good.ranks[3])),
        "has ended": dataclasses.replace(good, ranks=(*good.ranks[:3], swapped)),
        "is not where its forward is": broken(1, piece, microbatch=0),
    }
    for sentence, plan_with_fault in faults.items():
        assert any(sentence in fault for fault in violations(plan_with_fault)), sentence


# p, v, m: text makespan, encoder inside stage 0, planned; the last row follows from the formulas of the others.
TABLE = {(4, 2, 8): (57, 72, 60), (16, 4, 64): (813, 972, 816), (16, 4, 128): (1581, None, 1584)}


@pytest.mark.parametrize("communication", ["overlap", "blocking"])
@pytest.mark.parametrize("sizes", TABLE)
def test_the_table_of_the_design_is_reproduced(sizes, communication):
    text, in_stage_0, decoupled = TABLE[sizes]
    problem = BubbleProblem(*sizes, communication=communication)
    planned = plan(problem)
    assert planned.bounds.text == pytest.approx(text)
    if in_stage_0 is not None:
        assert coupled(problem) == pytest.approx(in_stage_0)
    assert planned.makespan == pytest.approx(decoupled)
    assert planned.bounds.rule == pytest.approx(decoupled)
    assert violations(planned) == []
    # Work, and the idle time (p - 1)(t_f + t_b) of every rank.
    p, v, m = sizes
    assert problem.text_work[0] == 3 * m * v
    assert planned.bounds.text == pytest.approx(3 * m * v + 3 * (p - 1))


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_steps_are_close_to_the_bound(count):
    result = random_plans(count)
    assert result["within_5_percent"] >= 0.95, result["misses"]
    assert result["within_5_percent_of_strict_bound"] >= 0.9


def test_text_order_is_megatrons():
    class Communicator:
        def __init__(self, p, v, rank):
            self.virtual_pipeline_model_parallel_size = v if v > 1 else None
            self.pp_group = self
            self.size, self.rank = lambda: p, lambda: rank

    for p, v, m in ((2, 1, 5), (4, 1, 2), (4, 1, 8), (2, 2, 2), (4, 2, 8), (3, 4, 12), (8, 3, 32)):
        assert visits(p, v, m) == get_schedule_table(m, v, p if v > 1 else m)
        for rank in range(p):
            megatrons = get_pp_rank_microbatches(m, v, p, p2p_communicator=Communicator(p, v, rank))
            assert warm_up(p, v, m, rank) == megatrons[2], (p, v, m, rank)


def test_encoder_work_that_fits_bubbles_is_hidden():
    """Little work: only the synchronous first forward and last backward lengthen the step, whatever m is."""
    times = {"encoder_forward": 0.25, "encoder_backward": 0.5}
    for m in (8, 16, 32):
        planned = plan(BubbleProblem(4, 2, m, **times))
        assert planned.makespan == pytest.approx(planned.bounds.text + 0.75)
        assert planned.hidden == pytest.approx(1 - 4 / m)


def test_frozen_encoders_hold_no_activations():
    planned = plan(BubbleProblem(4, 2, 8, encoder_backward=0.0))
    assert planned.peak_activations == (0, 0, 0, 0)
    assert not any(task.kind is TaskKind.ENCODER_BACKWARD for task in planned.tasks)
    assert planned.makespan == pytest.approx(58)


def test_no_images_at_all():
    planned = plan(BubbleProblem(4, 2, 8, encoder_forward=0.0, encoder_backward=0.0))
    assert planned.makespan == planned.bounds.text == 57
    assert planned.hidden == 1.0 and set(planned.owner) == {-1}


def test_activations_held_are_counted():
    """With all work equal, a rank holds the share of the micro-batches that are under way."""
    planned = plan(BubbleProblem(4, 2, 32))
    for rank, peak in enumerate(planned.peak_activations):
        spans = {}
        for task in planned.ranks[rank]:
            if not task.kind.is_text:
                first, _ = spans.get(task.microbatch, (task.start, 0))
                spans[task.microbatch] = (first, task.end)
        moments = [start for start, _ in spans.values()]
        assert peak == max(sum(start <= now < end for start, end in spans.values()) for now in moments)


def test_plans_are_deterministic():
    problem = BubbleProblem(4, 3, 12, encoder_forward=np.linspace(0.3, 2.0, 12), encoder_backward=1.0)
    assert plan(problem).ranks == plan(problem).ranks


INTERPRETED = """
import sys
sys.modules["numba"] = None
from k3_plugins.pipeline_parallel.vision_bubble import paths
from k3_plugins.pipeline_parallel.vision_bubble.planner import _Placement, plan
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem
assert not hasattr(paths.insert, "py_func")
for sizes in ((4, 2, 8), (3, 1, 7), (4, 3, 16)):
    times = [0.3 + 0.4 * (i % 5) for i in range(sizes[2])]
    planned = plan(BubbleProblem(*sizes, encoder_forward=times, encoder_backward=times))
    print(planned.makespan.hex(), [(task.kind.value, task.microbatch, task.start.hex()) for task in planned.tasks])
"""


def test_without_numba_the_plans_are_the_same():
    run = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert "numba is not installed" in run.stderr
    lines = []
    for sizes in ((4, 2, 8), (3, 1, 7), (4, 3, 16)):
        times = [0.3 + 0.4 * (i % 5) for i in range(sizes[2])]
        planned = plan(BubbleProblem(*sizes, encoder_forward=times, encoder_backward=times))
        tasks = [(task.kind.value, task.microbatch, task.start.hex()) for task in planned.tasks]
        lines.append(f"{planned.makespan.hex()} {tasks}")
    assert run.stdout.splitlines() == lines


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pipeline_size": 1}, "pipeline_size is 1; it must be a whole number of at least 2"),
        ({"chunks": 1.5}, "chunks is 1.5"),
        ({"microbatches": 6}, "change --global-batch-size"),
        ({"pieces": 0}, "pieces is 0"),
        ({"forward": 0.0}, r"forward\[0, 0\] is 0; it must be finite and greater than 0"),
        ({"forward": [1.0, 2.0]}, r"forward has shape \[2\]; it must be one number or of shape \[4, 2\]"),
        ({"backward": float("nan")}, r"backward\[0, 0\] is nan"),
        ({"encoder_forward": [1.0] * 7}, r"encoder_forward has shape \[7\]"),
        ({"encoder_forward": [1.0] * 7 + [-1.0]}, r"encoder_forward\[7\] is -1"),
        ({"encoder_forward": "fast"}, "encoder_forward must be a number"),
        ({"encoder_forward": [0.0] + [1.0] * 7}, "a backward needs a forward"),
        ({"communication": "none"}, "communication is 'none'"),
    ],
)
def test_impossible_problems_are_refused(changes, sentence):
    with pytest.raises(PlanError, match=sentence):
        BubbleProblem(**{"pipeline_size": 4, "chunks": 2, "microbatches": 8, **changes})
