"""Training through the product's door: gradient accumulation, pipeline, checkpoints, metric, witness, doctor."""

import json
import re

import pytest

from tests.distributed.distributed.pipeline_zero2 import zero2_run
from tests.harness.k3_model import DOOR, flags
from tests.harness.launch import launch
from tests.harness.losses import first_difference, read, relative_difference

MUON = """
    --k3-plugins kda,gated-mla,per-head-muon --num-layers 2 --linear-attention-freq [1,0] --ffn-hidden-size 136
    --muon-fp32-matmul-prec high --muon-adamw-lr 1e-3 --train-iters 6 --ckpt-format torch_dist
"""
TWO_RANKS = "--use-distributed-optimizer --micro-batch-size 1"
# fp32 gradients of other micro-batches or ranks differ by 1e-7 in the order of their sums; Newton-Schulz multiplies
# that by up to 485 where a singular value is small. Gradient norms are compared too: clipping hides a doubled gradient.
TRAINING = 2e-5


def train(folder, nprocs, *words, **options):
    return zero2_run.train(folder, flags(MUON, *words), nprocs, zero2=False, timeout=400, **options)


def difference(actual, expected):
    """The larger relative difference of losses and gradient norms."""
    norms = max(abs(actual[i].grad_norm - expected[i].grad_norm) / expected[i].grad_norm for i in expected)
    return max(relative_difference(actual, expected), norms)


@pytest.fixture(scope="module")
def half_way(tmp_path_factory):
    """6 steps at DP 2 with 4 micro-batches each, saved after 3: the folder, and the run."""
    folder = tmp_path_factory.mktemp("muon")
    save = f"--save {folder / 'ckpt'} --save-interval 3 --dist-ckpt-optim-fully-reshardable"
    board = f"--tensorboard-dir {folder / 'board'} --tensorboard-log-interval 1"
    run = train(folder / "dp2", 2, TWO_RANKS, save, board)
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("3")
    return folder, run


def resumed_alike(half_way, folder, nprocs, words):
    saved, whole = half_way
    load = f"--load {saved / 'ckpt'} --dist-ckpt-optim-fully-reshardable --use-distributed-optimizer"
    resumed = train(folder, nprocs, load, words)
    assert sorted(resumed.steps) == [4, 5, 6]
    assert difference(resumed.steps, {i: whole.steps[i] for i in resumed.steps}) <= TRAINING
    return resumed


def test_one_rank_with_one_micro_batch_continues_the_training_of_two_with_four(half_way, tmp_path):
    """Gradient accumulation: the weights of the whole model after three updates, too."""
    resumed = resumed_alike(half_way, tmp_path, 1, "--micro-batch-size 8")
    (mine,), (his, _) = resumed.parameters, half_way[1].parameters
    for name, value in his.items():
        assert (mine[name] - value).abs().max() <= TRAINING * value.abs().max(), name


@pytest.mark.slow  # with Pipeline ZeRO-2 in test_zero2_muon.py by default
def test_kill_during_save_keeps_the_last_checkpoint(half_way, tmp_path):
    _, whole = half_way
    words = f"{TWO_RANKS} --save {tmp_path}/ckpt --save-interval 2"
    env = {"K3_TEST_KILL": "1", "K3_KILL_RANK": "1", "K3_KILL_POINT": "writing the data"}
    killed = train(tmp_path / "killed", 2, words, env=env, check=False)
    assert "killed at" in killed.logs[1]
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (tmp_path / "ckpt" / "iter_0000004").is_dir(), "the save was not under way"
    resumed = train(tmp_path / "resumed", 2, words, f"--load {tmp_path}/ckpt")
    assert first_difference(resumed.steps, {i: step for i, step in whole.steps.items() if i > 2}) is None


# The same model and optimizer flags without the feature.
ADAMW = MUON.replace(",per-head-muon", "").replace("--muon-fp32-matmul-prec high --muon-adamw-lr 1e-3", "")


def test_adamw_refuses_the_checkpoint_with_a_sentence(half_way, tmp_path):
    """And takes the weights alone when it is told so."""
    words = flags(ADAMW, f"{TWO_RANKS} --load {half_way[0] / 'ckpt'} --dist-ckpt-optim-fully-reshardable")
    refused = launch(DOOR, words, nprocs=2, check=False)
    assert refused.rc == 2
    for log in refused.logs:
        assert "holds the optimizer state of per-head-muon" in log and "--no-load-optim" in log, log[-2000:]
    taken = launch(DOOR, [*words, "--no-load-optim"], nprocs=2, records=tmp_path)
    assert sorted(read(taken.records)) == [4, 5, 6]


@pytest.mark.slow
def test_a_checkpoint_of_adamw_is_refused_with_a_sentence_or_converted(tmp_path):
    words = f"{TWO_RANKS} --exit-interval 2 --save-interval 1000 --save {tmp_path}/ckpt"
    launch(DOOR, flags(ADAMW, words), nprocs=2)
    # The learning rate of AdamW's parameters must be the saved one, or their groups are others.
    muon = MUON.replace("--muon-adamw-lr 1e-3", "")
    words = flags(muon, f"{TWO_RANKS} --load {tmp_path}/ckpt")
    refused = launch(DOOR, words, nprocs=2, check=False)
    assert refused.rc == 2
    for log in refused.logs:
        assert "another optimizer's state is in the checkpoint" in log, log[-2000:]
        assert "--muon-adamw-checkpoint convert" in log and "--no-load-optim" in log
    for number, way_out in enumerate((["--muon-adamw-checkpoint", "convert"], ["--no-load-optim"])):
        taken = launch(DOOR, [*words, *way_out], nprocs=2, records=tmp_path / str(number))
        assert sorted(read(taken.records)) == [3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nprocs", "words"),
    [
        (2, "--pipeline-model-parallel-size 2 --micro-batch-size 2"),
        (2, "--tensor-model-parallel-size 2 --micro-batch-size 2"),
        (4, "--micro-batch-size 2"),
    ],
)
def test_other_layouts_continue_it(nprocs, words, half_way, tmp_path):
    resumed_alike(half_way, tmp_path, nprocs, words)


def test_metric_and_witness(half_way):
    folder, run = half_way
    ((owned, received),) = re.findall(
        r"witness per-head-muon: (\d+) matrices owned, (\d+) elements received \(rank 0\)", run.logs[0]
    )
    assert int(owned) > 0 and int(received) > 0
    events = [path.read_bytes() for path in (folder / "board").iterdir()]
    assert any(b"k3/muon-p2p-ms" in event for event in events)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nprocs", "words"),
    [
        (4, "--use-distributed-optimizer --micro-batch-size 1"),
        (2, "--micro-batch-size 2"),
        (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --micro-batch-size 2"),
        (2, "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4"),
    ],
)
def test_other_layouts_train_alike(nprocs, words, tmp_path):
    one = train(tmp_path / "one", 1, "--micro-batch-size 8")
    assert difference(train(tmp_path / "other", nprocs, words).steps, one.steps) <= TRAINING


def test_a_bad_option_ends_the_run_with_exit_code_2(tmp_path):
    result = launch(DOOR, flags(MUON, "--muon-scalar-optimizer lion"), records=tmp_path, check=False)
    assert result.rc == 2 and "--muon-scalar-optimizer lion" in result.logs[0]
    assert not list(tmp_path.glob("rank*"))


def test_the_doctor_prints_the_table_of_a_model_without_building_it_in_memory():
    """K3's own sizes, 2.8 T parameters: the tensors have no memory."""
    words = """
        --json --k3-plugins kda,gated-mla,latent-moe,per-head-muon --k3-platform cpu --optimizer
        --num-layers 4 --linear-attention-freq [1,1,1,0] --hidden-size 7168 --num-attention-heads 96 --kv-channels 128
        --ffn-hidden-size 33792 --kda-num-heads 96 --kda-head-dim 128 --q-lora-rank 1536 --kv-lora-rank 512
        --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --multi-latent-attention
        --num-experts 896 --moe-router-topk 16 --moe-ffn-hidden-size 3072 --moe-latent-size 3584
        --moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 6144 --moe-router-score-function sigmoid
        --moe-router-load-balancing-type none --normalization RMSNorm --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights --position-embedding-type none --seq-length 64
        --max-position-embeddings 64 --tokenizer-type NullTokenizer --vocab-size 163839 --mock-data --train-iters 1
        --lr 1e-3 --micro-batch-size 1 --transformer-impl local --expert-model-parallel-size 8
    """
    result = launch("k3_plugins.doctor", words.split(), nprocs=1, timeout=400, check=False)
    log = result.logs[0]
    assert '"verdict"' in log, log[-3000:]
    report = json.JSONDecoder().raw_decode(log[log.index('{\n  "verdict"') :])[0]
    assert report["problems"] == [], report["problems"]
    rows = {row["parameter"]: row for row in report["optimizer"]}
    assert rows["decoder.layers.[0-2].self_attention.linear_q.weight"]["split"] == "per head: 96 q of 128 rows"
    experts = rows["decoder.layers.[1-3].mlp.experts.weight1"]
    assert experts["shape"] == [896, 6144, 3584] and experts["owner_group"] == "expert data parallel"
    assert rows["decoder.layers.[0-2].self_attention.q_conv"]["optimizer"] == "adamw"
