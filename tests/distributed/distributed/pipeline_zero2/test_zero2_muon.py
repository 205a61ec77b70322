"""pipeline-zero2 under Per-Head Muon: the same optimizer on the same gradients."""

import pytest

from tests.distributed.distributed.pipeline_zero2.zero2_run import Run, differences, train
from tests.harness import k3_model
from tests.harness.losses import first_difference

MUON = """
    --k3-plugins kda,gated-mla,per-head-muon --muon-fp32-matmul-prec high --muon-adamw-lr 1e-3 --adam-eps 1e-4
    --use-distributed-optimizer --ffn-hidden-size 136 --global-batch-size 8 --train-iters 6
"""
VPP2 = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"


def both(tmp_path, layout, nprocs, zero2=""):
    words = k3_model.flags(MUON, layout)
    reference = train(tmp_path / "muon", words, nprocs, zero2=False, timeout=400)
    return train(tmp_path / "zero2", [*words, *zero2.split()], nprocs, zero2=True, timeout=400), reference


@pytest.fixture(scope="module")
def half_way(tmp_path_factory):
    """6 steps at DP 2 with both features, saved after 3."""
    folder = tmp_path_factory.mktemp("both")
    words = k3_model.flags(MUON, f"--micro-batch-size 1 --save {folder}/ckpt --save-interval 3")
    whole = train(folder / "whole", words, 2, zero2=True, timeout=400)
    assert sorted(whole.steps) == [1, 2, 3, 4, 5, 6]
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("3")
    return folder, whole


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_saved_at_dp_2_resumed_elsewhere(nprocs, half_way, tmp_path):
    """Momentum and moments, fp32 shards and step counts: losses, norms and weights go on as without an interruption."""
    folder, whole = half_way
    words = k3_model.flags(MUON, f"--micro-batch-size {8 // nprocs if nprocs < 4 else 1} --load {folder}/ckpt")
    run = train(tmp_path, words, nprocs, zero2=True, timeout=400)
    expected = Run({i: step for i, step in whole.steps.items() if i > 3}, whole.parameters[:1], [], [])
    run.parameters = run.parameters[:1]
    loss, norm, parameters = differences(run, expected)
    # Other sums over ranks and micro-batches, which Newton-Schulz multiplies by up to 485; a lost momentum is 1e-2.
    assert loss <= 2e-6 and norm <= 2e-5 and parameters <= 1e-4, (loss, norm, parameters)


def test_kill_during_save_keeps_the_last_checkpoint(half_way, tmp_path):
    _, whole = half_way
    words = k3_model.flags(MUON, f"--micro-batch-size 1 --save {tmp_path}/ckpt --save-interval 2")
    env = {"K3_TEST_KILL": "1", "K3_KILL_RANK": "1", "K3_KILL_POINT": "writing the data"}
    killed = train(tmp_path / "killed", words, 2, zero2=True, env=env, check=False)
    assert "killed at" in killed.logs[1]
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (tmp_path / "ckpt" / "iter_0000004").is_dir(), "the save was not under way"
    resumed = train(tmp_path / "resumed", [*words, "--load", tmp_path / "ckpt"], 2, zero2=True)
    assert first_difference(resumed.steps, {i: step for i, step in whole.steps.items() if i > 2}) is None


@pytest.mark.slow
def test_data_parallelism_is_bit_equal(tmp_path):
    run, reference = both(tmp_path, "", 2)
    assert len(run.steps) == 6 and first_difference(run.steps, reference.steps) is None


@pytest.mark.slow
def test_interleaved_pipeline(tmp_path):
    """Groups of 2: sums of another order, which Newton-Schulz in fp32 multiplies by up to 485 in small directions."""
    run, reference = both(tmp_path, VPP2, 2, "--zero2-group 2")
    loss, norm, parameters = differences(run, reference)
    assert loss <= 1e-6 and norm <= 1e-6 and parameters <= 2e-5, (loss, norm, parameters)
    assert run.reports[0]["reductions"] == [2, 2]
