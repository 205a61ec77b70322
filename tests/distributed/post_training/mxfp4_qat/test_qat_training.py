"""Quantization-aware training through the product's door: every layout equals one process, from one checkpoint that was
trained without it; resumed, laid out anew, refused without the flag."""

import pytest

from tests.distributed.models import balanced_run
from tests.harness import gradients, losses
from tests.harness.k3_model import DOOR, flags
from tests.harness.launch import launch

pytest.importorskip("modelopt.torch.quantization")

STEPS = 4

# Layers 2 and 4 hold experts: under PP 2 VPP 2 all of them are on rank 1, and rank 0 has none.
MODEL = f"""
    --train-iters {STEPS} --num-experts 8 --moe-layer-freq [0,1,0,1] --moe-router-topk 2 --moe-ffn-hidden-size 32
    --moe-latent-size 32 --moe-shared-expert-intermediate-size 32 --moe-router-dtype fp32
    --moe-router-score-function sigmoid --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
    --expert-tensor-parallel-size 1 --moe-qb-ema 0.95 --seq-length 32 --max-position-embeddings 32
"""
PLAIN = "--k3-plugins kda,gated-mla,latent-moe,quantile-balancing"
QAT = f"{PLAIN},mxfp4-qat"
BALANCED = f"{QAT},moonep"

LAYOUTS = {
    "EP 2 moonep": (2, BALANCED, "--expert-model-parallel-size 2 --use-distributed-optimizer"),
    "PP 2 VPP 2": (2, QAT, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
}
SLOW_LAYOUTS = {
    "EP 2 alltoall": (2, QAT, "--expert-model-parallel-size 2 --save {}/alltoall --save-interval 2"),
    "PP 2": (2, QAT, "--pipeline-model-parallel-size 2 --moe-token-dispatcher-type allgather"),
    "TP 2 SP EP 2 moonep, recomputation": (
        2,
        BALANCED,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "PP 2 VPP 2 EP 2 moonep": (
        4,
        BALANCED,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --expert-model-parallel-size 2",
    ),
    "DP 2": (2, QAT, "--use-distributed-optimizer"),
}

# fp32 sums in another order change the last bits of the experts' inputs: measured 1e-6 of a gradient's largest entry,
# 1e-7 of a loss. Where an input lies at the border between two MXFP8 values it becomes the other one, 1/16 away: there
# is room for one such case. A wrong scale or an operand that is not rounded is 1e-2 and more.
GRADIENTS = 1e-4
LOSSES = 2e-5


def train(records, nprocs, *groups, option=None):
    """One run through the product's door; returns its folder with losses, gradients and reports."""
    words = [records, *([option] if option else []), DOOR, *flags(MODEL, *groups)]
    launch("tests.distributed.models.balanced_run", words, nprocs=nprocs, timeout=300)
    return records


class Runs:
    """Runs by layout, each made once."""

    def __init__(self, root):
        self.root = root
        self.done = {}
        save = f"--save {root}/start --save-interval 1 --no-save-optim --no-save-rng --ckpt-format torch_dist"
        frozen = "--train-iters 1 --lr 0 --min-lr 0 --lr-warmup-iters 0"
        train(root / "start-run", 1, PLAIN, frozen, save, option="--skew")
        self.start = f"--load {root}/start --no-load-optim --no-load-rng --finetune --ckpt-format torch_dist"

    def __getitem__(self, layout):
        if layout not in self.done:
            one = {"one": (1, QAT, f"--save {{}}/one --save-interval {STEPS}")}
            nprocs, features, words = (one | LAYOUTS | SLOW_LAYOUTS)[layout]
            folder = self.root / layout.replace(" ", "-").replace(",", "")
            self.done[layout] = train(folder, nprocs, features, words.format(self.root), self.start)
        return self.done[layout]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("qat"))


def compare(runs, layout):
    run, one = runs[layout], runs["one"]
    error, worst = gradients.largest_difference(gradients.assemble(run), gradients.assemble(one))
    print(f"{layout}: gradient of {worst} differs by {error:.1e}")
    trained, expected = losses.read(run), losses.read(one)
    print(f"{layout}: losses differ by {losses.relative_difference(trained, expected):.1e}")
    assert error <= GRADIENTS, f"gradient of {worst} differs by {error:.1e}"
    assert len(expected) == STEPS
    assert losses.relative_difference(trained, expected) <= LOSSES
    if "moonep" in layout:
        lines = balanced_run.read(run)
        assert lines and all(line["rows"] == line["share"] for line in lines)
        assert any(line["slots_anywhere"] > 0 for line in lines)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout, runs):
    compare(runs, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW_LAYOUTS)
def test_more_layouts_equal_one_process(layout, runs):
    compare(runs, layout)


@pytest.mark.slow
def test_a_checkpoint_continues_under_another_layout(runs, tmp_path):
    """Saved under EP 2 after two steps, continued under EP 4 with MoonEP and the optimizer's state."""
    runs["EP 2 alltoall"]
    load = f"--load {runs.root}/alltoall --ckpt-step 2 --ckpt-format torch_dist --expert-model-parallel-size 4"
    resumed = losses.read(train(tmp_path / "run", 4, BALANCED, load))
    expected = losses.read(runs["one"])
    assert sorted(resumed) == list(range(3, STEPS + 1))
    assert losses.relative_difference(resumed, {i: expected[i] for i in resumed}) <= LOSSES


def test_a_checkpoint_of_quantized_experts_is_refused_without_the_flag(runs):
    runs["one"]
    words = flags(MODEL, PLAIN, f"--load {runs.root}/one --ckpt-format torch_dist")
    result = launch(DOOR, words, timeout=300, check=False)
    assert result.rc == 2
    assert "it was saved with feature 'mxfp4-qat', which is off" in result.logs[0]
    assert "--k3-plugins kda,gated-mla,latent-moe,quantile-balancing,mxfp4-qat" in result.logs[0]
    assert "Traceback" not in result.logs[0]
