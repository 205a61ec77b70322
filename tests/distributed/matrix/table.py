"""What the matrix is made of: features with the flags that turn them on in a small K3, and layouts with theirs.

Every feature of the registry appears in the matrix, whether it stands here or not; a row here says how it is turned on,
what it needs, and how closely it can be compared. Add one for a feature of your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from k3_plugins import pretrain_vlm
from k3_plugins.bootstrap import OWN_DOOR
from tests.distributed.vision.pipeline.uneven_pairs import SEQ_LENGTH
from tests.harness.k3_model import CPU, MODEL

TEXT_DOOR, VISION_DOOR = OWN_DOOR, pretrain_vlm.DOOR

ATTENTION = ("kda", "gated-mla")
"""The attention of the small K3: in every model of the matrix."""

STEPS, SAVED = 4, 2
"""Steps of a run, and the step whose checkpoint `resume` and `re-layout` go on from."""


TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
CP2 = "--context-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
DIST_OPT = "--use-distributed-optimizer"
MOST_RANKS = 4


@dataclass(frozen=True)
class Bounds:
    """Largest relative differences from the one process, by what is compared; None: not compared."""

    loss: float = 2e-5
    """Of every step. fp32: 2^-24 per operation, growing with sums over 32 tokens and 64 channels, as in the layout
    tests."""
    norm: float | None = 2e-5
    """Of every step's gradient norm: a gradient that is counted twice, or not at all, shows here."""
    gradients: float | None = 3e-5
    """Of every gradient of the first step, over its tensor's largest entry."""
    all_gradients: float | None = None
    """Of the first step's gradients as one vector, in the mean square."""
    parameters: float | None = 2e-4
    """Of every parameter after the last step, over its tensor's largest entry. Adam divides by the size of a gradient,
    so elements with small gradients carry more of its rounding than the tensor's largest."""

    def loosest(self, other: Bounds) -> Bounds:
        """Field by field the larger bound."""
        mine, its = asdict(self), asdict(other)
        return Bounds(**{name: max(mine[name], its[name], key=lambda bound: bound or 0) for name in mine})


EXACT = Bounds(0, 0, 0, None, 0)
"""The same bits."""

BF16 = Bounds(loss=5e-3, norm=None, gradients=None, all_gradients=1e-1, parameters=None)
"""Against fp32. bf16 has 8 bits: single roundings of 0.4 %, averaged over the batch in the loss, and added up through
four layers, forward and backward, in a gradient. A token whose router scores are close changes its expert, and with it
whole rows of that expert's gradient, so all gradients are taken as one vector. Adam moves a small element whose sign
changed the other way, so parameters and later norms are not compared; the losses of four steps are."""


@dataclass(frozen=True)
class Subject:
    """How the matrix turns a feature on."""

    flags: str = ""
    needs_experts: bool = False
    """It is about MoE layers, so the model has some."""
    same_model: bool = False
    """It changes how the model is computed, not what: the one process it is compared with goes without it."""
    gradients_in_buffers: bool = True
    """Its gradients stand in Megatron's buffers when the optimizer steps; else norms and parameters are compared."""
    bounds: Bounds = Bounds()
    statistics: tuple[str, ...] = ()
    """Buffers in checkpoints that hold what a rank measured, not what the model is."""
    layout: str = ""
    """Parallelism without which it is refused: in all of its cases, besides the column's."""
    vision: bool = False
    """It trains through the door for images."""


SUBJECTS: Mapping[str, Subject] = {
    "kda": Subject(),
    "gated-mla": Subject(),
    # blocks of 3 layers: no stage of a pipeline ends where a block does
    "attnres": Subject("--attn-res-block-size 3 --attn-res-two-phase off", statistics=("source_weights",)),
    "latent-moe": Subject("--moe-latent-size 32", needs_experts=True),
    # a score at the border of two bins of the histogram moves a bias by a fraction of a bin
    "quantile-balancing": Subject("--moe-qb-ema 0.5", needs_experts=True, bounds=Bounds(parameters=5e-3)),
    "moonep": Subject(needs_experts=True, same_model=True),
    "per-head-muon": Subject("--muon-fp32-matmul-prec high --muon-adamw-lr 1e-3"),
    # low enough that heads are clipped in every step
    "qk-clip": Subject("--qk-clip-threshold 0.02"),
    # Megatron lays a distributed optimizer's state out anew under other TP and PP sizes in this format only
    "pipeline-zero2": Subject(
        f"{DIST_OPT} --dist-ckpt-optim-fully-reshardable", same_model=True, gradients_in_buffers=False
    ),
    # an input at the border between two MXFP8 values becomes the other one, 1/16 away, by its last bit
    "mxfp4-qat": Subject(needs_experts=True, bounds=Bounds(loss=1e-4, norm=1e-3, gradients=1e-3, parameters=2e-3)),
    "activation-manager": Subject(
        "--activation-min-bytes 0 --activation-policy *=cpu,attention@1=recompute", same_model=True
    ),
    "moonvit": Subject(
        "--moonvit-num-layers 3 --moonvit-hidden-size 32 --moonvit-num-heads 2 --moonvit-head-dim 16"
        " --moonvit-ffn-size 64 --moonvit-position-grid 8",
        vision=True,
    ),
    # given times, so that the plan is the same in every run
    "vision-bubble": Subject("--vision-bubble-times 1,2,1,2", same_model=True, layout=PP2, vision=True),
    "dynamic-cp": Subject(same_model=True, layout=CP2, vision=True),
}

MODEL_OF_THE_MATRIX = [
    *MODEL,
    *CPU,
    *f"""--hidden-size 64 --micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --eval-iters 0
    --eval-interval 1000 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
    --adam-eps 1e-4 --log-interval 1 --seed 42 --num-workers 0 --ckpt-format torch_dist""".split(),
]
"""`--adam-eps`: elements whose gradient is 0 but for rounding would move by the learning rate in a direction that
rounding decides."""

TEXT = """--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,10,0 --seq-length 32
    --max-position-embeddings 32""".split()
IMAGES = f"""--tokenizer-type NullTokenizer --vocab-size 258 --padded-vocab-size 320 --seq-length {SEQ_LENGTH}
    --max-position-embeddings {SEQ_LENGTH} --vision-text-alone""".split()

# The first layer is dense, so that stages and chunks differ from each other.
EXPERTS = """--num-experts 8 --moe-layer-freq [0,1,1,1] --moe-router-topk 2 --moe-ffn-hidden-size 32
    --moe-shared-expert-intermediate-size 32 --moe-router-dtype fp32 --moe-router-score-function sigmoid
    --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
    --expert-tensor-parallel-size 1""".split()


@dataclass(frozen=True)
class Layout:
    """How a job is laid out, or what else is done to it."""

    name: str
    data: int = 1
    """Data-parallel size; the other sizes are in the words."""
    words: str = ""
    experts: bool = False
    """It is about MoE layers: the model has some, whatever the feature."""
    bounds: Bounds | None = None
    """Instead of the features' own."""
    goes_on: bool = False
    """It starts from step `SAVED` of the run on one process, weights and optimizer, instead of from the beginning."""
    compared_with: str = "one process, from one checkpoint"


ALONE = Layout("one process")
RELAYOUT = Layout(
    "re-layout", goes_on=True, compared_with="the one process from whose checkpoint the other layout goes on"
)

AXES: Mapping[str, tuple[Layout, ...]] = {
    "TP": (Layout("TP 2", words=TP2),),
    "SP": (Layout("TP 2 + SP", words=f"{TP2} --sequence-parallel"),),
    "PP": (Layout("PP 2", words=PP2),),
    "VPP": (Layout("PP 2 VPP 2", words=VPP2),),
    "EP": (Layout("EP 2", 2, EP2, experts=True),),
    "CP": (Layout("CP 2", words=CP2),),
    "DP": (Layout("DP 2", 2),),
    "distributed optimizer": (Layout("DP 2, distributed optimizer", 2, DIST_OPT),),
    "bf16": (Layout("bf16", words="--bf16", bounds=BF16, compared_with="one process in fp32, from one checkpoint"),),
    "recomputation": (
        Layout(
            "full recomputation",
            words="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            compared_with="one process that keeps all activations",
        ),
        Layout(
            "selective recomputation",
            words="--recompute-granularity selective --recompute-modules layernorm mlp",
            compared_with="one process that keeps all activations",
        ),
    ),
    "resume": (Layout("resume", bounds=EXACT, goes_on=True, compared_with="the run that was not interrupted"),),
    "re-layout": (
        replace(RELAYOUT, name="re-layout to TP 2 + SP", words=f"{TP2} --sequence-parallel"),
        replace(RELAYOUT, name="re-layout to PP 2", words=PP2),
    ),
}
"""The columns: each is tried in the first of its layouts that the feature does not refuse."""

PAIRS: tuple[Layout, ...] = (
    Layout("PP 2 VPP 2 EP 2, distributed optimizer", 2, f"{VPP2} {EP2} {DIST_OPT}", experts=True),
    Layout("EP 2, distributed optimizer", 2, f"{EP2} {DIST_OPT}", experts=True),
    Layout("TP 2 + SP", words=f"{TP2} --sequence-parallel"),
    Layout("what both need"),
)
"""Two features together are tried in the first of these that they do not refuse and that has few enough ranks."""


TOGETHER: tuple[tuple[Layout, tuple[str, ...]], ...] = (
    (replace(PAIRS[0], name=f"all without images, {PAIRS[0].name}"), ("moonvit", "vision-bubble", "dynamic-cp")),
    (replace(PAIRS[0], name=f"all with vision-bubble, {PAIRS[0].name}"), ("dynamic-cp",)),
    (replace(PAIRS[1], name="all with dynamic-cp, CP 2 EP 2, distributed optimizer"), ("vision-bubble",)),
)
"""As many features as exclude no other and fit on few ranks, at once: a layout, and the features that are left out."""
