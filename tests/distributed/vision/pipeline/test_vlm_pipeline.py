"""The encoder inside the first stage's forward, under pipelines and sequence parallelism, equals one process."""

import pytest
import torch

from tests.distributed.vision.pipeline import uneven_pairs
from tests.harness import gradients, losses
from tests.harness.k3_model import CPU, MODEL
from tests.harness.launch import launch

DOOR = "k3_plugins.pretrain_vlm"
STEPS = 4
TRAINING = f"""
    --k3-plugins kda,gated-mla,moonvit
    --moonvit-num-layers 2 --moonvit-hidden-size 32 --moonvit-num-heads 2 --moonvit-head-dim 16 --moonvit-ffn-size 64
    --moonvit-position-grid 8
    --tokenizer-type NullTokenizer --vocab-size 258 --padded-vocab-size 320
    --seq-length {uneven_pairs.SEQ_LENGTH} --max-position-embeddings {uneven_pairs.SEQ_LENGTH}
    --micro-batch-size 1 --global-batch-size 8 --train-iters {STEPS} --eval-iters 1 --eval-interval {STEPS}
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --seed 42
    --num-workers 0
""".split()
LAYOUTS = {
    "PP 2, VPP 2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "TP 2, SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "PP 4": (4, "--pipeline-model-parallel-size 4"),
    "TP 2, SP, PP 2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "PP 2, DP 2": (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-param-gather"
                      " --overlap-grad-reduce --num-layers-per-virtual-pipeline-stage 1"),
}  # fmt: skip
SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in list(LAYOUTS)[2:5]]


class Runs:
    """Training from one checkpoint in any layout; each is run once."""

    def __init__(self, root):
        self.root, self.done = root, {}
        uneven_pairs.write(root / "train", 24, seed=0)
        uneven_pairs.write(root / "valid", 8, seed=1)
        self.words = [*MODEL, *CPU, *TRAINING, "--vision-data", root / "train", "--vision-valid-data", root / "valid",
                      "--vision-text-alone"]  # fmt: skip
        save = f"--save {root}/start --save-interval 1 --no-save-optim --no-save-rng --train-iters 1 --eval-iters 0"
        # Norms unlike one, drawn once: in other layouts other parameters would get other numbers.
        words = [*self.words, *f"{save} --lr 0 --min-lr 0".split()]
        launch("tests.harness.gradients", [root / "record", "--perturb", DOOR, *words], timeout=300)

    def __call__(self, name, nprocs, flags):
        if name not in self.done:
            folder = self.root / f"run{len(self.done)}"
            load = f"--load {self.root}/start --no-load-optim --no-load-rng --finetune {flags}".split()
            command = [folder, DOOR, *self.words, *load]
            self.done[name] = folder, launch("tests.harness.gradients", command, nprocs=nprocs, timeout=300)
        return self.done[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:2], *SLOW])
def test_layout_equals_one_process(layout, runs):
    (folder, result), (one, _) = runs(layout, *LAYOUTS[layout]), runs("one", 1, "")
    actual, expected = gradients.assemble(folder), gradients.assemble(one)
    assert sum("vision_model." in key for key in expected) == 2 + 2 * 8 + 1 + 3
    assert all(grad.abs().max() > 0 for key, grad in expected.items() if "vision_model." in key)
    # fp32 sums in another order, relative to a tensor's largest entry.
    error, worst = gradients.largest_difference(actual, expected)
    assert error <= 2e-5, f"gradient of {worst} differs by {error:.1e}"
    assert losses.relative_difference(losses.read(folder), losses.read(one)) <= 2e-5
    assert any("validation loss at iteration" in log for log in result.logs)


def test_a_frozen_encoder_has_no_gradients_and_keeps_its_weights(runs):
    layout = LAYOUTS["PP 2, VPP 2"]
    folder, _ = runs("frozen", layout[0], layout[1] + " --moonvit-frozen")
    (trained, _), (one, _) = runs("PP 2, VPP 2", *layout), runs("one", 1, "")
    frozen, expected = gradients.assemble(folder), gradients.assemble(one)
    assert all(not grad.any() for key, grad in frozen.items() if "vision_model." in key)
    expected = {key: torch.zeros_like(grad) if "vision_model." in key else grad for key, grad in expected.items()}
    error, worst = gradients.largest_difference(frozen, expected)
    assert error <= 2e-5, f"gradient of {worst} differs by {error:.1e}"
    steps, others = losses.read(folder), losses.read(trained)
    assert abs(steps[1].loss - others[1].loss) <= 2e-5 * others[1].loss and steps[STEPS].loss != others[STEPS].loss
