"""The encoder in pipeline bubbles equals the encoder inside the first stage's forward: every gradient, 20 steps."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed.vision.pipeline.uneven_runs import Run
from tests.harness import losses

MODULE = "tests.distributed.vision.pipeline.bubble_run"
STEPS = 20
VPP_2 = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
# Half of the micro-batches have no image in some steps; PP 4 has four layers, one for each stage.
LAYOUTS = {
    "PP 2, VPP 2": (2, VPP_2),
    "PP 2, VPP 2, frozen": (2, f"{VPP_2} --moonvit-frozen"),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "PP 4": (4, "--pipeline-model-parallel-size 4"),
    "PP 4, VPP 2": (4, "--pipeline-model-parallel-size 4 --num-layers 8 --linear-attention-freq [1,0,1,0,1,0,1,0]"
                       " --num-layers-per-virtual-pipeline-stage 1"),
    "PP 2, DP 2": (4, f"{VPP_2} --use-distributed-optimizer"),
    "PP 2, TP 2, SP": (4, f"{VPP_2} --tensor-model-parallel-size 2 --sequence-parallel"),
    "PP 2, CP 2": (4, f"{VPP_2} --context-parallel-size 2"),
    "PP 2, CP 2, dynamic-cp": (4, f"{VPP_2} --context-parallel-size 2 --k3-plugins dynamic-cp"),
    "PP 2, attnres": (2, f"{VPP_2} --k3-plugins attnres"),
    # (by default Muon iterates in bf16, which carries the rounding of sums on)
    "PP 2, muon": (2, f"{VPP_2} --k3-plugins per-head-muon --muon-fp32-matmul-prec high"),
    "PP 2, recompute": (2, f"{VPP_2} --moonvit-recompute"),
}  # fmt: skip
FAST = ["PP 2, VPP 2"]


def recorded(run, nprocs):
    """By rank and step, what bubble_run wrote."""
    files = [run.folder / f"bubble{rank}.jsonl" for rank in range(nprocs)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def scheduled(runs, nprocs, flags):
    run = runs(nprocs, f"{flags} --k3-plugins vision-bubble --vision-bubble-pieces 3", MODULE)
    return run, recorded(run, nprocs)


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=() if layout in FAST else pytest.mark.slow) for layout in LAYOUTS]
)
def test_bubbles_equal_the_encoder_in_stage_0(layout, runs):
    nprocs, flags = LAYOUTS[layout]
    flags += f" --train-iters {STEPS} --eval-interval {STEPS}"
    in_stage_0 = runs(nprocs, flags)
    run, ranks = scheduled(runs, nprocs, flags)
    run.assert_equals(in_stage_0)
    size = 4 if "PP 4" in layout else 2
    for steps in zip(*ranks, strict=True):
        pipeline = [line for line in steps if line["owner"] == steps[0]["owner"]]
        assert len(pipeline) >= size
        for line in steps:
            assert line["executed"] == line["planned"] and line["ordered"]
            assert line["peak"] == line["planned_peak"]
            assert [owner >= 0 for owner in line["owner"]] == [cost > 0 for cost in line["costs"]]
        kinds = {kind for line in steps for kind, *_ in line["executed"]}
        assert ("encoder backward" in kinds) == ("frozen" not in layout)
        if "TP" not in layout:  # whose ranks hold different parts
            assert len({line["weights"] for line in steps}) == 1
    assert all(len(steps) == STEPS for steps in ranks)
    weights = [line["weights"] for line in ranks[0]]
    assert len(set(weights)) == (1 if "frozen" in layout else STEPS)
    # Every rank encoded something, and planned with the times of the first steps.
    assert {owner for line in ranks[0] for owner in line["owner"]} >= set(range(size))
    first, *later = [line["forward_times"] for line in ranks[0]]
    assert first == [[1.0] * len(first[0])] * size and first not in later and later[3] == later[-1] != later[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature", ["pipeline-zero2", "pipeline-zero2 --moonvit-frozen", "activation-manager --activation-policy *=cpu"]
)
def test_features_that_take_over_gradients_or_activations(feature, runs, tmp_path):
    """ZeRO-2 has no gradients in the model to compare in the first step: losses and norms of all steps tell."""
    flags = f"{VPP_2} --use-distributed-optimizer --train-iters {STEPS} --eval-interval {STEPS}"
    frozen = " --moonvit-frozen" if "frozen" in feature else ""
    in_stage_0 = runs(4, flags + frozen)
    flags += f" {runs.start} --k3-plugins vision-bubble,{feature}"
    runs.launch(tmp_path, 4, flags, "tests.harness.recorded")
    steps = losses.read(tmp_path)
    assert losses.relative_difference(steps, in_stage_0.steps) <= 2e-5
    for step, theirs in in_stage_0.steps.items():
        assert abs(steps[step].grad_norm - theirs.grad_norm) <= 2e-5 * theirs.grad_norm, step


@pytest.mark.slow
def test_expert_parallel_replicas_follow_one_plan(runs, tmp_path):
    """Exchanges of experts tie two replicas with different images together inside text tasks."""
    flags = f"""{VPP_2} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48
        --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --expert-model-parallel-size 2
        --global-batch-size 16 --use-distributed-optimizer"""
    in_stage_0 = Run(tmp_path / "one", runs.launch(tmp_path / "one", 4, flags))
    flags += " --k3-plugins vision-bubble --vision-bubble-pieces 3"
    run = Run(tmp_path / "two", runs.launch(tmp_path / "two", 4, flags, MODULE))
    run.assert_equals(in_stage_0)
    for lines in zip(*recorded(run, 4), strict=True):
        assert len({json.dumps(line["owner"]) for line in lines}) == 1
        assert all(line["executed"] == line["planned"] for line in lines)


def test_what_is_hidden_is_logged(runs):
    """From the executed trace: by rank and on average, in the metrics at --log-interval and in the witness."""
    board = runs.root / "board"
    flags = f"{VPP_2} --tensorboard-dir {board} --tensorboard-log-interval 1 --log-interval 2"
    run, _ = scheduled(runs, 2, flags)
    events = EventAccumulator(str(board)).Reload()
    mean, *ranks = (
        [event.value for event in events.Scalars(name)]
        for name in ("k3/vit-bubble-hidden", "k3/vit-bubble-hidden/rank-0", "k3/vit-bubble-hidden/rank-1")
    )
    assert [event.step for event in events.Scalars("k3/vit-bubble-hidden")] == [2, 4]
    assert all(0 <= value <= 1 for value in [*mean, *ranks[0], *ranks[1]])
    assert mean == pytest.approx([(a + b) / 2 for a, b in zip(*ranks, strict=True)], abs=1e-6)
    assert any("tasks in the planned order" in log and "% of the encoder hidden" in log for log in run.result.logs)


def test_a_plan_that_would_deadlock_is_refused_at_start_up(runs, tmp_path):
    """Every rank encodes just before its own forward; the time limit is the test's."""
    flags = f"{runs.start} {VPP_2} --k3-plugins vision-bubble"
    result = runs.launch(tmp_path, 2, flags, MODULE, env={"K3_TEST_BUBBLE": "naive"}, check=False)
    assert result.rc == 2 and not result.timed_out
    for log in result.logs:
        assert "vision-bubble: the plan's event graph has a cycle: rank" in log


@pytest.mark.slow
def test_that_plan_does_deadlock(runs, tmp_path):
    """Without the check, with a time limit: what is refused above would never end."""
    flags = f"{runs.start} {VPP_2} --k3-plugins vision-bubble"
    result = runs.launch(tmp_path, 2, flags, MODULE, env={"K3_TEST_BUBBLE": "unchecked"}, check=False, timeout=60)
    assert result.timed_out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", "--pipeline-model-parallel-size 1 has no bubbles for vision-bubble to fill"),
        pytest.param(f"{VPP_2} --overlap-grad-reduce", "drop both, or vision-bubble", marks=pytest.mark.slow),
        pytest.param(f"{VPP_2} --vision-bubble-times 1,2", "--vision-bubble-times 1,2 must be 'measured' or four",
                     marks=pytest.mark.slow),
        pytest.param(f"{VPP_2} --vision-bubble-pieces 0", "--vision-bubble-pieces 0 must be at least 1",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(flags, sentence, runs, tmp_path):
    result = runs.launch(tmp_path, 1, f"{flags} --k3-plugins vision-bubble", check=False)
    assert result.rc == 2 and sentence in result.logs[0], result.logs[0]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"])
def test_checkpoints_move_between_both(optimizer, runs, tmp_path):
    """Optimizer state included: two steps in one way and two in the other are four steps."""
    whole = runs(2, f"{VPP_2} {optimizer}")
    plugins = {"stage 0": "", "bubbles": "--k3-plugins vision-bubble"}
    for first, second in (("stage 0", "bubbles"), ("bubbles", "stage 0")):
        save = f"{tmp_path}/{first.replace(' ', '-')}"
        flags = f"{VPP_2} {optimizer} --save {save} --save-interval 2"
        runs.launch(tmp_path / first, 2, f"{runs.start} {flags} --exit-interval 2 {plugins[first]}")
        runs.launch(tmp_path / second / "resumed", 2, f"--load {save} {VPP_2} {optimizer} {plugins[second]}")
        resumed = losses.read(tmp_path / second / "resumed")
        assert sorted(resumed) == [3, 4]
        assert losses.relative_difference(resumed, {step: whole.steps[step] for step in resumed}) <= 2e-5
