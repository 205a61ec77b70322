"""Run a training module unchanged; write gradients and losses, and what the bubble scheduler did in every step.

    python -m tests.distributed.vision.pipeline.bubble_run RECORDS TARGET [arguments of TARGET]

Adds to `tests.harness.gradients` the file `RECORDS/bubble<N>.jsonl`: one line for each training step with this rank's
tasks as executed and as planned, peaks, and hashes of the encoder's weights, as it started the step and at the end of
the run. K3_TEST_BUBBLE=naive makes every rank encode just before its own forward, which deadlocks;
K3_TEST_BUBBLE=unchecked does so without the check that refuses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from tests.harness import gradients
from tests.harness.recorded import hook_training


def main() -> None:
    directory = Path(sys.argv[1])
    hook_training(sys.argv[2], lambda module: _watch(directory))
    gradients.main()


def _watch(directory: Path) -> None:
    from k3_plugins.pipeline_parallel.vision_bubble import events, runtime
    from tests.unit.pipeline_parallel.vision_bubble.bubble_cases import ahead_of_own_forward

    scheduler, mode = runtime.RUNTIME, os.environ.get("K3_TEST_BUBBLE")
    if mode:
        scheduler.planner = ahead_of_own_forward
    if mode == "unchecked":
        events.check = lambda plan: None
    path = directory / f"bubble{os.environ.get('RANK', '0')}.jsonl"
    learn = scheduler._learn

    def learn_and_write(session, costs, v):
        tasks = session.executed()
        planned = session.plan.ranks[session.rank]
        line = {
            "executed": [(task.kind, task.microbatch, task.part) for task in tasks],
            "planned": [(task.kind, task.microbatch, task.part) for task in planned],
            "ordered": all(one.end <= two.start for one, two in zip(tasks[:-1], tasks[1:], strict=True)),
            "owner": session.owner,
            "costs": list(costs),
            "peak": session.peak_activations,
            "planned_peak": session.plan.peak_activations[session.rank],
            "weights": _digest(session.replica),
            "forward_times": session.plan.problem.forward.tolist(),
        }
        with path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        return learn(session, costs, v)

    scheduler._learn = learn_and_write


def _digest(replica) -> str:
    sha = hashlib.sha256()
    for parameter in replica.parameters:
        sha.update(parameter.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    main()
