"""The loss of quantization-aware training stays within 3 % of that of plain training."""

import pytest

from tests.harness.spawn import spawn

pytest.importorskip("modelopt.torch.quantization")


def measure(rank, world_size):
    from megatron.core import parallel_state

    from benchmarks import mxfp4_qat

    parallel_state.initialize_model_parallel()
    return mxfp4_qat.measure(mxfp4_qat.parse(["--steps", "200", "--layers", "2", "--seeds", "4"]))


@pytest.mark.slow
def test_loss_stays_within_three_percent(capsys):
    from benchmarks import mxfp4_qat

    (seeds,) = spawn(measure, 1, timeout=500)
    with capsys.disabled():
        print(f"\n{mxfp4_qat.table(seeds)}")
    for arms in seeds:
        plain = arms["plain"]["curve"]
        assert plain[-1] < 0.9 * plain[0]  # or nothing was learnt and nothing could be lost
        assert arms["joined"]["curve"][-1] <= 1.03 * plain[-1]  # the same run but for its last third
    assert mxfp4_qat.ratios(seeds)["qat"] <= 1.03
