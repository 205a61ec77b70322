"""Training from a Megatron-Energon data set: ranks agree on the stream, it resumes, bad samples are named or counted.

Skipped where megatron-energon is not installed; what is said then is tested with the other refusals.
"""

import pytest

from k3_plugins.compat.optional import probe
from k3_plugins.data.render import __main__ as render
from k3_plugins.data.render.shards import DATASET_YAML
from tests.distributed.vision.bad_samples import BAD, TOO_LARGE, write
from tests.distributed.vision.test_pretrain_vlm import DIVIDED, DOOR, words
from tests.harness import gradients, losses
from tests.harness.launch import launch

pytestmark = pytest.mark.skipif(
    not probe("megatron.energon").available,
    reason="megatron-energon is not installed (pip install megatron-energon==7.4.1)",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs") / "set"
    flags = ["--count", "12", "--max-edge", "70", "--per-shard", "4", "--kinds", "shapes,scene"]
    assert render.main(["--output", str(folder), *flags, "--energon-split", "0.7,0.3,0"]) == 0
    return ["--vision-data", str(folder), "--vision-valid-data", str(folder), "--vision-reader", "energon"]


def train(folder, data, flags, nprocs=1, **options):
    return launch("tests.harness.gradients", [folder, DOOR, *words(data, flags)], nprocs=nprocs, timeout=200, **options)


@pytest.mark.slow
def test_ranks_that_read_the_same_stream_train_as_one_process(data, tmp_path):
    save = f"--train-iters 1 --eval-iters 0 --lr 0 --min-lr 0 --save {tmp_path}/start --save-interval 1"
    train(tmp_path / "record", data, f"{save} --no-save-optim --no-save-rng")
    start = f"--load {tmp_path}/start --no-load-optim --no-load-rng --finetune"
    layout = f"{DIVIDED} --pipeline-model-parallel-size 2 --num-workers 1"
    # Energon's stream depends on the number of workers, so that both sides have one.
    train(tmp_path / "one", data, f"{start} --num-workers 1")
    train(tmp_path / "four", data, f"{start} {layout}", nprocs=4)
    error, worst = gradients.largest_difference(*(gradients.assemble(tmp_path / name) for name in ("four", "one")))
    assert error <= 2e-5, worst


def test_it_resumes_in_its_stream(data, tmp_path):
    stream = f"--dataloader-save {tmp_path}/stream --save {tmp_path}/save --save-interval 2"
    train(tmp_path / "whole", data, "")
    train(tmp_path / "first", data, f"{stream} --exit-interval 2")
    train(tmp_path / "second", data, f"{stream} --load {tmp_path}/save")
    resumed, whole = losses.read(tmp_path / "second"), losses.read(tmp_path / "whole")
    assert sorted(resumed) == [3, 4]
    assert losses.relative_difference(resumed, {step: whole[step] for step in resumed}) <= 2e-5
    without = train(tmp_path / "without", data, f"--load {tmp_path}/save", check=False)
    assert without.rc == 2 and "give the --dataloader-save DIR of the saved run" in without.logs[0]


def test_bad_samples_are_named_or_counted(tmp_path):
    from megatron.energon.flavors.webdataset import BaseWebdatasetFactory

    folder = write(tmp_path / "bad", BAD)
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / "dataset.yaml").write_text(DATASET_YAML)
    split = [("train", 1.0), ("val", 0), ("test", 0)]
    BaseWebdatasetFactory.prepare_dataset(
        folder, ["0.tar", "1.tar"], split_parts_ratio=split, shuffle_seed=None, workers=1
    )
    data = ["--vision-data", folder, "--vision-reader", "energon"]
    flags = f"--eval-iters 0 --seq-length 64 --moonvit-max-patches {TOO_LARGE} --tensorboard-dir {tmp_path}/board"
    result = train(tmp_path / "skipping", data, f"{flags} --vision-skip-bad")
    assert "samples are left out so far on data-parallel rank 0" in result.logs[0]
    result = train(tmp_path / "naming", data, flags, check=False)
    assert result.rc == 2 and "repair the sample, or give --vision-skip-bad" in result.logs[0]
    assert any(name in result.logs[0].splitlines()[-1] for name in BAD)
