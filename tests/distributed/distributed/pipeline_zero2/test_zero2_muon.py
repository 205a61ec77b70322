"""pipeline-zero2 under Per-Head Muon: the same optimizer on the same gradients."""

import pytest

from tests.distributed.distributed.pipeline_zero2.zero2_run import differences, train
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
