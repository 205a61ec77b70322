"""The dry run: the numbers of the planner for the same layout, what does not fit, what would not start."""

import json
from argparse import Namespace

import pytest
import torch

from k3_plugins.feature import FeatureError
from k3_plugins.models.kimi_k3.config import PRESETS
from k3_plugins.plan import __main__ as plan
from k3_plugins.plan import parameters
from k3_plugins.plan.dry_run import DOORS, without_own
from k3_plugins.plan.from_arguments import SIZES, model_of, options_of
from k3_plugins.plan.layout import Job, Layout
from k3_plugins.plan.memory import Options, chunk_bytes, chunk_parameters, layer_bytes, of_rank
from tests.harness.launch import launch

DRY_RUN = "k3_plugins.plan.dry_run"
GPUS, CONTEXT, TOKENS = 2048, 8192, 2**24
TRAINING = """--bf16 --lr 1e-4 --train-iters 10 --eval-interval 10 --tokenizer-type NullTokenizer
    --vocab-size 163840""".split()


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
    assert "CPU PLATFORM" not in result.logs[0]  # where the checks run is no news about the job


def test_a_doors_own_flags_are_no_flags_of_megatron():
    own = "--vision-data pairs --vision-text-alone --chat-data one two".split()
    left = {door: without_own(door, [*own, "--seq-length", "8"]) for door in DOORS}
    assert left.pop("k3_plugins.pretrain_gpt") == [*own, "--seq-length", "8"]
    assert left.pop("k3_plugins.pretrain_vlm") == [*own[-3:], "--seq-length", "8"]
    assert left.pop("k3_plugins.finetune_gpt") == [*own[:3], "--seq-length", "8"]
    assert left.pop("k3_plugins.draft_gpt") == [*own, "--seq-length", "8"] and not left


PLAIN = {
    "recompute_granularity": None,
    "bf16": True,
    "fp16": False,
    "accumulate_allreduce_grads_in_fp32": True,
    "use_distributed_optimizer": True,
    "use_precision_aware_optimizer": False,
    "mtp_num_layers": None,
    "optimizer_cpu_offload": False,
    "transformer_impl": "local",
    "recompute_method": None,
    "recompute_num_layers": None,
    "cpu_offloading_num_layers": 0,
    "optimizer": "adam",
    "num_experts": 8,
    "expert_tensor_parallel_size": 1,
    # of features, which are read only where the feature is on
    "activation_policy": None,
    "moe_moonep_memory_efficient": True,
    "moe_moonep_transport": "torch",
    "moonvit_frozen": False,
    "zero2_optimizer_device": "device",
}


def options(*features, **changes):
    return options_of(Namespace(**PLAIN | changes), features, 0.0)


def test_what_the_estimate_does_not_count_is_said():
    assert options()[1] == []
    changes = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True, "moe_moonep_transport": "moonep"}
    _, notes = options("moonvit", "activation-manager", "moonep", activation_policy="mlp=fp8", **changes)
    said = (
        "--activation-policy 'mlp=fp8'",
        "--moe-moonep-transport moonep",
        "activations of the vision encoder",
        "--mtp-use-repeated-layer",
    )
    assert len(notes) == len(said) and all(any(word in note for note in notes) for word in said)


def test_megatrons_flags_that_are_counted_as_other_values_are_said():
    for field, value in (("cpu_offloading_num_layers", 10), ("optimizer", "sgd"), ("expert_tensor_parallel_size", 4)):
        (note,) = options(**{field: value})[1]
        assert note.startswith(f"--{field.replace('_', '-')} {value}: ")
    assert options(num_experts=None, expert_tensor_parallel_size=4)[1] == []


def test_full_recomputation_of_some_layers_or_in_groups():
    """A chunk of eight layers of the tiny model, whose layers differ."""
    config = PRESETS["kimi_k3_moe_tiny"]

    def activations(method, number):
        words = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}
        found, notes = options(**words)
        assert not notes
        return chunk_bytes(config, found, (config.num_layers,))[0]

    keep = [layer_bytes(config, layer, Options(policy="keep", moonep=False)) for layer in range(config.num_layers)]
    entry = 2.0 * config.hidden_size
    assert activations("uniform", 1) == (entry * len(keep), max(keep))
    assert activations("uniform", 2) == (
        entry * len(keep) / 2, max(sum(keep[start : start + 2]) for start in range(0, len(keep), 2))
    )  # fmt: skip
    assert activations("uniform", len(keep)) == (entry, sum(keep))
    assert activations("block", 2) == (2 * entry + sum(keep[2:]), max(keep[:2]))
    assert activations("block", 99) == activations("uniform", 1)


def test_only_modules_that_our_layers_compute_again_make_a_selective_policy():
    def selective(*modules, features=("moonep",), **changes):
        named = {"recompute_modules": list(modules) or None, "recompute_granularity": "selective"}
        found, notes = options(*features, **named, **changes)
        return found.policy, found.recompute_modules if found.policy == "selective" else (), notes

    for idle in ((), ("core_attn",), ("mla_up_proj",), ("moe_act",)):
        policy, _, (note,) = selective(*idle)
        assert policy == "keep" and (idle or ("core_attn",))[0] in note and "counted as kept" in note
    policy, modules, (note,) = selective("mlp", "core_attn", "layernorm")
    assert (policy, modules) == ("selective", ("layernorm", "mlp")) and "core_attn:" in note
    assert selective("moe_act", features=(), transformer_impl="transformer_engine") == ("selective", ("moe_act",), [])


def test_the_share_of_the_optimizer_in_host_memory():
    assert options()[0].optimizer_on_host == 0
    assert options("pipeline-zero2", zero2_optimizer_device="cpu")[0].optimizer_on_host == 1
    share = options(optimizer_cpu_offload=True, optimizer_offload_fraction=0.25)[0]
    assert share.optimizer_on_host == 0.25
    job, layout = Job(PRESETS["kimi_k3_moe_tiny"], 1, 64, 8), Layout(1, 1, 1, 1, 1, 1, 1, 8)
    whole, shared = (of_rank(job, layout, one, (8,), 0) for one in (options()[0], share))
    assert shared.device["optimizer"] == 0.75 * whole.device["optimizer"] == 3 * (shared.host - whole.host)


def test_a_frozen_encoder_has_no_copy():
    features = ("moonvit", "vision-bubble", "pipeline-zero2")
    assert options(*features)[0].encoder == "every stage and a copy"
    assert options(*features, moonvit_frozen=True)[0].encoder == "every stage"


@pytest.mark.parametrize("name", ["kimi_k3_moe_tiny", "kimi_linear_tiny"])
def test_a_frequency_of_expert_layers_is_compared_with_what_is_counted(name):
    config = PRESETS[name]
    values = {argument: getattr(config, field) for argument, field in SIZES.items()}
    rest = {"moe_shared_expert_intermediate_size": None, "padded_vocab_size": None, "vocab_size": 257}
    args = Namespace(**values, **rest, linear_attention_freq=list(config.attention_pattern))
    args.moe_layer_freq = list(config.moe_pattern)
    assert model_of(args, name, ()).moe_pattern == config.moe_pattern
    args.moe_layer_freq = 2
    with pytest.raises(FeatureError, match=r"--moe-layer-freq \[1, 0, 1, 0"):
        model_of(args, name, ())


def test_bytes_of_an_element_follow_from_the_flags():
    def found(*features, **changes):
        plan = options(*features, **changes)[0]
        return plan.element_bytes, plan.gradient_bytes, plan.state_bytes, plan.muon_state_bytes

    assert found() == (2, 4, 12, None)
    assert found("per-head-muon") == (2, 4, 12, 8)
    assert found("per-head-muon", bf16=False) == (4, 4, 8, 4)  # an fp32 weight is its own master
    assert found(accumulate_allreduce_grads_in_fp32=False) == (2, 2, 12, None)
    narrow = {"main_params_dtype": torch.float32, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.uint8}
    assert found(use_precision_aware_optimizer=True, **narrow) == (2, 4, 4 + 2 + 1, None)


def test_encoder_and_states_in_the_memory_of_a_rank():
    """Two stages, two chunks each: the encoder's model copy, its replicas, what is sharded and what is not."""
    config = PRESETS["kimi_k3"].scaled(num_layers=4)
    job, layout = Job(config, 4, 64, 8), Layout(1, 1, 2, 2, 1, 2, 1, 4)
    size = parameters.vision(config)
    counts, muon = (chunk_parameters(config, 1, 1, (1,) * 4, muon_only=only)[0::2] for only in (False, True))
    dense, experts = (sum(count[kind] for count in counts) for kind in (0, 1))
    less = sum(count[kind] for count in muon for kind in (0, 1))

    def device(rank=0, **changes):
        return of_rank(job, layout, Options(policy="keep", pipeline_zero2=False, **changes), (1,) * 4, rank).device

    assert device(encoder="first stage")["vision encoder"] == size * (2 + 4 + 12 / 2)
    assert device(1, encoder="first stage")["vision encoder"] == 0
    assert device(1, encoder="every stage")["vision encoder"] == size * (2 + 4)
    assert device(encoder="every stage and a copy")["vision encoder"] == size * (2 + 4 + 12 / 2) + size * (2 + 4)
    assert device(1, encoder="every stage", encoder_trained=False)["vision encoder"] == size * 2
    assert device(sharded_states=False)["optimizer"] == 12 * (dense + experts)
    assert device(muon_state_bytes=8.0)["optimizer"] == (12 * (dense + experts) - 4 * less) / 2
    assert device(element_bytes=4.0)["activations"] == 2 * device()["activations"]


def test_what_does_not_fit_ends_with_1_and_what_does_not_start_with_2(planned):
    small = run(GPUS, *planned["flags"], *TRAINING, own=["--gpu-memory", "40"])
    assert small.rc == 1 and "does NOT fit in 40 GB" in small.logs[0]
    full_host = run(GPUS, *planned["flags"], *TRAINING, own=["--host-memory", "1"])
    assert full_host.rc == 1 and "of host memory" in full_host.logs[0] and "does NOT fit in 1 GB" in full_host.logs[0]
    nowhere = run(GPUS, *planned["flags"], *TRAINING, own=["--json", "/nope/plan.json"])
    assert nowhere.rc == 2 and "--json /nope/plan.json: its folder does not exist" in nowhere.logs[0]
    odd = run(GPUS - 1, *planned["flags"], *TRAINING)
    assert odd.rc == 2 and "k3_plugins: error:" in odd.logs[0] and "Traceback" not in odd.logs[0]
    bare = run(8, "--num-layers", "4")
    assert bare.rc == 2 and "name no feature: add --k3-plugins" in bare.logs[0]
