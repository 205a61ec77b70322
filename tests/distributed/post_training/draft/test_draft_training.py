"""The draft's door: the target stays, the draft starts as the pre-trained layer, layouts agree, runs resume."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness import gradients, losses
from tests.harness.k3_model import flags
from tests.harness.launch import launch

DOOR = "k3_plugins.draft_gpt"
RUN = "tests.distributed.post_training.draft.draft_run"
FEATURES = "kda,gated-mla,attnres,latent-moe,quantile-balancing,moonep"
STEPS = 4

# fp32 sums over 64 tokens, 48 channels and 7 steps in another order.
FP32 = 5e-5

MODEL = """
    --attn-res-block-size 1 --attn-res-two-phase off --mtp-num-layers 1 --num-experts 8 --moe-layer-freq [0,1,1,1]
    --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-latent-size 32 --moe-shared-expert-intermediate-size 32
    --moe-router-dtype fp32 --moe-router-score-function sigmoid --moe-router-load-balancing-type none
    --moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 --seq-length 32 --max-position-embeddings 32
"""
TRAINING = f"--train-iters {STEPS} --lr-warmup-iters 0 --lr-decay-iters 10"
FRESH = "--finetune --no-load-optim --no-load-rng"

LAYOUTS = {
    "DP 2": (2, ""),
}
SLOW_LAYOUTS = {
    "DP 2, distributed optimizer": (2, "--use-distributed-optimizer"),
    "EP 2": (2, "--expert-model-parallel-size 2"),
    "recomputation": (
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --micro-batch-size 4",
    ),
}


def words(*groups, features=FEATURES):
    return flags(MODEL, TRAINING, f"--k3-plugins {features}", *groups)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A pre-trained model: random vectors in place of ones and zeros, so that every parameter matters."""
    root = tmp_path_factory.mktemp("target")
    still = "--train-iters 1 --lr 0 --min-lr 0"
    command = ["--perturb", "k3_plugins.pretrain_gpt", *words(still, f"--save {root}/model --save-interval 1")]
    launch("tests.harness.gradients", [root / "records", *command], timeout=300)
    return root / "model"


@pytest.fixture(scope="module")
def run(target, tmp_path_factory):
    """run(layout): records and log; one process saves after steps 2 and 4."""
    root, done = tmp_path_factory.mktemp("draft"), {}

    def run(layout):
        if layout not in done:
            save = f"--save {root}/checkpoints --save-interval 2 --tensorboard-dir {root}/metrics"
            save += " --tensorboard-log-interval 1"
            nprocs, layout_flags = {"one": (1, save), **LAYOUTS, **SLOW_LAYOUTS}[layout]
            folder = root / layout.replace(" ", "-").replace(",", "")
            command = [folder, DOOR, *words(f"--load {target} {FRESH}", layout_flags)]
            done[layout] = folder, launch(RUN, command, nprocs=nprocs, timeout=300).logs[0]
        return done[layout]

    return run


def test_it_starts_as_the_pretrained_layer_and_reports_every_step(run):
    folder, log = run("one")
    start = json.loads((folder / "start.json").read_text())
    assert start.pop("trained") == ["draft_fusion", "mtp"]
    assert all(start.values()), start
    steps = losses.read(folder)
    names = ["lk loss", *(f"acceptance {k}" for k in range(1, 8))]
    assert sorted(steps) == list(range(1, STEPS + 1)) and sorted(steps[1].losses) == sorted(names)
    for step in steps.values():
        assert all(0 < step.losses[name] < 1 for name in names[1:])
    assert steps[STEPS].losses["lk loss"] < steps[1].losses["lk loss"]
    assert "acceptance 7:" in log and "tensors are unchanged" in log
    events = EventAccumulator(str(folder.parent / "metrics"))
    events.Reload()
    for name in names:
        written = events.Scalars(name)
        assert [event.step for event in written] == sorted(steps), name
        assert written[0].value == pytest.approx(steps[1].losses[name], rel=1e-6)


def read(folder):
    """Every tensor of a checkpoint that is not the optimizer's."""
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if hasattr(entry, "size") and not key.startswith(("optimizer", "rng", "rerun"))
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def test_the_target_is_frozen_and_the_draft_is_not(run, target):
    folder, _ = run("one")
    before, after = read(target / "iter_0000001"), read(folder.parent / "checkpoints" / "iter_0000004")
    assert set(after) - set(before) == {"draft_fusion.weight"} and set(before) <= set(after)
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert len(before) > 50 and moved and all(key.startswith("mtp.") for key in moved), moved
    # The router's biases stay, the mean source weights are statistics, and a query with one source has no gradient.
    still = {key for key in before if key.startswith("mtp.")} - moved
    assert all(key.endswith(("expert_bias", "source_weights")) or "self_attention_res" in key for key in still), still
    width = after["draft_fusion.weight"].shape[0]
    start = torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], 1)
    assert 0 < (after["draft_fusion.weight"] - start).abs().max() < 0.1


def compare(run, layout):
    (folder, _), (one, _) = run(layout), run("one")
    actual, expected = gradients.assemble(folder), gradients.assemble(one)
    error, worst = gradients.largest_difference(actual, expected)
    assert error <= FP32, f"gradient of {worst} differs by {error:.1e}"
    assert expected["module.draft_fusion.weight"].abs().max() > 0
    a, b = losses.read(folder), losses.read(one)
    for step in b:
        for name, value in b[step].losses.items():
            assert abs(a[step].losses[name] / value - 1) <= FP32, (step, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(run, layout):
    compare(run, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW_LAYOUTS)
def test_more_layouts_equal_one_process(run, layout):
    compare(run, layout)


def test_it_resumes_to_the_bit(run, tmp_path):
    folder, _ = run("one")
    command = [tmp_path, DOOR, *words(f"--load {folder.parent}/checkpoints --ckpt-step 2")]
    log = launch(RUN, command, timeout=300).logs[0]
    resumed, whole = losses.read(tmp_path), losses.read(folder)
    assert sorted(resumed) == [3, 4] and "tensors are unchanged" in log
    for step in resumed:
        assert resumed[step] == whole[step]  # losses, acceptances, norms and the hash of all parameters


@pytest.mark.slow
def test_experts_stay_in_mxfp4(target, tmp_path):
    pytest.importorskip("modelopt.torch.quantization")
    command = [tmp_path, DOOR, *words(f"--load {target} {FRESH}", features=f"{FEATURES},mxfp4-qat")]
    log = launch(RUN, command, timeout=300).logs[0]
    # Three MoE layers of the target and the draft's.
    assert "mxfp4-qat: 4 MoE layers on this rank" in log and "tensors are unchanged" in log


REFUSED = {
    "no attnres": ("kda,gated-mla", "", "add attnres to --k3-plugins"),
    "another feature": (
        f"{FEATURES},qk-clip",
        "",
        "a draft cannot be trained under qk-clip; drop it",
    ),
    "pipeline": (FEATURES, "--pipeline-model-parallel-size 2", "under pipeline parallelism; leave it at 1"),
    "few blocks": (
        FEATURES,
        "--attn-res-block-size 2",
        "the model has 2 Attention Residual blocks (4 layers, --attn-res-block-size), and the draft reads the outputs "
        "of blocks 1, 4 and the last one: it needs at least 4",
    ),
    "no target": (FEATURES, "", "there is no target: give --load DIR"),
    "steps": (FEATURES, "--draft-steps 0", "--draft-steps 0 must be at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    features, more, text = REFUSED[case]
    model = MODEL if "attnres" in features else "--mtp-num-layers 1"
    command = flags(model, TRAINING, f"--k3-plugins {features}", more)
    result = launch(DOOR, command, nprocs=2 if case == "pipeline" else 1, timeout=300, check=False)
    assert result.rc == 2, result.tail()
    for log in result.logs:
        assert text in " ".join(log.split()) and "Traceback" not in log


def test_a_target_without_the_layer_and_a_target_as_a_resumed_run_are_refused(target, tmp_path):
    result = launch(DOOR, words(f"--load {target}"), timeout=300, check=False)
    assert result.rc == 2 and "holds a target and no draft yet: pass --finetune" in result.logs[0]
    result = launch(DOOR, words(f"--load {target} --mtp-num-layers 2"), timeout=300, check=False)
    assert result.rc == 2 and "mtp_num_layers: 1 when it was saved, now 2" in result.logs[0]
