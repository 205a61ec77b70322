"""QK-clip through the product's door: a head pushed over the threshold comes back to it, in every layout alike."""

from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from k3_plugins.feature import FeatureError
from k3_plugins.optimizer.qk_clip import clip, heads
from k3_plugins.optimizer.qk_clip.heads import ClippedAttention, ClippedRows
from tests.harness.k3_model import MODEL, flags
from tests.harness.launch import launch
from tests.harness.spawn import spawn

RUN = "tests.distributed.optimizer.qk_clip.clip_run"
K3 = [word.replace("kda,gated-mla", "kda,gated-mla,qk-clip") for word in MODEL]
# lr 0: only the clip changes weights, so what the next forward sees follows from it alone
STILL = """--train-iters 2 --lr 0 --min-lr 0 --lr-warmup-iters 0 --micro-batch-size 2 --global-batch-size 8
    --init-method-std 0.2"""
DIST_OPT = "--use-distributed-optimizer"
# A bucket of its own for every parameter: the data-parallel ranks hold half of each, the second one from the middle on.
CUT = f"{DIST_OPT} --overlap-grad-reduce --ddp-bucket-size 1"
LAYOUTS = {
    "DP 2, distributed optimizer, every weight cut": (2, CUT),
    "DP 2, distributed optimizer, bf16": (2, f"{DIST_OPT} --bf16"),
    "bf16, recomputation": (
        1,
        "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "TP 2 SP, evaluation": (2, "--tensor-model-parallel-size 2 --sequence-parallel --eval-interval 1 --eval-iters 1"),
    "DP 2, Pipeline ZeRO-2, step on the CPU": (
        2,
        f"{DIST_OPT} --k3-plugins pipeline-zero2 --zero2-optimizer-device cpu",
    ),
    "DP 2, Pipeline ZeRO-2, Per-Head Muon": (2, f"{DIST_OPT} --k3-plugins pipeline-zero2,per-head-muon"),
    "PP 2 CP 2": (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
    # all softmax attention lies on the second stage, in two chunks
    "PP 2 VPP 2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
}
PLAIN = [
    *flags(
        """--k3-plugins qk-clip --k3-platform cpu --spec k3_plugins.models.kimi_k3.layer_specs gpt
        --num-layers 2 --hidden-size 48 --num-attention-heads 4 --group-query-attention --num-query-groups 2
        --attention-output-gate --add-qkv-bias --ffn-hidden-size 96
        --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
        --position-embedding-type rope --no-rope-fusion --attention-dropout 0 --hidden-dropout 0
        --seq-length 64 --max-position-embeddings 64 --make-vocab-size-divisible-by 8""",
        model=[],
    )
]
PLAIN_LAYOUTS = {
    "one process": (1, ""),
    "TP 2 DP 2, distributed optimizer, every weight cut": (4, f"--tensor-model-parallel-size 2 {CUT}"),
    "TP 2 SP DP 2, distributed optimizer, bf16": (
        4,
        f"--tensor-model-parallel-size 2 --sequence-parallel {DIST_OPT} --bf16",
    ),
}
SLOW = {"TP 2 SP DP 2, distributed optimizer, bf16"}


def run(folder, nprocs, *groups, model=K3):
    """Per attention in model order: maxima [steps, heads], weights before and after each step, all ranks assembled."""
    launch(RUN, [folder, *flags(STILL, *groups, model=model)], nprocs=nprocs, timeout=300)
    ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(nprocs)]
    found = {}
    for report in ranks:
        for index, name in enumerate(report["names"]):
            entry = found.setdefault((report["pp"], name), {})
            entry[report["tp"]] = {
                "maxima": torch.stack([step["maxima"][index] for step in report["steps"]]),
                "before": report["before"][index],
                "weights": [step["weights"][index] for step in report["steps"]],
                "rows": report["rows"][index],
            }
    return [merge(parts) for _, parts in sorted(found.items())], ranks


def merge(parts):
    parts = [parts[rank] for rank in sorted(parts)]
    heads = parts[0]["maxima"].shape[1]
    return {
        "maxima": torch.cat([part["maxima"] for part in parts], dim=1),
        "before": [torch.cat(shards) for shards in zip(*(part["before"] for part in parts), strict=True)],
        "weights": [
            [torch.cat(shards) for shards in zip(*step, strict=True)]
            for step in zip(*(part["weights"] for part in parts), strict=True)
        ],
        "rows": [
            (torch.cat([head + rank * heads for rank, (head, _) in enumerate(rows)]), torch.cat([e for _, e in rows]))
            for rows in zip(*(part["rows"] for part in parts), strict=True)
        ],
    }


def unclipped(root, model):
    """One process with a threshold that nothing reaches: the maxima, and a threshold between them."""
    save = f"--save {root}/ckpt --save-interval 100 --no-save-optim --no-save-rng"
    attentions, ranks = run(
        root / "free", 1, f"--qk-clip-threshold 1e9 --tensorboard-dir {root}/tb {save}", model=model
    )
    assert len(attentions) == 2
    for attention in attentions:
        assert torch.equal(attention["maxima"][0], attention["maxima"][1]), "the same batch, the same weights"
        assert all(map(torch.equal, attention["before"], attention["weights"][1]))
    maxima = torch.stack([attention["maxima"][0] for attention in attentions])
    assert ranks[0]["summary"] == (pytest.approx(maxima.max().item(), rel=1e-6), 0)
    events = EventAccumulator(str(root / "tb"))
    events.Reload()
    assert [point.value for point in events.Scalars("k3/qk-max")] == pytest.approx([maxima.max().item()] * 2, rel=1e-6)
    assert [point.value for point in events.Scalars("k3/qk-clipped-heads")] == [0, 0]
    ordered = maxima[0].sort().values  # of the first attention: nothing before it is clipped
    start = f"--load {root}/ckpt --no-load-optim --no-load-rng --finetune"
    return maxima, ((ordered[2] + ordered[3]) / 2).item(), start


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    return unclipped(tmp_path_factory.mktemp("qk"), K3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return unclipped(tmp_path_factory.mktemp("plain"), PLAIN)


def cases(layouts):
    return [
        pytest.param(*layout, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, layout in layouts.items()
    ]


@pytest.mark.parametrize(("nprocs", "words"), cases({"one process": (1, ""), **LAYOUTS}))
def test_heads_come_back_to_the_threshold(nprocs, words, latent, tmp_path):
    come_back(nprocs, words, latent, tmp_path, K3)


@pytest.mark.parametrize(("nprocs", "words"), cases(PLAIN_LAYOUTS))
def test_heads_of_plain_attention_come_back(nprocs, words, plain, tmp_path):
    """Query groups with gates and biases: a query head's rows in a fused weight that tensor ranks and shards cut."""
    come_back(nprocs, words, plain, tmp_path, PLAIN)


def come_back(nprocs, words, unclipped, tmp_path, model):
    free, tau, start = unclipped
    attentions, ranks = run(tmp_path / "run", nprocs, words, start, f"--qk-clip-threshold {tau!r}", model=model)
    low = "--bf16" in words
    # fp32: rounding of sums of 24 products and of eta; bf16: weights and activations have 8 bits
    tolerance = 2e-2 if low else 1e-5

    assert len(attentions) == 2
    for attention, expected in zip(attentions, free, strict=True):
        torch.testing.assert_close(attention["maxima"][0], expected, rtol=tolerance, atol=0)
        over = attention["maxima"][0] > tau
        for before, after, (head, exponent) in zip(
            attention["before"], attention["weights"][0], attention["rows"], strict=True
        ):
            clipped = over[head] & (exponent > 0)
            assert torch.equal(after[~clipped], before[~clipped]), "rows of other heads keep their bits"
            eta = (tau / attention["maxima"][0])[head] ** exponent
            wanted = before.float() * eta.view(-1, *[1] * (before.dim() - 1))
            torch.testing.assert_close(after.float()[clipped], wanted[clipped], rtol=2**-7 if low else 2e-6, atol=0)

    # the first attention's inputs are the same in both steps, so its heads must be exactly at the threshold
    first, second = attentions[0]["maxima"]
    over = first > tau
    assert over.sum() == 1
    torch.testing.assert_close(second[over], torch.full_like(second[over], tau), rtol=tolerance, atol=0)
    assert torch.equal(second[~over], first[~over])
    assert all(rank["summary"] == ranks[0]["summary"] for rank in ranks)

    # evaluation collects nothing; a recomputed forward sees what the first one saw
    tensor_ranks = 2 if "--tensor-model" in words else 1
    data_parallel = nprocs // tensor_ranks if DIST_OPT in words else 1
    forwards = 2 if "recompute" in words else 1
    steps, microbatches = 2, 4 // data_parallel
    for rank in ranks:
        assert rank["collected"] == steps * microbatches * forwards * len(rank["names"])
    assert sum(len(rank["names"]) for rank in ranks if rank["tp"] == 0) >= 2


def out_of_reach(rank, world_size):
    """An optimizer that steps tensors of its own is refused when the clip is attached."""
    weight = torch.nn.Parameter(torch.ones(4, 3))
    rows = ClippedRows(weight, torch.tensor([0, 0, 1, 1]), torch.ones(4))
    attention = ClippedAttention("layer 0", 2, lambda: None, [rows])
    qk_clip = SimpleNamespace(
        attentions=[attention],
        device=torch.device("cpu"),
        group=torch.distributed.group.WORLD,
        apply=lambda leaf: None,
    )

    def leaf(stepped):
        inner = SimpleNamespace(param_groups=[{"params": stepped}])
        return SimpleNamespace(optimizer=inner, step_with_ready_grads=lambda: True, step=lambda: True)

    frozen = SimpleNamespace(optimizer=None, step_with_ready_grads=lambda: True)
    for stepped in ([weight], [weight] if rank == 0 else []):
        clip.attach(qk_clip, SimpleNamespace(chained_optimizers=[frozen, leaf(stepped)], step=lambda: True))
    with pytest.raises(FeatureError, match="SimpleNamespace steps 0 of the 12 query and key weights of layer 0"):
        clip.attach(qk_clip, leaf([weight.detach().clone()]))


def test_weights_out_of_reach_are_refused():
    spawn(out_of_reach, 2)


def plain_attention(rank, world_size, groups, gate):
    """Maxima of a plain attention before and after one clip, and the weights' bits."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from k3_plugins.models.kimi_k3.layer_specs import block_spec
    from k3_plugins.optimizer.qk_clip.heads import clipped_attentions

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=groups,
        add_qkv_bias=True,
        add_bias_linear=False,
        attention_output_gate=gate,
        normalization="RMSNorm",
        init_method_std=0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, None, kda=None, mla=None),
        vocab_size=24,
        max_sequence_length=16,
        position_embedding_type="rope",
    ).double()
    (attention,) = clipped_attentions([model], alpha=0.3)
    ids = torch.randint(0, 24, (2, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16).expand(2, -1)
    with torch.no_grad():
        for rows in attention.rows:  # a bias that is zero could not show that it is scaled
            if rows.parameter.dim() == 1:
                rows.parameter.normal_(generator=torch.Generator().manual_seed(5))
        model(ids, positions, None)
        first = attention.take()
        tau = first.sort().values[1:3].mean()
        eta = torch.where(first > tau, tau / first, 1.0)
        same = []
        for rows in attention.rows:
            factors = rows.factors(eta)
            same.append((factors == 1).sum().item() / len(factors))
            rows.parameter.mul_(factors.view(-1, *[1] * (rows.parameter.dim() - 1)))
        model(ids, positions, None)
        second = attention.take()
        model.eval()
        model(ids, positions, None)
        assert attention.take() is None
    return first, tau, second, same


@pytest.mark.parametrize(("groups", "gate"), [(4, False), (2, True)])
def test_plain_attention(groups, gate):
    """Multi-head attention shares the factor between query and key; query groups leave it to the query."""
    ((first, tau, second, same),) = spawn(plain_attention, 1, groups, gate)
    # fp64
    torch.testing.assert_close(second[first > tau], tau.expand(2), rtol=1e-12, atol=0)
    torch.testing.assert_close(second[first <= tau], first[first <= tau], rtol=0, atol=0)
    heads, parts = 4, 4 + (4 if gate else 0) + 2 * groups
    scaled = 2 * (2 if groups == heads else 1)  # of two heads: query and key, or query alone
    assert same == pytest.approx([1 - scaled / parts] * 2)


class FusedCore(torch.nn.Module):
    """Keeps maxima as Transformer Engine's core does under Megatron: of every forward pass, training or not."""

    def __init__(self):
        super().__init__()
        self.current_max_attn_logits = None

    def forward(self, query, attention_mask=None):
        new, old = query.detach().amax(dim=(0, 2)), self.current_max_attn_logits
        self.current_max_attn_logits = new if old is None else torch.max(old, new)
        return query


def test_transformer_engines_maxima_of_evaluation_do_not_count():
    """It is not installed here; the stand-in accumulates as Megatron's TEDotProductAttention.forward."""
    core = FusedCore()
    take = heads._recorder("decoder.layers.0.self_attention", torch.nn.ModuleDict({"core_attention": core}))
    small, large = torch.ones(3, 2, 4), torch.full((3, 2, 4), 50.0)
    assert take() is None
    core(small)
    core.eval()
    core(large, attention_mask=None)
    core.train()
    core(2 * small)
    assert torch.equal(take(), torch.tensor([2.0, 2.0])) and take() is None
    core.eval()
    core(large)
    core(large)
    assert take() is None, "the first training step after an evaluation would be clipped by it"
    core.train()
    core(small)
    assert torch.equal(take(), torch.ones(2))


def test_attention_that_reports_no_maxima_is_refused():
    attention = torch.nn.ModuleDict({"core_attention": torch.nn.Identity()})
    with pytest.raises(FeatureError, match="layers.0.self_attention runs Identity, which does not report"):
        heads._recorder("layers.0.self_attention", attention)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # KDA layers have no logits: the whole model has no head to clip
        ("--linear-attention-freq [1,1,1,1]", "no softmax attention whose logits"),
        ("--qk-clip-threshold 0", "--qk-clip-threshold 0.0 must be greater than 0"),
        ("--qk-clip-alpha 1", "--qk-clip-alpha 1.0 must be between 0 and 1"),
        (
            f"{DIST_OPT} --k3-plugins per-head-muon,pipeline-zero2 --zero2-optimizer-device cpu",
            "steps every parameter with AdamW, not with per-head-muon",
        ),
        ("--log-max-attention-logit", "--log-max-attention-logit is Megatron's own"),
        (f"{DIST_OPT} --use-precision-aware-optimizer", "--use-precision-aware-optimizer keeps masters inside"),
        (f"{DIST_OPT} --optimizer-cpu-offload", "--optimizer-cpu-offload updates copies of the weights"),
        ("--use-torch-fsdp2", "--use-torch-fsdp2 shards weights"),
    ],
)
def test_bad_flags_end_with_a_sentence(words, message):
    result = launch("k3_plugins.pretrain_gpt", flags(STILL, words, model=K3), check=False)
    assert result.rc == 2 and message in result.logs[0]
    assert "Traceback" not in result.logs[0] and "iteration        1/" not in result.logs[0]
