"""Training through the product's door, from ONE checkpoint: KDA, MLA, plain attention, dense and MoE layers.

The fp64 sweep over schedules stands in tests/distributed/pipeline_parallel/attnres; here is what only a whole job has:
tensor and sequence parallelism, DDP, the optimizer, checkpoints, metrics.
"""

import re

import pytest

from tests.harness import gradients, losses
from tests.harness.k3_model import DOOR, flags
from tests.harness.launch import launch

# fp32: 2^-24 per operation, growing with the depth of sums over 64 tokens and 48 channels
FP32 = 3e-5

# 8 layers in blocks of 3: no stage boundary of PP 2, PP 4 or their virtual stages is the end of a block
K3 = """--k3-plugins kda,gated-mla,attnres --attn-res-block-size 3 --attn-res-two-phase off
    --num-layers 8 --linear-attention-freq [1,1,1,0,1,1,1,0]
    --num-experts 4 --moe-router-topk 2 --moe-layer-freq [0,1,1,1,0,1,1,1] --moe-ffn-hidden-size 32
    --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
    --train-iters 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4"""
PLAIN = """--k3-plugins attnres --attn-res-block-size 2 --attn-res-two-phase off
    --spec k3_plugins.models.kimi_k3.layer_specs gpt
    --num-layers 8 --hidden-size 48 --num-attention-heads 4 --ffn-hidden-size 64
    --train-iters 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4"""
DENSE = """--k3-platform cpu --no-rope-fusion --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 8"""

VPP = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3"
PP4 = "--pipeline-model-parallel-size 4"
TP2_PP2 = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
LAYOUTS = {
    "PP 2": pytest.param(2, "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
    # selective recomputation of the norms starts from inputs that were freed and rebuilt
    "PP 4, selective recompute": pytest.param(
        4, f"{PP4} --recompute-granularity selective --recompute-modules layernorm mlp", marks=pytest.mark.slow
    ),
    "PP 2 VPP 2, full recompute": (2, f"{VPP} 2 {FULL} --attn-res-two-phase on"),
    "PP 2, full recompute of the first layers of a stage": pytest.param(
        2,
        "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block"
        " --recompute-num-layers 3",
        marks=pytest.mark.slow,
    ),
    "PP 2 VPP 4 DP 2, distributed optimizer": (4, f"{VPP} 1 --use-distributed-optimizer"),
    # Megatron trains MoE layers under tensor parallelism with sequence parallelism only
    "TP 2 SP PP 2": (4, TP2_PP2),
    "CP 2": (2, "--context-parallel-size 2"),
    "PP 2 CP 2": pytest.param(
        4, "--pipeline-model-parallel-size 2 --context-parallel-size 2", marks=pytest.mark.slow
    ),
}


def train(records, nprocs, *groups, perturb=False, model=None):
    options = ["--perturb"] if perturb else []
    words = flags(*groups) if model is None else flags(*groups, model=model)
    launch("tests.harness.gradients", [records, *options, DOOR, *words], nprocs=nprocs, timeout=600)
    return records


def initial_checkpoint(root, *groups, model=None):
    """Weights of one process with every vector (queries, norms) made random; lr 0 leaves them alone."""
    save = f"--save {root}/ckpt --save-interval 1 --no-save-optim --no-save-rng --ckpt-format torch_dist"
    train(
        root / "init", 1, *groups, f"--train-iters 1 --lr 0 --min-lr 0 --lr-warmup-iters 0 {save}",
        perturb=True, model=model,
    )
    return f"--load {root}/ckpt --no-load-optim --no-load-rng --finetune --ckpt-format torch_dist"


def assert_equal(run, reference, tolerance=FP32):
    error, worst = gradients.largest_difference(gradients.assemble(run), gradients.assemble(reference))
    assert error <= tolerance, f"gradient of {worst} differs by {error:.1e}"
    assert losses.relative_difference(losses.read(run), losses.read(reference)) <= tolerance


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    root = tmp_path_factory.mktemp("attnres")
    start = initial_checkpoint(root, K3)
    return start, train(root / "one", 1, K3, start)


@pytest.mark.parametrize(("nprocs", "words"), LAYOUTS.values(), ids=LAYOUTS)
def test_layout_equals_one_process(nprocs, words, k3, tmp_path):
    start, one_process = k3
    assert_equal(train(tmp_path / "run", nprocs, K3, words, start), one_process)


@pytest.mark.slow
def test_twenty_steps_twice_with_metric_heat_map_and_a_checkpoint_of_another_layout(k3, tmp_path):
    """Bit-identical runs; then PP 2 VPP 2 is saved in the middle and continued by one process and by PP 4."""
    start, _ = k3
    layout = f"{VPP} 2"
    steps = "--train-iters 20"
    save = f"--save {tmp_path}/ckpt --save-interval 10 --ckpt-format torch_dist --tensorboard-dir {tmp_path}/tb"
    first = launch(DOOR, flags(K3, layout, start, steps, save), nprocs=2, timeout=600, records=tmp_path / "first")
    second = launch(DOOR, flags(K3, layout, start, steps), nprocs=2, timeout=600, records=tmp_path / "second")
    whole = losses.read(first.records)
    assert len(whole) == 20 and losses.first_difference(losses.read(second.records), whole) is None

    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("10")
    resume = f"{steps} --exit-interval 13 --load {tmp_path}/ckpt --ckpt-format torch_dist"
    for nprocs, words in ((1, ""), (4, "--pipeline-model-parallel-size 4")):
        run = launch(DOOR, flags(K3, words, resume), nprocs=nprocs, timeout=600, records=tmp_path / f"resumed{nprocs}")
        rest = {step: whole[step] for step in range(11, 14)}
        assert losses.relative_difference(losses.read(run.records), rest) <= FP32

    assert_metric(tmp_path / "tb")
    # the heat map needs no model: the weights were measured in training
    from k3_plugins.transformer.attention_residuals.plot import iteration_directory, main, read_source_weights

    rows = dict(read_source_weights(iteration_directory(tmp_path / "ckpt")))
    assert [label for label in rows] == [f"{layer} {kind}" for layer in range(8) for kind in "AM"] + ["O"]
    for label, weights in rows.items():
        assert sum(weights) == pytest.approx(1.0, abs=1e-5), label
    assert [sum(w > 0 for w in rows[label]) for label in ("0 A", "0 M", "3 A", "7 M", "O")] == [1, 2, 2, 4, 4]
    picture = tmp_path / "weights.png"
    assert main([str(tmp_path / "ckpt"), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nprocs", "words"),
    [
        (2, "--pipeline-model-parallel-size 2"),
        (4, PP4),
        (2, f"{VPP} 1"),
        (4, f"{PP4} --num-layers-per-virtual-pipeline-stage 1"),
        (4, TP2_PP2),
    ],
    ids=["PP 2", "PP 4", "PP 2 VPP 4", "PP 4 VPP 2", "TP 2 SP PP 2"],
)
def test_twenty_steps_twice_are_identical(nprocs, words, k3, tmp_path):
    start, _ = k3
    runs = []
    for name in ("first", "second"):
        run = launch(
            DOOR, flags(K3, words, start, "--train-iters 20"), nprocs=nprocs, timeout=600, records=tmp_path / name
        )
        runs.append(losses.read(run.records))
    assert len(runs[0]) == 20 and losses.first_difference(runs[1], runs[0]) is None


def assert_metric(directory):
    """`k3/attnres-entropy` is there for every step; between 0 and 1, its largest value (all sources count equally)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    points = events.Scalars("k3/attnres-entropy")
    assert [point.step for point in points] == list(range(1, 21))
    assert all(0.3 < point.value < 1.0 for point in points)


@pytest.mark.slow
def test_plain_attention_mtp_and_bf16(tmp_path):
    """Plain attention with an MTP depth over TP 2 x PP 2, and the same model in bf16 with selective recomputation."""
    model = DENSE.split()
    mtp = "--mtp-num-layers 1 --position-embedding-type rope"
    start = initial_checkpoint(tmp_path / "fp32", PLAIN, mtp, model=model)
    one = train(tmp_path / "one", 1, PLAIN, mtp, start, model=model)
    # without sequence parallelism; blocks of 2 divide the stages of 4 layers; the MTP depth in two phases as well
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --attn-res-two-phase on"
    run = train(tmp_path / "tp_pp", 4, PLAIN, mtp, start, layout, model=model)
    assert_equal(run, one)
    # the decoder ends on the first stage: the hop behind it carries its output alone, to the MTP depth
    behind = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttttttt|mL"
    run = train(tmp_path / "pp", 2, PLAIN, mtp, start, behind, model=model)
    assert_equal(run, one)

    low = f"--bf16 {start} --recompute-granularity selective --recompute-modules core_attn mlp layernorm"
    one = train(tmp_path / "one16", 1, PLAIN, mtp, low, model=model)
    run = train(tmp_path / "pp16", 2, PLAIN, mtp, low, "--pipeline-model-parallel-size 2", model=model)
    # the same bf16 operations in the same order; only sums of bf16 gradients of the blocks are split differently
    assert losses.relative_difference(losses.read(run), losses.read(one)) <= 2e-3


def test_the_choice_of_auto_is_logged_once_and_is_the_one_that_runs(k3):
    """Also: a block of 6 sublayers is the checkpoint's block of 3 layers, one of 4 is not."""
    start, _ = k3
    words = f"{TP2_PP2} {start} --train-iters 1 --lr-warmup-iters 0 --attn-res-two-phase auto --attn-res-block-size 5"
    result = launch(DOOR, flags(K3, words, "--attn-res-block-sublayers 6"), nprocs=4, timeout=600)
    log = "".join(result.logs)
    (choice,) = re.findall(r"attention residuals: evaluation (\S+) \(one block of layers: single pass", log)
    witnesses = re.findall(r"witness attnres: .*", log)
    assert witnesses and all(f" sources, {choice}" in line for line in witnesses), witnesses

    result = launch(DOOR, flags(K3, words, "--attn-res-block-sublayers 4"), nprocs=4, timeout=600, check=False)
    assert result.rc == 2 and "--attn-res-block-size 3" in result.logs[0], result.tail()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--attn-res-block-size 0", "--attn-res-block-size 0 must be at least 1"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
            " --distribute-saved-activations --tensor-model-parallel-size 2",
            "--distribute-saved-activations overwrites",
        ),
    ],
)
def test_bad_flags_end_with_a_sentence(words, message):
    run = launch(DOOR, flags(K3, words), nprocs=1, timeout=600, check=False)
    assert run.rc == 2 and message in run.logs[0]
