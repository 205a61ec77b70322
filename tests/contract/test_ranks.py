"""Jobs of two gloo ranks: they agree before the first collective, and when one of them ends, all end with code 2."""

import threading

import pytest

from k3_plugins.agreement import Disagreement, compare, ranks_text
from tests.contract.toys import TINY_GPT, run_ranks
from tests.harness.launch import launch

DOOR = "k3_plugins.pretrain_gpt"


def both_exit_with(ranks, *sentences):
    """Every rank ends with exit code 2 and says why, exactly one line per rank, before any training."""
    assert ranks.codes == [2] * len(ranks.codes), ranks
    for log in ranks.logs:
        errors = [line for line in log.splitlines() if line.startswith("k3_plugins: error: ")]
        assert len(errors) == 1, ranks
        for sentence in sentences:
            assert sentence in log, ranks
    assert "lm loss" not in "".join(ranks.logs), ranks


# -- the comparison by itself ------------------------------------------------------------------------------------------


@pytest.fixture
def store():
    from torch.distributed import HashStore

    return HashStore()


def compare_in_threads(store, contents, timeout=5.0):
    """compare() on as many ranks as there are contents (None: that rank never calls); the message each one got."""
    told = [None] * len(contents)

    def rank_body(rank):
        try:
            compare(store, rank, len(contents), contents[rank], timeout)
            told[rank] = ""
        except Disagreement as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=rank_body, args=(r,)) for r, c in enumerate(contents) if c is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


SAME = {"features": ["kda"], "configs": {"kda": {"kda_head_dim": 4}}, "patches": ["a", "b"], "megatron": "0.19.2"}


def test_equal_ranks_agree(store):
    assert compare_in_threads(store, [SAME, dict(SAME), dict(SAME)]) == ["", "", ""]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"features": ["kda", "attnres"]}, "features is ['kda', 'attnres'], not ['kda']"),
        ({"configs": {"kda": {"kda_head_dim": 8}}}, "configs.kda.kda_head_dim is 8, not 4"),
        ({"patches": ["a"]}, "patches differ by b"),
        ({"patches": ["b", "a"]}, "patches are in another order"),
        ({"megatron": "0.19.1"}, "megatron is 0.19.1, not 0.19.2"),
    ],
)
def test_every_rank_is_told_what_differs_and_where(store, change, words):
    told = compare_in_threads(store, [SAME, {**SAME, **change}, SAME])
    assert told[0] == told[1] == told[2]
    assert "ranks 0, 2 against" in told[0] and f"rank 1: {words}" in told[0]


def test_a_rank_that_never_reports_is_named_in_bounded_time(store):
    told = compare_in_threads(store, [SAME, None, SAME], timeout=0.5)
    assert told[0] == told[2] and "rank 1 did not report" in told[0] and "--k3-plugins" in told[0]


def test_if_rank_0_never_answers_the_others_say_so(store):
    told = compare_in_threads(store, [None, SAME], timeout=0.1)
    assert "rank 0 gave no verdict" in told[1] and "--k3-plugins" in told[1]


def test_ranks_are_written_as_ranges():
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert ranks_text([3]) == "rank 3"


# -- real jobs ---------------------------------------------------------------------------------------------------------


def test_a_good_job_reports_once_and_proves_every_feature(tmp_path):
    flags = [*TINY_GPT, "--tensor-model-parallel-size", "2", "--k3-plugins", "toy,toy-probe", "--toy-width", "5"]
    ranks = run_ranks(DOOR, flags, tmp_path, nprocs=2)
    assert ranks.codes == [0, 0], ranks
    first, second = ranks.logs
    assert "cpu (the only one); not gpu: no CUDA" in first
    for words in ("wrap get_optimizer_param_scheduler", "wrap train_step", "witness toy: 1 toy (ranks 0-1)"):
        assert first.count(words) == 1, ranks
        assert words not in second, ranks
    assert first.index("wrap train_step") < first.index("\ntraining ...\n") < first.index("witness toy")


def test_ranks_with_different_patches_all_end(tmp_path):
    flags = [*TINY_GPT, "--tensor-model-parallel-size", "2", "--k3-plugins", "toy"]
    ranks = run_ranks(DOOR, flags, tmp_path, nprocs=2, TOY_EXTRA_PATCH="1")
    both_exit_with(ranks, "do not run the same thing", "toy.extra")


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        ("--hidden-size 64", "model.hidden_size is 64, not 32"),
        ("--tensor-model-parallel-size 1", "layout.tensor_model_parallel_size is 1, not 2"),
        ("--attn-res-block-size 2", "configs.attnres.attn_res_block_size is 2, not 1"),
        ("--k3-plugins toy", "features is ['attnres', 'toy'], not ['attnres']"),
    ],
)
def test_ranks_with_other_sizes_or_features_all_end(words, difference, tmp_path):
    flags = [*TINY_GPT, "--tensor-model-parallel-size", "2", "--k3-plugins", "attnres", "--attn-res-block-size", "1"]
    ranks = run_ranks(DOOR, flags, tmp_path, nprocs=2, TOY_WORDS_1=words)
    both_exit_with(ranks, "do not run the same thing", difference, "Start every rank with the same command line")


def test_a_rank_without_plug_ins_ends_the_job_in_bounded_time(tmp_path):
    flags = [*TINY_GPT, "--tensor-model-parallel-size", "2", "--k3-platform", "cpu", "--k3-check-timeout", "3"]
    ranks = run_ranks(DOOR, [*flags, "--k3-plugins", "toy"], tmp_path, nprocs=2, TOY_WITHOUT="1")
    assert not ranks.timed_out, ranks
    assert ranks.codes[0] == 2 and "rank 1 did not report any feature within 3 s" in ranks.logs[0], ranks
    assert "lm loss" not in ranks.logs[1], ranks


def test_a_witness_that_fails_on_one_rank_ends_all(tmp_path):
    flags = [*TINY_GPT, "--tensor-model-parallel-size", "2", "--k3-plugins", "toy"]
    ranks = run_ranks(DOOR, flags, tmp_path, nprocs=2, TOY_BAD_WITNESS="1")
    both_exit_with(ranks, "did not run as it should", "toy on rank 1: 0 toys")


def test_a_rank_whose_model_cannot_be_built_ends_all(tmp_path):
    flags = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--k3-plugins", "toy"]
    ranks = run_ranks(DOOR, flags, tmp_path, nprocs=2, TOY_BAD_BUILD="1")
    both_exit_with(ranks, "the toy does not fit stage 1")
    assert "rank 1: " in ranks.logs[0], ranks


def test_a_rank_whose_data_cannot_be_built_ends_all(tmp_path):
    """Megatron builds data between the set-up and the first step."""
    flags = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--k3-plugins", "toy"]
    ranks = run_ranks(DOOR, flags, tmp_path, nprocs=2, TOY_BAD_DATA="1")
    assert ranks.codes == [1, 1] and "Traceback" in ranks.logs[1], ranks
    assert "error: rank 1: failed before the first training step was done: OSError" in ranks.logs[0], ranks


@pytest.mark.slow
def test_a_door_ends_every_rank_with_its_own_sentence(tmp_path):
    """Under torchrun, which ends the other ranks as soon as one is gone."""
    flags = [word for word in TINY_GPT if word != "--mock-data"]
    run = launch(DOOR, flags, nprocs=2, torchrun=True, timeout=120, check=False)
    assert run.rc != 0 and not run.timed_out, run
    assert all(log.count("k3_plugins: error: no data is named") == 1 for log in run.logs), run


@pytest.mark.parametrize(
    ("nprocs", "flags", "sentence"),
    [
        (2, ["--k3-plugins", "toi"], "Did you mean 'toy'?"),
        (1, ["--k3-plugins", "toy-probe"], "type --k3-plugins toy,toy-probe"),
        (2, ["--k3-plugins", "toy", "--toy-width", "0"], "--toy-width 0 must be positive"),
        (1, ["--k3-plugins", "toy", "--toy-wdith", "1"], "Did you mean --toy-width?"),
        (1, ["--k3-plugins", "toy", "--kda-head-dim", "8"], "--kda-head-dim belongs to feature 'kda': add kda"),
        (2, ["--k3-plugins", "toy", "--tensor-model-parallel-size", "2", "--num-attention-heads", "3"], "heads"),
        (2, ["--k3-plugins", "toy", "--pipeline-model-parallel-size", "3"], "does not accept these arguments"),
        (1, ["--k3-plugins", "toy", "--position-embedding-type", "rope"], "rope_fusion is set by --no-rope-fusion"),
        (1, ["--k3-plugins", "toy", "--spec", "no.such.module", "gpt"], "--spec no.such.module gpt"),
        (1, ["--k3-plugins", "toy", "--spec", "k3_plugins.failure", "gpt"], "the module has no 'gpt'"),
        (1, ["--k3-plugins", "toy", "--load", "nowhere"], "--load nowhere holds no checkpoint"),
        (1, ["--k3-plugins", "toy", "--k3-allow-drift", "toy.gone"], "toy.gone, which is no patch"),
    ],
)
def test_argument_errors_end_every_rank_with_a_sentence(tmp_path, nprocs, flags, sentence):
    ranks = run_ranks(DOOR, [*TINY_GPT, *flags], tmp_path, nprocs)
    both_exit_with(ranks, sentence)
    assert all("Traceback" not in log for log in ranks.logs), ranks


def test_help_shows_the_flags_of_the_features(tmp_path):
    """Megatron's own help texts hold a bare percent sign, on which argparse breaks."""
    ranks = run_ranks(DOOR, ["--k3-plugins", "toy", "--help"], tmp_path)
    (log,) = ranks.logs
    assert ranks.codes == [0] and "--toy-width" in log and "--num-layers" in log and "Traceback" not in log, ranks


def test_a_feature_flag_without_any_feature_says_which_feature_to_add(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    ranks = run_ranks("k3_plugins.launch", [script, "--toy-width", "8"], tmp_path)
    both_exit_with(ranks, "--toy-width belongs to feature 'toy': add toy to --k3-plugins")
    ranks = run_ranks(DOOR, [*TINY_GPT, "--toy-width", "8"], tmp_path)
    both_exit_with(ranks, "--toy-width belongs to feature 'toy': add toy to --k3-plugins")
