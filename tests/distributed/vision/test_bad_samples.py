"""Samples that cannot be trained on: named, or left out on all ranks and counted; no rank is left waiting."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed.vision.bad_samples import BAD, GOOD, KINDS, TOO_LARGE, write
from tests.distributed.vision.test_pretrain_vlm import DOOR, words
from tests.harness import losses
from tests.harness.launch import launch

PIPELINE = f"""
    --pipeline-model-parallel-size 2 --eval-iters 0 --train-iters 3 --global-batch-size 4 --seq-length 64
    --moonvit-max-patches {TOO_LARGE}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("samples")
    return {name: write(root / name, bad) for name, bad in (("bad", BAD), ("good", {}), ("cut", {"cut": BAD["cut"]}))}


def train(data, tmp_path, flags="", **options):
    command = words(["--vision-data", data], PIPELINE, flags)
    return launch(DOOR, command, nprocs=2, timeout=120, records=tmp_path / "records", **options)


def test_bad_samples_are_left_out_on_every_stage_and_counted(folders, tmp_path):
    """The same losses, bit for bit, as from shards that never had them: both stages read the same rows."""
    result = train(folders["bad"], tmp_path, f"--vision-skip-bad --tensorboard-dir {tmp_path}/board")
    log = "".join(result.logs)
    assert f"{len(BAD)} samples are left out ({KINDS})" in log and f"{GOOD} pairs" in log
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.value for event in events.Scalars("k3/vision-data-skipped")] == [len(BAD)]
    clean = train(folders["good"], tmp_path / "clean")
    assert losses.first_difference(losses.read(result.records), losses.read(clean.records)) is None


def test_an_image_that_cannot_be_decoded_ends_a_pipeline_with_its_name(folders, tmp_path):
    """Found in the middle of training by the first stage; the last one waits for it by then."""
    result = train(folders["cut"], tmp_path, check=False)
    assert not result.timed_out and result.rc
    assert "0.tar: cut.png cannot be decoded" in "".join(result.logs) or "1.tar: cut.png" in "".join(result.logs)
    assert "repair the sample, or give --vision-skip-bad" in "".join(result.logs)


@pytest.mark.slow
def test_a_header_that_is_bad_ends_every_rank_before_training(folders, tmp_path):
    result = train(folders["bad"], tmp_path, check=False)
    assert result.rc == 2 and not result.timed_out
    assert all("k3_plugins: error:" in log and "elapsed time per iteration" not in log for log in result.logs)


@pytest.mark.slow
def test_shards_without_a_usable_sample(tmp_path):
    only_bad = write(tmp_path / "none", BAD)
    for flags, sentence in (
        ("--vision-skip-bad --moonvit-max-patches 4", f"none of {GOOD + len(BAD)} samples can be used"),
        ("--moonvit-max-patches 4", "over --moonvit-max-patches 4"),
    ):
        result = train(only_bad, tmp_path / flags.replace(" ", ""), flags, check=False)
        assert result.rc == 2 and not result.timed_out
        assert all(sentence in log for log in result.logs)
