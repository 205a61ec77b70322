"""Stock Megatron on the CPU platform: every layout trains like one process, from one checkpoint."""

import pytest

from tests.harness.launch import launch
from tests.harness.losses import read, relative_difference
from tests.harness.stock_flags import MOE, TARGET, stock

# A loss of 5 is stored to 5e-7 (relative 1e-7): measured differences are one unit in the last place. Layouts sum in
# another order, and twenty optimizer steps pass the rounding on.
TOLERANCE = 2e-6
STEPS = 8

DENSE = [
    (2, "--tensor-model-parallel-size 2"),
    (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    (2, "--use-distributed-optimizer"),
]
DENSE_SWEEP = [
    (2, "--pipeline-model-parallel-size 2"),
    (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    (2, "--use-distributed-optimizer --ddp-average-in-collective"),
    (2, "--use-distributed-optimizer --num-distributed-optimizer-instances 2"),
    (2, "--num-workers 2"),
    (2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    (4, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
    (4, "--pipeline-model-parallel-size 4"),
]
SPARSE = [(2, "--expert-model-parallel-size 2 --use-distributed-optimizer")]
SPARSE_SWEEP = [
    (2, "--expert-model-parallel-size 2"),
    (2, "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather"),
    (2, "--pipeline-model-parallel-size 2"),
    (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2"),
]


class OneProcess:
    """A model, its only checkpoint, and what one process does from it."""

    def __init__(self, folder, model):
        self.flags = stock(" ".join(model))
        self.checkpoint = folder / "checkpoint"
        launch(TARGET, [*self.flags, "--train-iters", 1, "--save", self.checkpoint, "--save-interval", 1])
        self.steps = self.train(1, "", folder / "one")

    def train(self, nprocs, layout, records):
        # --finetune loads the weights alone and counts from 0, whatever optimizer wrote the checkpoint.
        flags = [*self.flags, "--load", self.checkpoint, "--finetune", "--train-iters", STEPS, *layout.split()]
        return read(launch(TARGET, flags, nprocs=nprocs, records=records).records)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return OneProcess(tmp_path_factory.mktemp("dense"), [])


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return OneProcess(tmp_path_factory.mktemp("sparse"), MOE)


def check(reference, nprocs, layout, folder):
    steps = reference.train(nprocs, layout, folder / "records")
    assert len(steps) == STEPS
    assert relative_difference(steps, reference.steps) < TOLERANCE
    # The run must have learned something: a loss that does not move would be equal in any layout.
    assert reference.steps[STEPS].loss < 0.97 * reference.steps[1].loss
    for i, step in reference.steps.items():
        assert abs(steps[i].grad_norm - step.grad_norm) < 2e-5 * step.grad_norm, f"gradient norm of iteration {i}"


@pytest.mark.parametrize(("nprocs", "layout"), DENSE)
def test_dense(dense, tmp_path, nprocs, layout):
    check(dense, nprocs, layout, tmp_path)


@pytest.mark.parametrize(("nprocs", "layout"), SPARSE)
def test_mixture_of_experts(sparse, tmp_path, nprocs, layout):
    check(sparse, nprocs, layout, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("nprocs", "layout"), DENSE_SWEEP)
def test_dense_sweep(dense, tmp_path, nprocs, layout):
    check(dense, nprocs, layout, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("nprocs", "layout"), SPARSE_SWEEP)
def test_mixture_of_experts_sweep(sparse, tmp_path, nprocs, layout):
    check(sparse, nprocs, layout, tmp_path)


def test_one_seed_two_layouts(tmp_path):
    """From the seed, without a checkpoint, with dropout: TP 2 draws the same weights and the same masks as one process.

    It would not if the warm-up of fused functions or the data loader of tensor-parallel rank 0 moved the generator that
    weights and masks come from. Ranks that drop different elements also report different losses, which `read` refuses.
    """
    flags = stock("--hidden-dropout 0.1 --train-iters 4")
    one = read(launch(TARGET, flags, records=tmp_path / "one").records)
    layout = ["--tensor-model-parallel-size", 2]
    two = read(launch(TARGET, [*flags, *layout], nprocs=2, records=tmp_path / "two").records)
    assert relative_difference(two, one) < TOLERANCE
