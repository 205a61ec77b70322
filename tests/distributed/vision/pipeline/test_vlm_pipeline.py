"""The encoder inside the first stage's forward, under pipelines and sequence parallelism, equals one process."""

import pytest
import torch

from tests.distributed.vision.pipeline.uneven_runs import ENCODER_LAYERS, STEPS, TOLERANCE
from tests.harness import gradients

VPP = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
LAYOUTS = {
    "PP 2, VPP 2": (2, VPP),
    "TP 2, SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "PP 4": (4, "--pipeline-model-parallel-size 4"),
    "TP 2, SP, PP 2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
}
SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in list(LAYOUTS)[2:]]


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:2], *SLOW])
def test_layout_equals_one_process(layout, runs):
    one = runs()
    encoder = [grad for key, grad in one.gradients.items() if "vision_model." in key]
    assert len(encoder) == 2 + ENCODER_LAYERS * 8 + 1 + 3 and all(grad.abs().max() > 0 for grad in encoder)
    runs(*LAYOUTS[layout]).assert_equals(one)


@pytest.mark.slow
def test_a_frozen_encoder_has_no_gradients_and_keeps_its_weights(runs):
    frozen, trained, one = runs(2, f"{VPP} --moonvit-frozen"), runs(2, VPP), runs()
    assert all(not grad.any() for key, grad in frozen.gradients.items() if "vision_model." in key)
    expected = {key: torch.zeros_like(grad) if "vision_model." in key else grad for key, grad in one.gradients.items()}
    error, worst = gradients.largest_difference(frozen.gradients, expected)
    assert error <= TOLERANCE, f"gradient of {worst} differs by {error:.1e}"
    assert abs(frozen.steps[1].loss - trained.steps[1].loss) <= TOLERANCE * trained.steps[1].loss
    assert frozen.steps[STEPS].loss != trained.steps[STEPS].loss
