"""Training on images and text through its door: its parallelisms against one process, resume, refusals."""

import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from k3_plugins.data.render import __main__ as render
from tests.harness import gradients, losses
from tests.harness.k3_model import CPU, MODEL
from tests.harness.launch import launch

DOOR = "k3_plugins.pretrain_vlm"
STEPS = 4
FEATURES = ["--k3-plugins", "kda,gated-mla,moonvit"]
TRAINING = f"""
    --moonvit-num-layers 2 --moonvit-hidden-size 32 --moonvit-num-heads 2 --moonvit-head-dim 16 --moonvit-ffn-size 64
    --moonvit-position-grid 8
    --tokenizer-type NullTokenizer --vocab-size 258 --padded-vocab-size 320
    --seq-length 768 --max-position-embeddings 768
    --micro-batch-size 1 --global-batch-size 2 --train-iters {STEPS} --eval-iters 1 --eval-interval {STEPS}
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --seed 42
    --num-workers 0
""".split()
DIVIDED = "--k3-plugins kda,gated-mla,moonvit,dynamic-cp --dynamic-cp-imbalance 1.0 --context-parallel-size 2"
LAYOUTS = {
    "one": (1, ""),
    "one, per token": (1, "--calculate-per-token-loss"),
    "TP 2": (2, "--tensor-model-parallel-size 2"),
    "CP 2, encoder divided": (2, f"{DIVIDED} --tensorboard-dir FOLDER/board"),
    "CP 2": (2, "--context-parallel-size 2"),
    "CP 2, encoder divided, per token": (2, f"{DIVIDED} --calculate-per-token-loss"),
    "DP 2, distributed optimizer": (2, "--use-distributed-optimizer"),
    "TP 2 SP CP 2, encoder divided": (4, f"{DIVIDED} --tensor-model-parallel-size 2 --sequence-parallel"),
    "PP 2 CP 2, encoder divided, recomputed": (4, f"{DIVIDED} --pipeline-model-parallel-size 2 --moonvit-recompute"),
    "PP 2 CP 2, encoder divided, in bubbles": (
        4, f"{DIVIDED.replace('dynamic-cp ', 'dynamic-cp,vision-bubble ', 1)} --pipeline-model-parallel-size 2"
    ),
    "CP 2 DP 2, encoder divided, overlapped": (
        4, f"{DIVIDED} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    ),
}  # fmt: skip
QUICK = ("TP 2", "CP 2, encoder divided")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in QUICK and "one" not in name]


def words(data, *groups):
    return [*MODEL, *CPU, *TRAINING, *FEATURES, *data, *(word for group in groups for word in group.split())]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    flags = ["--max-edge", "70", "--kinds", "shapes,scene"]
    assert render.main(["--output", str(root / "train"), "--count", "12", *flags]) == 0
    assert render.main(["--output", str(root / "valid"), "--count", "4", "--seed", "1", *flags]) == 0
    return ["--vision-data", str(root / "train"), "--vision-valid-data", str(root / "valid")]


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """run(layout): the folder of its records, and the result; every layout starts from the same weights."""
    root, done = tmp_path_factory.mktemp("runs"), {}
    save = f"--save {root}/start --save-interval 1 --no-save-optim --no-save-rng"
    # Norms unlike one, drawn once: under tensor parallelism other parameters would get other numbers.
    start = [root / "record", "--perturb", DOOR, *words(data, "--train-iters 1 --eval-iters 0 --lr 0 --min-lr 0", save)]
    launch("tests.harness.gradients", start, timeout=300)
    start = f"--load {root}/start --no-load-optim --no-load-rng --finetune"

    def run(layout):
        if layout not in done:
            folder = root / layout.replace(" ", "-").replace(",", "")
            nprocs, flags = LAYOUTS[layout]
            command = [folder, DOOR, *words(data, start, flags.replace("FOLDER", str(folder)))]
            done[layout] = folder, launch("tests.harness.gradients", command, nprocs=nprocs, timeout=300)
        return done[layout]

    return run


def test_it_trains_the_encoder_from_the_first_step(runs):
    folder, result = runs("one")
    (log,) = result.logs
    assert "12 pairs" in log and "2 encoder blocks" in log and "patches encoded" in log
    assert f"validation loss at iteration {STEPS}" in log
    steps = losses.read(folder)
    assert len(steps) == STEPS and steps[STEPS].loss < steps[1].loss
    encoder = {key: grad for key, grad in gradients.assemble(folder).items() if "vision_model." in key}
    assert len(encoder) == 2 + 2 * 8 + 1 + 3
    assert all(float(grad.abs().max()) > 0 for grad in encoder.values())


@pytest.mark.parametrize("layout", [*QUICK, *SLOW])
def test_layout_equals_one_process(layout, runs):
    (folder, _), (one, _) = runs(layout), runs("one, per token" if "per token" in layout else "one")
    error, worst = gradients.largest_difference(gradients.assemble(folder), gradients.assemble(one))
    assert error <= 2e-5, f"gradient of {worst} differs by {error:.1e}"
    assert losses.relative_difference(losses.read(folder), losses.read(one)) <= 2e-5


def test_the_divided_load_is_shown_and_logged(runs):
    folder, result = runs("CP 2, encoder divided")
    sentence = r"(\d+) of (\d+) images split over 2 ranks, largest over mean load [\d.]+ \([\d.]+ unsplit"
    (shown,) = set(re.findall(sentence, "".join(result.logs)))
    assert 0 < int(shown[0]) <= int(shown[1])
    events = EventAccumulator(str(folder / "board")).Reload()
    after, before = (
        [event.value for event in events.Scalars(f"k3/vit-load-max-over-mean{part}")] for part in ("", "-unsplit")
    )
    assert len(after) == len(before) == STEPS
    assert all(1 <= load <= 1.05 and load <= unsplit <= 2 for load, unsplit in zip(after, before, strict=True))
    assert max(before) > 1.05


@pytest.mark.slow
def test_it_resumes_in_the_middle_of_the_data(data, tmp_path):
    for folder, flags in (
        ("whole", ""),
        ("first", f"--save {tmp_path}/save --save-interval 2 --exit-interval 2"),
        ("second", f"--load {tmp_path}/save"),
    ):
        launch("tests.harness.gradients", [tmp_path / folder, DOOR, *words(data, flags)], timeout=300)
    resumed, whole = losses.read(tmp_path / "second"), losses.read(tmp_path / "whole")
    assert sorted(resumed) == [3, 4]
    assert losses.relative_difference(resumed, {step: whole[step] for step in resumed}) <= 2e-5


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", "no images are named: give --vision-data DIR"),
        pytest.param("--micro-batch-size 2", "--micro-batch-size 2: training with images runs with 1 only",
                     marks=pytest.mark.slow),
        pytest.param("--vision-data /nowhere", "there are no *.tar shards", marks=pytest.mark.slow),
        pytest.param("--mock-data --vision-data x", "--mock-data belongs to k3_plugins.pretrain_gpt",
                     marks=pytest.mark.slow),
        pytest.param("--vocab-size 200 --vision-data x", "--vocab-size 200 must be at least 258",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(flags, sentence):
    result = launch(DOOR, words([], "--eval-iters 0", flags), timeout=300, check=False)
    assert result.rc == 2 and sentence in result.logs[0], result.logs[0]


@pytest.mark.slow
def test_other_doors_refuse_the_encoder():
    flags = words([], "--eval-iters 0 --mock-data")
    result = launch("k3_plugins.pretrain_gpt", flags, timeout=300, check=False)
    assert result.rc == 2 and "moonvit trains through python -m k3_plugins.pretrain_vlm" in result.logs[0]
