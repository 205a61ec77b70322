"""The whole preset k3 at once, on four processes, against one plain process from the same checkpoint.

Everything: PP 2, VPP 2, EP 2 with MoonEP, the encoder in pipeline bubbles, Muon between the shards of the distributed
optimizer, Pipeline ZeRO-2, saved activations in host memory and computed again. Plain: the same mathematics without any
of that machinery, with Megatron's own dispatcher.
"""

from k3_plugins.data import text_shards
from k3_plugins.data.render import __main__ as render
from tests.harness import losses
from tests.harness.k3_model import CPU
from tests.harness.launch import launch

DOOR = "k3_plugins.pretrain_vlm"
STEPS = 10
# fp32 sums in another order, passed on by ten steps of an optimizer that divides by small numbers; measured 2e-6.
TOLERANCE = 1e-4
COMMON = f"""
    --k3-model kimi_k3_moe_tiny --k3-platform cpu --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size 258 --padded-vocab-size 320
    --seq-length 160 --max-position-embeddings 160 --micro-batch-size 1 --global-batch-size 4
    --train-iters {STEPS} --eval-iters 1 --eval-interval {STEPS} --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine
    --weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --seed 42 --muon-fp32-matmul-prec high --vision-text-alone
    --transformer-impl local
""".split()
PLAIN = """--k3-plugins kda,gated-mla,attnres,latent-moe,quantile-balancing,per-head-muon,moonvit
    --moe-token-dispatcher-type alltoall"""
EVERYTHING = """--k3-plugins k3 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2
    --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --use-distributed-optimizer
    --vision-bubble-pieces 2 --activation-policy"""
POLICY = "attention.*=cpu, shared_experts.act=recompute"
FEATURES = """kda gated-mla attnres latent-moe quantile-balancing moonep per-head-muon pipeline-zero2 activation-manager
    moonvit vision-bubble""".split()


def make_data(folder):
    """Drawings and plain text in one folder each for training and validation; the flags that name them."""
    drawing = "--kinds shapes --max-objects 1 --min-edge 42 --max-edge 84 --captions short".split()
    for name, count in (("train", 24), ("valid", 8)):
        assert render.main(["--output", str(folder / name), "--count", str(count), *drawing]) == 0
        texts = [render.__file__, "--output", str(folder / name), "--bytes", "150", "--limit", str(count)]
        assert text_shards.main(texts) == 0
    return ["--vision-data", str(folder / "train"), "--vision-valid-data", str(folder / "valid")]


def test_everything_at_once_equals_a_plain_process(tmp_path):
    root, words = tmp_path, [*CPU, *COMMON, *make_data(tmp_path / "data")]
    save = f"--save {root}/start --save-interval 1 --no-save-optim --no-save-rng --train-iters 1 --lr 0 --min-lr 0"
    launch(DOOR, [*words, *PLAIN.split(), *save.split()], timeout=300)
    start = f"--load {root}/start --no-load-optim --no-load-rng --finetune"
    plain = launch(DOOR, [*words, *PLAIN.split(), *start.split()], records=root / "plain", timeout=300)
    everything = [*words, *EVERYTHING.split(), POLICY, *start.split()]
    run = launch(DOOR, everything, nprocs=4, records=root / "everything", timeout=300)
    log = "".join(run.logs)
    assert all(f"witness {feature}: " in log for feature in FEATURES)
    ours, theirs = losses.read(run.records), losses.read(plain.records)
    assert len(ours) == STEPS and losses.relative_difference(ours, theirs) <= TOLERANCE
    for step in theirs:
        assert abs(ours[step].grad_norm / theirs[step].grad_norm - 1) <= 10 * TOLERANCE, step
