"""The dry run: the numbers of the planner for the same layout, what does not fit, what would not start."""

import json
from argparse import Namespace

import pytest

from k3_plugins.plan import __main__ as plan
from k3_plugins.plan.dry_run import DOORS, without_own
from k3_plugins.plan.from_arguments import options_of
from tests.harness.launch import launch

DRY_RUN = "k3_plugins.plan.dry_run"
GPUS, CONTEXT, TOKENS = 2048, 8192, 2**24
TRAINING = "--bf16 --lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 163840".split()


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The planner's best layout of the published model, as JSON."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ["--model", "kimi_k3", "--gpus", GPUS, "--context", CONTEXT, "--global-batch-tokens", TOKENS]
    assert plan.main([*map(str, words), "--virtual-stages", "4", "--json", str(file)]) == 0
    return json.loads(file.read_text())["layouts"][0]


def run(ranks, *words, own=()):
    return launch(DRY_RUN, ["--ranks", ranks, *own, "--", *words], check=False)


def test_it_prints_the_planners_numbers_for_the_planners_flags(planned, tmp_path):
    result = run(GPUS, *planned["flags"], *TRAINING, own=["--json", tmp_path / "out.json"])
    assert result.rc == 0, result.tail()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["memory"]["device_bytes_by_rank"] == planned["device_bytes_by_rank"]
    assert found["memory"]["host_bytes_by_rank"] == planned["host_bytes_by_rank"]
    assert found["memory"]["layers_per_chunk"] == planned["layers_per_chunk"]
    assert found["layout"]["data_parallel_size"] == planned["data"]
    assert found["configuration"]["hidden_size"] == 7168 and "adam_beta1" not in found["configuration"]
    assert "fits in 80 GB" in result.logs[0] and "layers 1-" in result.logs[0]


def test_a_doors_own_flags_are_no_flags_of_megatron():
    own = "--vision-data pairs --vision-text-alone --chat-data one two".split()
    left = {door: without_own(door, [*own, "--seq-length", "8"]) for door in DOORS}
    assert left.pop("k3_plugins.pretrain_gpt") == [*own, "--seq-length", "8"]
    assert left.pop("k3_plugins.pretrain_vlm") == [*own[-3:], "--seq-length", "8"]
    assert left.pop("k3_plugins.finetune_gpt") == [*own[:3], "--seq-length", "8"] and not left


def test_what_the_estimate_does_not_count_is_said():
    plain = {"recompute_granularity": None, "bf16": True, "use_distributed_optimizer": True, "mtp_num_layers": None,
             "optimizer_cpu_offload": False}  # fmt: skip
    assert options_of(Namespace(**plain), (), 0.0)[1] == []
    changed = plain | {"bf16": False, "use_distributed_optimizer": False, "mtp_num_layers": 1}
    _, notes = options_of(Namespace(**changed, activation_policy="mlp=fp8"), ("per-head-muon", "moonvit"), 0.0)
    said = ("--activation-policy 'mlp=fp8'", "--bf16 is", "--use-distributed-optimizer is", "--mtp-num-layers 1")
    said += ("Muon", "vision encoder")
    assert len(notes) == len(said) and all(any(word in note for note in notes) for word in said)


def test_what_does_not_fit_ends_with_1_and_what_does_not_start_with_2(planned):
    small = run(GPUS, *planned["flags"], *TRAINING, own=["--gpu-memory", "40"])
    assert small.rc == 1 and "does NOT fit in 40 GB" in small.logs[0]
    odd = run(GPUS - 1, *planned["flags"], *TRAINING)
    assert odd.rc == 2 and "k3_plugins: error:" in odd.logs[0] and "Traceback" not in odd.logs[0]
    bare = run(8, "--num-layers", "4")
    assert bare.rc == 2 and "name no feature: add --k3-plugins" in bare.logs[0]
