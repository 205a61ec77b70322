"""Wrong names and sizes end the job with exit code 2 and a sentence on every rank, at whatever moment they show."""

import pytest

from tests.harness.k3_model import DOOR, flags
from tests.harness.launch import launch
from tests.harness.stock_flags import stock


def run(*groups, nprocs=1, check=False):
    words = flags("--train-iters 1 --lr-warmup-iters 0", *groups)
    return launch(DOOR, words, nprocs=nprocs, check=check, timeout=120)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kda-head-dim 0", "--kda-head-dim is 0; it must be a positive number"),
        ("--kda-gate-lower-bound=-inf", "--kda-gate-lower-bound -inf must be a finite negative number"),
        ("--mla-latent-norm-eps -1", "--mla-latent-norm-eps -1.0 must be a small positive number"),
        ("--qk-pos-emb-head-dim -2", "--qk-pos-emb-head-dim -2 must not be negative"),
        ("--linear-attention-freq [1,1,1,0]*", "--linear-attention-freq: '[1,1,1,0]*' cannot be read"),
        ("--k3-check-timeout nan", "--k3-check-timeout nan must be a number of seconds"),
        ("--spec k3_plugins.models.kimi_k3.layer_specz gpt", "the module cannot be imported"),
    ],
)
def test_bad_values(words, message):
    result = run(words)
    assert result.rc == 2 and message in result.logs[0]
    assert "Traceback" not in result.logs[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--spec k3_plugins.models.kimi_k3.layer_specz gpt", "the module cannot be imported"),
        ("--load {folder}", "holds no checkpoint"),
    ],
)
def test_without_features_our_own_door_says_so_too(words, message, tmp_path):
    words = words.format(folder=tmp_path).split()
    result = launch(DOOR, [*stock(""), "--k3-platform", "cpu", *words], check=False, timeout=120)
    assert result.rc == 2 and message in result.logs[0]


def test_a_missing_data_set_ends_both_ranks(tmp_path):
    words = [word for word in flags("--train-iters 1") if word not in ("--mock-data", "--split", "90,10,0")]
    result = launch(DOOR, [*words, "--train-data-path", tmp_path / "none"], nprocs=2, check=False, timeout=120)
    assert result.rc == 2
    assert all(f"--train-data-path {tmp_path}/none: there is no" in log for log in result.logs)
    result = launch(DOOR, words, check=False, timeout=120)
    assert result.rc == 2 and "no data is named" in result.logs[0]


def test_a_checkpoint_of_another_model(tmp_path):
    save = f"--save {tmp_path}/ckpt --save-interval 1"
    assert run(save, check=True).rc == 0
    load = f"--load {tmp_path}/ckpt --no-load-optim --no-load-rng --finetune"
    for words, listed, flag in (
        (
            "--linear-attention-freq [1,1,1,0]",
            "linear_attention_freq: [1, 0, 1, 0] when it was saved, now [1, 1, 1, 0]",
            "--linear-attention-freq '[1,0,1,0]'",
        ),
        (
            "--num-layers 5 --linear-attention-freq [1,0,1,0,0]",
            "num_layers: 4 when it was saved, now 5",
            "--num-layers 4",
        ),
        ("--hidden-size 96", "hidden_size: 48 when it was saved, now 96", "--hidden-size 48"),
    ):
        result = run(load, words, nprocs=2)
        assert result.rc == 2
        assert all(listed in log and flag in log and "Traceback" not in log for log in result.logs), result.tail()


def test_under_torchrun_every_rank_says_why_and_ends_with_2():
    """torchrun ends the others as soon as the first one is gone, so they wait for each other."""
    words = flags("--tensor-model-parallel-size 2 --kda-num-heads 3")
    result = launch(DOOR, words, nprocs=2, check=False, timeout=180, torchrun=True)
    assert all("--kda-num-heads 3 cannot be split" in log for log in result.logs), result.tail()
    assert "exitcode  : 2" in result.agent and "SIGTERM" not in result.agent, result.agent
