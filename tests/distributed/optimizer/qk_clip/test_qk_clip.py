"""QK-clip through the product's door: a head pushed over the threshold comes back to it, in every layout alike."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness.k3_model import MODEL, flags
from tests.harness.launch import launch
from tests.harness.spawn import spawn

RUN = "tests.distributed.optimizer.qk_clip.clip_run"
K3 = [word.replace("kda,gated-mla", "kda,gated-mla,qk-clip") for word in MODEL]
# lr 0: only the clip changes weights, so what the next forward sees follows from it alone
STILL = """--train-iters 2 --lr 0 --min-lr 0 --lr-warmup-iters 0 --micro-batch-size 2 --global-batch-size 8
    --init-method-std 0.2"""
DIST_OPT = "--use-distributed-optimizer"
LAYOUTS = {
    "DP 2, distributed optimizer": (2, DIST_OPT),
    "DP 2, distributed optimizer, bf16": (2, f"{DIST_OPT} --bf16"),
    "bf16, recomputation": (
        1, "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "TP 2 SP, evaluation": (
        2, "--tensor-model-parallel-size 2 --sequence-parallel --eval-interval 1 --eval-iters 1"
    ),
    "DP 2, Pipeline ZeRO-2, step on the CPU": (
        2, f"{DIST_OPT} --k3-plugins pipeline-zero2 --zero2-optimizer-device cpu"
    ),
    "DP 2, Pipeline ZeRO-2, Per-Head Muon": (2, f"{DIST_OPT} --k3-plugins pipeline-zero2,per-head-muon"),
    "PP 2 CP 2": (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
}


def run(folder, nprocs, *groups):
    """Per attention in model order: maxima [steps, heads], weights before and after each step, all ranks assembled."""
    launch(RUN, [folder, *flags(STILL, *groups, model=K3)], nprocs=nprocs, timeout=300)
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
    return {
        "maxima": torch.cat([part["maxima"] for part in parts], dim=1),
        "before": [torch.cat(shards) for shards in zip(*(part["before"] for part in parts), strict=True)],
        "weights": [
            [torch.cat(shards) for shards in zip(*step, strict=True)]
            for step in zip(*(part["weights"] for part in parts), strict=True)
        ],
        "rows": parts[0]["rows"],
    }


@pytest.fixture(scope="module")
def unclipped(tmp_path_factory):
    """One process with a threshold that nothing reaches: the maxima, and a threshold between them."""
    root = tmp_path_factory.mktemp("qk")
    save = f"--save {root}/ckpt --save-interval 100 --no-save-optim --no-save-rng"
    attentions, ranks = run(root / "free", 1, f"--qk-clip-threshold 1e9 --tensorboard-dir {root}/tb {save}")
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


@pytest.mark.parametrize(("nprocs", "words"), [(1, ""), *LAYOUTS.values()], ids=["one process", *LAYOUTS])
def test_heads_come_back_to_the_threshold(nprocs, words, unclipped, tmp_path):
    free, tau, start = unclipped
    attentions, ranks = run(tmp_path / "run", nprocs, words, start, f"--qk-clip-threshold {tau!r}")
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
            head = torch.arange(len(before)) // (len(head) // (int(head.max()) + 1))
            exponent = exponent.repeat(len(before) // len(exponent))
            clipped = over[head] & (exponent > 0)
            assert torch.equal(after[~clipped], before[~clipped]), "rows of other heads keep their bits"
            eta = (tau / attention["maxima"][0])[head, None] ** exponent[:, None]
            wanted = (before.float() * eta)[clipped]
            torch.testing.assert_close(after.float()[clipped], wanted, rtol=2**-7 if low else 2e-6, atol=0)

    # the first attention's inputs are the same in both steps, so its heads must be exactly at the threshold
    first, second = attentions[0]["maxima"]
    over = first > tau
    assert over.sum() == 1
    torch.testing.assert_close(second[over], torch.full_like(second[over], tau), rtol=tolerance, atol=0)
    assert torch.equal(second[~over], first[~over])
    assert all(rank["summary"] == ranks[0]["summary"] for rank in ranks)

    # evaluation collects nothing; a recomputed forward sees what the first one saw
    data_parallel = nprocs if DIST_OPT in words else 1
    stages = 2 if "--pipeline-model" in words else 1
    forwards = 2 if "recompute" in words else 1
    steps, microbatches = 2, 4 // data_parallel
    assert {rank["collected"] for rank in ranks} == {steps * microbatches * forwards * (2 // stages)}


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--qk-clip-threshold 0", "--qk-clip-threshold 0.0 must be greater than 0"),
        ("--qk-clip-alpha 1", "--qk-clip-alpha 1.0 must be between 0 and 1"),
        (
            f"{DIST_OPT} --k3-plugins per-head-muon,pipeline-zero2 --zero2-optimizer-device cpu",
            "steps every parameter with AdamW, not with per-head-muon",
        ),
        ("--log-max-attention-logit", "--log-max-attention-logit is Megatron's own"),
    ],
)
def test_bad_flags_end_with_a_sentence(words, message):
    result = launch("k3_plugins.pretrain_gpt", flags(STILL, words, model=K3), check=False)
    assert result.rc == 2 and message in result.logs[0]
