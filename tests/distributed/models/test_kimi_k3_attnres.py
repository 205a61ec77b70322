"""Attention residuals around KDA and MLA layers: loss and every gradient equal one process."""

import pytest

from tests.harness import gradients, losses
from tests.harness.k3_model import DOOR, MODEL, flags
from tests.harness.launch import launch

# As for the plain K3 (test_kimi_k3_parallel): fp32 rounding, measured 5e-7.
FP32 = 2e-5

K3_ATTNRES = [word.replace("kda,gated-mla", "kda,gated-mla,attnres") for word in MODEL] + ["--attn-res-block-size", "2"]

LAYOUTS = {
    "PP 2 VPP 2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "TP 2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}


def train(records, nprocs, *groups, perturb=False):
    options = ["--perturb"] if perturb else []
    words = flags("--train-iters 5", *groups, model=K3_ATTNRES)
    launch("tests.harness.gradients", [records, *options, DOOR, *words], nprocs=nprocs, timeout=240)
    return records


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A checkpoint with every norm weight and pseudo-query made random, and the one-process run from it."""
    root = tmp_path_factory.mktemp("k3-attnres")
    save = f"--save {root}/ckpt --save-interval 1 --no-save-optim --no-save-rng"
    train(root / "init", 1, f"--train-iters 1 --lr 0 --min-lr 0 --lr-warmup-iters 0 {save}", perturb=True)
    start = f"--load {root}/ckpt --no-load-optim --no-load-rng --finetune"
    return start, train(root / "one", 1, start)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout, reference, tmp_path):
    start, one = reference
    nprocs, words = LAYOUTS[layout]
    run = train(tmp_path / "run", nprocs, words, start)
    error, worst = gradients.largest_difference(gradients.assemble(run), gradients.assemble(one))
    assert error <= FP32, f"gradient of {worst} differs by {error:.1e}"
    assert losses.relative_difference(losses.read(run), losses.read(one)) <= FP32
