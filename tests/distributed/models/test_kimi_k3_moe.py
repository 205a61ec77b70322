"""All three MoE features through the product's door, from ONE checkpoint in which every MoE layer has another kind of
load: losses and every gradient equal one process with Megatron's dispatcher; balance on every layer and step."""

import pytest
import torch.distributed.checkpoint as dcp

from tests.distributed.models import balanced_run
from tests.harness import gradients, losses
from tests.harness.k3_model import DOOR, flags
from tests.harness.launch import launch

# fp32 sums over 64 tokens and 48 channels in another order, as in the other layout tests.
FP32 = 2e-5
STEPS = 4

# The average over steps keeps the loads skewed: with plain Quantile Balancing they would be even after one step.
MOE = f"""
    --train-iters {STEPS} --num-experts 8 --moe-layer-freq [1,1,1,1] --moe-router-topk 2 --moe-ffn-hidden-size 32
    --moe-latent-size 24 --moe-shared-expert-intermediate-size 32 --moe-router-dtype fp32
    --moe-router-score-function sigmoid --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
    --expert-tensor-parallel-size 1 --moe-qb-ema 0.95 --seq-length 32 --max-position-embeddings 32
"""
FEATURES = "--k3-plugins kda,gated-mla,latent-moe,quantile-balancing"
BALANCED = f"{FEATURES},moonep"

LAYOUTS = {
    "EP 2 alltoall": (2, FEATURES, "--expert-model-parallel-size 2 --save {}/alltoall --save-interval 2"),
    "EP 1 moonep": (1, BALANCED, ""),
    "EP 2 moonep, distributed optimizer": (
        2,
        BALANCED,
        "--expert-model-parallel-size 2 --use-distributed-optimizer --tensorboard-dir {}/metrics "
        "--tensorboard-log-interval 1",
    ),
    "EP 4 moonep": (4, BALANCED, "--expert-model-parallel-size 4 --save {}/moonep --save-interval 2"),
    "PP 2 VPP 2 EP 2 moonep": (
        4,
        BALANCED,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --expert-model-parallel-size 2 "
        "--tensorboard-dir {}/pipeline-metrics --tensorboard-log-interval 1",
    ),
    "TP 2 SP EP 2 moonep, recomputation": (
        2,
        BALANCED,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}
SAVED = {"alltoall": "EP 2 alltoall", "moonep": "EP 4 moonep"}


def train(records, nprocs, *groups, option=None):
    """One run through the product's door; returns its folder with losses, gradients and reports."""
    words = [records, *([option] if option else []), DOOR, *flags(MOE, *groups)]
    launch("tests.distributed.models.balanced_run", words, nprocs=nprocs, timeout=300)
    return records


class Runs:
    """Runs by layout, each made once."""

    def __init__(self, root):
        self.root = root
        self.done = {}
        save = f"--save {root}/start --save-interval 1 --no-save-optim --no-save-rng --ckpt-format torch_dist"
        frozen = "--train-iters 1 --lr 0 --min-lr 0 --lr-warmup-iters 0"
        train(root / "start-run", 1, FEATURES, frozen, save, option="--skew")
        self.start = f"--load {root}/start --no-load-optim --no-load-rng --finetune --ckpt-format torch_dist"

    def __getitem__(self, layout):
        if layout not in self.done:
            nprocs, features, words = (1, FEATURES, "") if layout == "one" else LAYOUTS[layout]
            folder = self.root / layout.replace(" ", "-").replace(",", "")
            self.done[layout] = train(folder, nprocs, features, words.format(self.root), self.start)
        return self.done[layout]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout, runs):
    run, one = runs[layout], runs["one"]
    error, worst = gradients.largest_difference(gradients.assemble(run), gradients.assemble(one))
    assert error <= FP32, f"gradient of {worst} differs by {error:.1e}"
    trained, expected = losses.read(run), losses.read(one)
    assert len(expected) == STEPS and expected[STEPS].loss < expected[1].loss
    assert losses.relative_difference(trained, expected) <= FP32
    # A slot counted as a parameter would show in the norm.
    norms = [abs(trained[i].grad_norm / expected[i].grad_norm - 1) for i in expected]
    assert max(norms) <= FP32, norms
    if "moonep" in layout:
        check_balance(run, LAYOUTS[layout][0], ep=int(layout.split("EP ")[1][0]))


def check_balance(run, nprocs, ep):
    """Rows computed = S*K on every rank, layer, step and forward pass; every skewed kind of load used slots."""
    lines = balanced_run.read(run)
    assert {(line["step"], line["layer"]) for line in lines} == {
        (step, layer) for step in range(1, STEPS + 1) for layer in (1, 2, 3, 4)
    }
    assert len(list(run.glob("moe*.jsonl"))) == nprocs
    for line in lines:
        assert line["rows"] == line["share"] == line["sent"] == line["buffer"] > 0, line
        kind = balanced_run.KINDS[line["layer"] - 1]
        if ep == 1:
            assert line["slots_anywhere"] == 0
        elif kind != "balanced":
            assert line["slots_anywhere"] > 0, (kind, line)


@pytest.mark.parametrize(
    ("layout", "folder"),
    [("EP 2 moonep, distributed optimizer", "metrics"), ("PP 2 VPP 2 EP 2 moonep", "pipeline-metrics")],
    ids=["one stage", "layer 3 on the first of two stages"],
)
def test_metrics_of_the_router_are_written(layout, folder, runs):
    """The single hot expert of layer 3 is chosen by every token: 8 experts, top 2, so 4 times the mean."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs[layout]
    events = EventAccumulator(str(runs.root / folder))
    events.Reload()
    for name, value in (("k3/qb-load-imbalance", 4.0), ("k3/qb-bias-spread", 0.9)):
        written = events.Scalars(name)
        assert [event.step for event in written] == list(range(1, STEPS + 1)), name
        assert 0.8 * value <= written[0].value <= 1.2 * value, (name, written[0].value)


@pytest.mark.parametrize(
    "saved,nprocs,features,ep", [("moonep", 2, FEATURES, 2), ("alltoall", 4, BALANCED, 4)], ids=["to EP 2", "to EP 4"]
)
def test_checkpoints_move_between_dispatchers_and_sizes(saved, nprocs, features, ep, runs, tmp_path):
    """Weights, optimizer state and router biases of step 2, and the steps that follow as if nothing had happened."""
    runs[SAVED[saved]]
    load = f"--load {runs.root}/{saved} --ckpt-step 2 --ckpt-format torch_dist --expert-model-parallel-size {ep}"
    resumed = losses.read(train(tmp_path / "run", nprocs, features, load))
    expected = losses.read(runs["one"])
    assert sorted(resumed) == list(range(3, STEPS + 1))
    assert losses.relative_difference(resumed, {i: expected[i] for i in resumed}) <= FP32


def test_slots_are_not_in_the_checkpoint(runs):
    """The same keys with the same sizes, optimizer state included, whether or not slots were in use."""
    contents, per_rank = [], ("rng_state", "rerun_state_machine_state")
    for saved, layout in SAVED.items():
        runs[layout]
        entries = dcp.FileSystemReader(runs.root / saved / "iter_0000002").read_metadata().state_dict_metadata
        sizes = {key: getattr(entry, "size", None) for key, entry in entries.items()}
        contents.append({key: size for key, size in sizes.items() if not key.startswith(per_rank)})
    assert contents[0] == contents[1]
    assert any("experts" in key for key in contents[0]) and any("exp_avg" in key for key in contents[0])


def test_bf16_gradients_under_moonep_are_those_of_alltoall(runs, tmp_path):
    """One step in bf16: EP 2 with slots against one process, every gradient."""
    words = f"--bf16 --train-iters 1 --lr-warmup-iters 0 {runs.start}"
    one = train(tmp_path / "one", 1, FEATURES, words)
    run = train(tmp_path / "run", 2, BALANCED, words, "--expert-model-parallel-size 2")
    error, worst = gradients.largest_difference(gradients.assemble(run), gradients.assemble(one))
    # bf16 has 8 bits (0.4 %) and the two sum in another order; an expert that is counted twice is 100 %
    assert error <= 2e-2, f"gradient of {worst} differs by {error:.1e}"
    assert losses.relative_difference(losses.read(run), losses.read(one)) <= 1e-3


def test_bf16_with_the_distributed_optimizer_follows_fp32(runs, tmp_path):
    words = "--bf16 --use-distributed-optimizer --expert-model-parallel-size 2"
    run = train(tmp_path / "run", 2, BALANCED, words, runs.start, option="--no-gradients")
    check_balance(run, 2, ep=2)
    trained, expected = losses.read(run), losses.read(runs["one"])
    # bf16 has 8 bits: single roundings of 0.4 %, averaged over the batch.
    assert losses.relative_difference(trained, expected) <= 5e-3
