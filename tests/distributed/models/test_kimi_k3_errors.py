"""Command lines that cannot work end with exit code 2 and a sentence on every rank, before any training."""

import pytest

from tests.harness.k3_model import DOOR, flags
from tests.harness.launch import launch

CASES = {
    "KDA heads and TP": ("--tensor-model-parallel-size 2 --kda-num-heads 3", "--kda-num-heads 3 cannot be split"),
    "MLA heads and TP": (
        "--tensor-model-parallel-size 2 --num-attention-heads 3 --kda-num-heads 2",
        "--num-attention-heads 3",
    ),
    "pattern of another depth": ("--linear-attention-freq [1,0,1]", "lists 3 layers but --num-layers is 4"),
    "pattern with other numbers": ("--linear-attention-freq [1,2,0,0]", "entries other than 0 and 1"),
    "layers and stages": ("--pipeline-model-parallel-size 2 --num-layers 5 --linear-attention-freq 4", "pipeline"),
    "position encoding": ("--position-embedding-type rope", "pass --position-embedding-type none"),
    "unavailable backend": ("--kda-backend fla", "fla"),
    "unknown backend": ("--kda-backend fast", "fast"),
    "positive lower bound": ("--kda-gate-lower-bound 5", "must be a finite negative number"),
    "value heads": ("--kda-num-value-heads 6", "not a multiple of --kda-num-heads 4"),
    "another spec": ("--spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec", "drop --spec"),
    "a spec that is not there": ("--spec some.module layers", "the module cannot be imported"),
    "packed rows in a pipeline": (
        "--pipeline-model-parallel-size 2 --reset-attention-mask",
        "use --micro-batch-size 1",
    ),
    "bf16 checkpoints without the distributed optimizer": (
        "--bf16 --save never-written --ckpt-format torch_dist",
        "--bf16 with the kda feature needs --use-distributed-optimizer",
    ),
    "unknown model": ("--k3-model kimi_k9", "choose one of"),
    "model without its features": ("--k3-model kimi_k3", "type --k3-plugins"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_before_training(case):
    words, sentence = CASES[case]
    result = launch(DOOR, flags(words), nprocs=2, check=False, timeout=60)
    assert result.rc == 2, result.tail()
    for log in result.logs:
        errors = [line for line in log.splitlines() if line.startswith("k3_plugins: error:")]
        assert len(errors) == 1 and sentence in errors[0], log[-2000:]
        assert "lm loss" not in log
