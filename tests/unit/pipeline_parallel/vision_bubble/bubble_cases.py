"""Problems and hand-made plans for the tests of the bubble planner."""

from hypothesis import strategies as st

from k3_plugins.pipeline_parallel.vision_bubble.plan import Bounds, Plan, Task, TaskKind
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem
from k3_plugins.pipeline_parallel.vision_bubble.text_order import text_order


@st.composite
def problems(draw):
    """Random sizes, uneven times of every stage and micro-batch, micro-batches without images, frozen encoders."""
    p, v = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    m = p * draw(st.integers(1, 4)) if v > 1 else draw(st.integers(1, 12))
    time = st.floats(0.1, 4.0)
    stages = st.lists(st.lists(time, min_size=v, max_size=v), min_size=p, max_size=p)
    encoder = draw(st.lists(st.one_of(st.just(0.0), time), min_size=m, max_size=m))
    factor = draw(st.sampled_from([0.0, 0.7, 2.0]))
    return BubbleProblem(
        p,
        v,
        m,
        draw(st.one_of(time, stages)),
        draw(st.one_of(time, stages)),
        encoder,
        [factor * e for e in encoder],
        pieces=draw(st.integers(1, 9)),
        communication=draw(st.sampled_from(["overlap", "blocking"])),
    )


def ahead_of_own_forward(problem):
    """The plan of vision.md's deadlock: rank i % p encodes micro-batch i just before its own forward of it.

    Only order and duration matter for the event graph; starts are all 0.
    """
    p, v, m = problem.pipeline_size, problem.chunks, problem.microbatches
    ranks, owner = [], [i % p for i in range(m)]
    for rank in range(p):
        tasks = []
        for op in text_order(p, v, m, rank):
            i = op.microbatch
            if op.is_forward and op.chunk == 0 and owner[i] == rank:
                tasks.append(Task(TaskKind.ENCODER_FORWARD, rank, i, 0, i, 0.0, float(problem.encoder_forward[i])))
            kind = TaskKind.TEXT_FORWARD if op.is_forward else TaskKind.TEXT_BACKWARD
            length = (problem.forward if op.is_forward else problem.backward)[rank, op.chunk]
            tasks.append(Task(kind, rank, i, op.chunk, op.index, 0.0, float(length)))
        ranks.append(tuple(tasks))
    return Plan(problem, tuple(ranks), Bounds(0.0, 0.0, 0.0), tuple(owner), (0,) * p)
