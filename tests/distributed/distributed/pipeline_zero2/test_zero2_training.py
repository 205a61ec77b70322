"""pipeline-zero2 in Megatron's own training loop: the same steps and checkpoints as with the distributed optimizer."""

import re

import pytest

from tests.distributed.distributed.pipeline_zero2.zero2_run import DOOR, differences, train
from tests.harness import k3_model
from tests.harness.launch import launch
from tests.harness.losses import first_difference, relative_difference
from tests.harness.stock_flags import MOE, stock

# A larger eps than usual: some gradients are 0 but for rounding (a key bias shifts all logits of a softmax), and AdamW
# would move such an element by the learning rate in a direction that rounding decides.
BASE = "--use-distributed-optimizer --train-iters 20 --micro-batch-size 1 --seq-length 32 --adam-eps 1e-4"
PP2 = "--pipeline-model-parallel-size 2"
PP2_VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 16"
PP2_VPP4 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --num-layers 8 --global-batch-size 8"

# fp32: 2^-24 per addition. A group's sum differs from the whole batch's in a few roundings of each element, which the
# norm averages out and 20 steps carry into the parameters.
LOSS, NORM, PARAMETERS = 1e-6, 1e-6, 1e-6


def both(tmp_path, nprocs, *groups, zero2=""):
    words = stock(BASE, *groups)
    reference = train(tmp_path / "stock", words, nprocs, zero2=False)
    return train(tmp_path / "zero2", [*words, *zero2.split()], nprocs, zero2=True), reference


def is_close(run, reference, loss=LOSS, norm=NORM, parameters=PARAMETERS):
    found = differences(run, reference)
    assert found[0] <= loss and found[1] <= norm and found[2] <= parameters, found


def is_equal(run, reference):
    assert first_difference(run.steps, reference.steps) is None


def test_interleaved_pipeline_with_data_parallelism(tmp_path):
    """PP 2 VPP 2 DP 2, tied embeddings, 4 micro-batches in groups of 2."""
    run, reference = both(tmp_path, 4, PP2_VPP2, "--global-batch-size 8", zero2="--zero2-group 2")
    assert len(run.steps) == 20
    is_close(run, reference)
    for report in run.reports:
        assert report["reductions"] == [2, 2] and report["micro_batches"] == [4, 4]
        assert report["reduced_bytes"] == 2 * report["stock_device_bytes"]
        assert 2 * report["host_bytes"] == report["stock_device_bytes"]
    assert "2 buffers" in run.logs[0] and "4 reduce-scatters of 2 chunks, micro-batches [4] of 4" in run.logs[0]


def test_four_chunks(tmp_path):
    """PP 2 VPP 4: the schedule's group of 2 by default, and half of the memory on the stage without embeddings."""
    run, reference = both(tmp_path, 2, PP2_VPP4, "--untie-embeddings-and-output-weights --global-batch-size 4")
    assert len(run.steps) == 20
    is_close(run, reference)
    for report in run.reports:
        assert report["reductions"] == [2, 2, 2, 2]
        assert report["host_bytes"] == report["stock_device_bytes"]  # DP 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """DP 2 alone, the whole 20 steps with the feature and without, and checkpoints of both at step 10."""
    folder = tmp_path_factory.mktemp("dp2")
    words = stock(BASE, "--global-batch-size 8")
    runs = {}
    for name in ("stock", "zero2"):
        runs[name] = train(folder / name, words, 2, zero2=name == "zero2")
        save = ["--exit-interval", "10", "--save-interval", "1000", "--save", f"{folder}/ckpt-{name}"]
        train(folder / f"half-{name}", [*words, *save], 2, zero2=name == "zero2")
    return folder, words, runs


def test_data_parallelism_alone_is_bit_equal(plain):
    _, _, runs = plain
    is_equal(runs["zero2"], runs["stock"])
    for report in runs["zero2"].reports:
        assert report["device_bytes"] == report["stock_device_bytes"] == 2 * report["host_bytes"]
        assert report["reductions"] == [1] and report["borrowed_beyond"] == 0


@pytest.mark.parametrize(("saved", "loaded"), [("stock", "zero2"), ("zero2", "stock")])
def test_checkpoints_are_the_distributed_optimizers(plain, tmp_path, saved, loaded):
    folder, words, runs = plain
    run = train(tmp_path, [*words, "--load", f"{folder}/ckpt-{saved}"], 2, zero2=loaded == "zero2")
    assert sorted(run.steps) == list(range(11, 21))
    assert first_difference(run.steps, {i: s for i, s in runs["stock"].steps.items() if i > 10}) is None


def test_step_on_the_cpu_continues_a_stock_checkpoint(plain, tmp_path):
    """torch's fused AdamW in host memory against the one that steps on the device: rounding of each update."""
    folder, words, runs = plain
    cpu = ["--load", f"{folder}/ckpt-stock", "--zero2-optimizer-device", "cpu"]
    run = train(tmp_path, [*words, *cpu], 2, zero2=True)
    reference = runs["stock"]
    expected = type(reference)({i: s for i, s in reference.steps.items() if i > 10}, reference.parameters, [], [])
    is_close(run, expected)


@pytest.mark.slow  # with Per-Head Muon in test_zero2_muon.py by default
@pytest.mark.parametrize("nprocs", [1, 4])
def test_saved_at_dp_2_resumed_elsewhere(plain, tmp_path, nprocs):
    folder, words, runs = plain
    run = train(tmp_path, [*words, "--load", f"{folder}/ckpt-zero2"], nprocs, zero2=True)
    assert sorted(run.steps) == list(range(11, 21))
    # Other sums over ranks; a lost moment or step count is 1e-2.
    assert relative_difference(run.steps, {i: s for i, s in runs["stock"].steps.items() if i > 10}) < 2e-6


@pytest.mark.slow  # with Per-Head Muon in test_zero2_muon.py by default
def test_kill_during_save_keeps_the_last_checkpoint(plain, tmp_path):
    _, words, runs = plain
    folder = tmp_path / "ckpt"
    save = [*words, "--save", folder, "--save-interval", "2"]
    env = {"K3_TEST_KILL": "1", "K3_KILL_RANK": "1", "K3_KILL_POINT": "writing the data"}
    killed = train(tmp_path / "killed", save, 2, zero2=True, env=env, check=False)
    assert "killed at" in killed.logs[1]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2"
    run = train(tmp_path / "resumed", [*save, "--load", folder, "--exit-interval", "6"], 2, zero2=True)
    assert sorted(run.steps) == [3, 4, 5, 6]
    assert first_difference(run.steps, {i: runs["stock"].steps[i] for i in run.steps}) is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "pass --use-distributed-optimizer"),
        ("--use-distributed-optimizer --zero2-cpu-adam deepspeed", "add --zero2-optimizer-device cpu"),
    ],
)
def test_refused_before_training(words, sentence):
    plugins = ["--k3-platform", "cpu", "--k3-plugins", "pipeline-zero2"]
    result = launch(DOOR, [*stock("--train-iters 1", words), *plugins], nprocs=2, check=False, timeout=60)
    assert result.rc == 2, result.tail()
    for log in result.logs:
        errors = [line for line in log.splitlines() if line.startswith("k3_plugins: error:")]
        assert len(errors) == 1 and sentence in errors[0], log[-2000:]


SWEEP = {
    # name: processes, Megatron's flags, the feature's flags, tolerances (None: bit-equal)
    "VPP 2, one reduction a step": (4, PP2_VPP2, "", None),
    "VPP 2, groups of 3, the last one short": (4, PP2_VPP2, "--zero2-group 3", {}),
    "VPP 2, untied": (4, f"{PP2_VPP2} --untie-embeddings-and-output-weights", "--zero2-group 2", {}),
    # 24 tokens: a scale that is no power of two.
    "VPP 2, per-token loss": (4, f"{PP2_VPP2} --calculate-per-token-loss --seq-length 24", "--zero2-group 2", {}),
    "VPP 4 DP 2, tied": (4, f"{PP2_VPP4} --global-batch-size 16", "", {}),
    "PP 2 DP 2": (4, f"{PP2} --global-batch-size 16", "", None),
    "PP 2 DP 2, overlap": (
        4,
        f"{PP2} --global-batch-size 16 --overlap-grad-reduce --overlap-param-gather",
        "",
        {},
    ),
    "VPP 4, recompute": (
        2,
        f"{PP2_VPP4} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "",
        {},
    ),
    "EP 2": (
        4,
        f"{' '.join(MOE)} {PP2_VPP2} --expert-model-parallel-size 2",
        "--zero2-group 2",
        {},
    ),
    "TP 2 with q/k norms": (2, "--tensor-model-parallel-size 2 --qk-layernorm", "--zero2-group 2", {}),
    # bf16: 8 bits; a flipped rounding of one weight is 4e-3 of it.
    "bf16": (4, f"{PP2_VPP2} --bf16", "--zero2-group 2", {"loss": 1e-3, "norm": 1e-2, "parameters": 1e-2}),
    "bf16, bit-equal": (2, "--bf16", "", None),
    "bf16 gradients": (
        4,
        f"{PP2_VPP2} --bf16 --grad-reduce-in-bf16",
        "--zero2-group 2",
        {"loss": 1e-3, "norm": 1e-2, "parameters": 1e-1},  # Megatron's own sums have 8 bits
    ),
    # The first steps overflow and are skipped.
    "fp16": (2, "--fp16 --initial-loss-scale 67108864", "", None),
    "average in the collective": (2, "--ddp-average-in-collective", "", {}),
    "no clipping, zeros counted": (2, "--clip-grad 0 --log-num-zeros-in-grad", "", None),
    # Without key biases, whose gradients are 0 but for rounding: now and then one is exactly 0.
    "step on the CPU, zeros counted": (
        2,
        "--log-num-zeros-in-grad --disable-bias-linear",
        "--zero2-optimizer-device cpu",
        {},
    ),
    "step on the CPU": (4, PP2_VPP2, "--zero2-group 2 --zero2-optimizer-device cpu", {}),
    "step on the CPU, bf16": (
        2,
        "--bf16",
        "--zero2-optimizer-device cpu",
        {"loss": 1e-3, "norm": 1e-2, "parameters": 1e-2},
    ),
    "step on the CPU, fp16": (
        2,
        "--fp16 --initial-loss-scale 67108864",
        "--zero2-optimizer-device cpu",
        {"loss": 1e-3, "norm": 1e-2, "parameters": 1e-2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SWEEP)
def test_sweep(tmp_path, case):
    nprocs, words, zero2, tolerances = SWEEP[case]
    run, reference = both(tmp_path, nprocs, "--train-iters 10", words, zero2=zero2)
    if tolerances is None:
        is_equal(run, reference)
    else:
        is_close(run, reference, **tolerances)
    if "zeros counted" in case:
        mine, his = (re.findall(r"num zeros: (\d+)", each.logs[-1]) for each in (run, reference))
        assert mine == his and len(mine) == 10 and int(mine[0]) > 0


K3 = {
    "TP 2 SP, VPP 2": (
        4,
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "CP 2": (2, "--context-parallel-size 2"),
    "bf16 with fp32 parameters": (2, "--bf16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", K3)
def test_k3(tmp_path, case):
    nprocs, layout = K3[case]
    words = k3_model.flags("--use-distributed-optimizer --global-batch-size 8", layout)
    reference = train(tmp_path / "stock", words, nprocs, zero2=False)
    run = train(tmp_path / "zero2", [*words, "--zero2-group", "2"], nprocs, zero2=True)
    # AdamW's usual eps and three times the learning rate; measured 1.3e-6.
    tolerances = {"loss": 1e-3, "norm": 1e-2, "parameters": 1e-1} if "bf16" in layout else {"parameters": 1e-5}
    is_close(run, reference, **tolerances)


@pytest.mark.slow
@pytest.mark.parametrize("zero2", ["", "--zero2-optimizer-device cpu"])
@pytest.mark.parametrize("sharding", ["", "--dist-ckpt-optim-fully-reshardable"])
def test_resume_is_bit_equal(tmp_path, sharding, zero2):
    # Untied: Megatron 0.19.2 itself does not restore tied embeddings of a pipeline from a fully reshardable checkpoint.
    untied = "--untie-embeddings-and-output-weights"
    words = [*stock(BASE, PP2_VPP4, untied, "--global-batch-size 16 --train-iters 8", sharding), *zero2.split()]
    whole = train(tmp_path / "whole", words, 4, zero2=True)
    save = ["--exit-interval", "4", "--save-interval", "1000", "--save", tmp_path / "ckpt"]
    train(tmp_path / "half", [*words, *save], 4, zero2=True)
    run = train(tmp_path / "resumed", [*words, "--load", tmp_path / "ckpt"], 4, zero2=True)
    assert first_difference(run.steps, {i: whole.steps[i] for i in range(5, 9)}) is None


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", PP2, PP2_VPP2])
def test_other_layouts_load_it(tmp_path, layout):
    words = stock(BASE, "--global-batch-size 16 --train-iters 8 --dist-ckpt-optim-fully-reshardable")
    whole = train(tmp_path / "whole", words, 2, zero2=False)
    save = ["--exit-interval", "4", "--save-interval", "1000", "--save", tmp_path / "ckpt"]
    train(tmp_path / "half", [*words, *save], 2, zero2=True)
    run = train(tmp_path / "other", [*words, *layout.split(), "--load", tmp_path / "ckpt"], 2, zero2=True)
    assert sorted(run.steps) == [5, 6, 7, 8]
    assert relative_difference(run.steps, {i: whole.steps[i] for i in range(5, 9)}) < 2e-6
