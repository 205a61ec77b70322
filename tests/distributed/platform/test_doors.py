"""Without --k3-plugins, stock Megatron has the same bits through our doors as in a script with the platform alone."""

import pytest

from tests.harness.forkserver import ROOT
from tests.harness.launch import launch
from tests.harness.losses import first_difference, read
from tests.harness.stock_flags import TARGET, stock

FLAGS = stock("--train-iters 4 --tensor-model-parallel-size 2 --hidden-dropout 0.1")
SCRIPT = str(ROOT / "tests" / "harness" / "stock_gpt.py")
# k3_plugins.pretrain_gpt has Megatron's own mock data; its --k3-platform is the door's, not Megatron's.
MOCK_DOCUMENTS = {"K3_TEST_MOCK_DOCUMENTS": "100000"}
DOORS = {
    "launch": ("k3_plugins.launch", [SCRIPT, "--k3-platform", "cpu", *FLAGS]),
    "pretrain_gpt": ("k3_plugins.pretrain_gpt", ["--k3-platform", "cpu", *FLAGS]),
}


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "torchrun"])
def plain(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    run = launch(TARGET, FLAGS, nprocs=2, records=folder, digest=True, env=MOCK_DOCUMENTS, torchrun=request.param)
    return request.param, read(run.records)


@pytest.mark.parametrize("door", DOORS)
def test_same_bits(tmp_path, plain, door):
    torchrun, steps = plain
    target, args = DOORS[door]
    run = launch(target, args, nprocs=2, records=tmp_path, digest=True, env=MOCK_DOCUMENTS, torchrun=torchrun)
    assert len(steps) == 4
    assert first_difference(read(run.records), steps) is None
