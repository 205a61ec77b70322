"""Memory, cost and search of the planner, and its command line."""

import dataclasses
import itertools
import json

import pytest
import torch

from k3_plugins.models.kimi_k3.config import KIMI_K3, KIMI_K3_MOE_TINY, KIMI_LINEAR
from k3_plugins.plan.__main__ import main
from k3_plugins.plan.cost import HIDDEN, Hardware, of_layout
from k3_plugins.plan.layout import Job, Layout, candidates, impossible, in_flight, layout_string
from k3_plugins.plan.memory import POLICIES, Options, chunk_parameters, of_rank
from k3_plugins.plan.report import flags
from k3_plugins.plan.search import Found
from tests.harness.k3_model import CPU, DOOR, TRAINING
from tests.harness.launch import launch

HARDWARE = Hardware(989e12, 0.5, 450e9, 50e9, 8)


def job(config=KIMI_K3_MOE_TINY, gpus=8, context=64, global_batch=32):
    return Job(config, gpus, context, global_batch)


def layout(**changes):
    sizes = {"tp": 1, "cp": 1, "pp": 2, "vpp": 1, "ep": 2, "dp": 4, "micro_batch": 1, "num_microbatches": 8}
    return Layout(**{**sizes, **changes})


def test_states_are_the_parameters_times_their_bytes():
    one, sizes = layout(), (4, 4)
    counts = chunk_parameters(KIMI_K3_MOE_TINY, 1, 2, sizes)
    for rank, (dense, experts) in enumerate(counts):
        memory = of_rank(job(), one, Options(pipeline_zero2=False, reserve=0), sizes, rank)
        assert memory.device["weights"] == 2 * (dense + experts)
        assert memory.device["gradients"] == 4 * (dense + experts)
        # the distributed optimizer cuts dense states over DP 4, those of experts over the 2 ranks with the same ones
        assert memory.device["optimizer"] == 12 * (dense / 4 + experts / 2)
        on_host = of_rank(job(), one, Options(optimizer_on_host=True, pipeline_zero2=False), sizes, rank)
        assert on_host.device["optimizer"] == 0 and on_host.host >= memory.device["optimizer"]


def test_pipeline_zero2_holds_two_buffers_of_the_largest_chunk():
    one, sizes = layout(vpp=4, num_microbatches=8), (1,) * 8
    counts = chunk_parameters(KIMI_K3_MOE_TINY, 1, 2, sizes)
    for rank in range(2):
        own = [sum(count) for count in counts[rank::2]]
        memory = of_rank(job(), one, Options(policy="keep"), sizes, rank)
        assert memory.device["gradients"] == 4 * 2 * max(own) < 4 * sum(own)
        assert memory.host == 4 * sum(dense / 4 + experts / 2 for dense, experts in counts[rank::2])


@pytest.mark.parametrize(("pp", "vpp", "m"), [(4, 1, 8), (4, 2, 8), (2, 4, 4), (4, 1, 2)])
def test_chunks_in_flight_are_those_of_megatrons_schedules(pp, vpp, m):
    """Play the forwards and backwards of a rank in the order of the schedule."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    one = layout(pp=pp, vpp=vpp, num_microbatches=m)
    for rank in range(pp):
        total = m * vpp
        if vpp == 1:
            warm_up = min(pp - rank - 1, m)
        else:
            assert len(get_schedule_table(m, vpp, pp)) == total
            warm_up = min((pp - rank - 1) * 2 + (vpp - 1) * pp, total)
        order = ["F"] * warm_up + ["F", "B"] * (total - warm_up) + ["B"] * warm_up
        held = most = 0
        for kind in order:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert held == 0 and in_flight(one, rank) == most


def test_less_is_kept_under_every_later_policy():
    sizes = (4, 4)
    kept = [
        of_rank(job(), layout(), Options(policy=policy), sizes, 0).device["activations"]
        for policy in ("keep", "selective", "full", "full+cpu")
    ]
    assert kept == sorted(kept, reverse=True) and kept[0] > kept[-1]


def test_bubble_and_traffic():
    sizes = (4, 4)
    cost = of_layout(job(), layout(), Options(policy="keep"), sizes, HARDWARE)
    # two stages, eight micro-batches: an eighth of a rank's time for them, and of what it waits for inside them
    speed = {group: HARDWARE.bandwidth({"EP": 2, "PP": 8}[group]) for group in ("EP", "PP")}
    inside = sum(cost.sent[group] / speed[group] * (1 - HIDDEN[group]) for group in speed)
    assert inside > 0
    assert cost.bubble * cost.seconds == pytest.approx((cost.compute_seconds + inside) * 1 / 8)
    # one hop of hidden states and finished blocks, forward and backward, 8 micro-batches of 64 tokens in bf16; layers
    # 0..3 in blocks of 3 leave the embedding, one block and the partial sum
    assert cost.sent["PP"] == 2 * 3 * 64 * 128 * 2 * 8
    assert cost.sent["TP"] == cost.sent["CP"] == 0
    plain = dataclasses.replace(KIMI_K3_MOE_TINY, attn_res_block_size=None)
    assert of_layout(job(plain), layout(), Options(), sizes, HARDWARE).sent["PP"] == 2 * 64 * 128 * 2 * 8


def test_an_expert_layer_sends_rows_in_hops_and_gradients_in_fp32():
    config, one, sizes = KIMI_K3_MOE_TINY, layout(pp=1, ep=4, dp=8, num_microbatches=1), (8,)
    moe, home = sum(config.moe_pattern), 4 * 3 * 64 * 64  # parameters of this rank's experts
    # 64 tokens with 4 choices: 64 pairs to each relay, which passes on up to 4 rows more; three quarters leave the rank
    row_hops, weights = 2 * 64 * (64 + 68) * 3, 3 / 4 * home

    def sent(**options):
        return of_layout(job(global_batch=8), one, Options(**options), sizes, HARDWARE).sent["EP"] / moe

    # rows: out and home; the gradient out, the input again, its gradient home. Weights there twice, fp32 sums home
    assert sent(policy="keep") == 5 * row_hops + (2 * 2 * 2 + 2 * 4) * weights
    assert sent(policy="keep", moonep_memory_efficient=False) == 4 * row_hops + (2 * 2 * 2 + 2 * 4) * weights
    assert sent(policy="full") == sent(policy="selective") == 7 * row_hops + (3 * 2 * 2 + 2 * 4) * weights
    assert sent(policy="selective", recompute_modules=("shared_experts",)) == sent(policy="keep")
    assert sent(policy="keep", moonep=False) == 4 * 2 * 64 * 64 * 4 * 3 / 4


@pytest.mark.parametrize(("cp", "share"), [(2, 1 / 2), (4, 1)])
def test_kda_under_context_parallelism_moves_its_rows(cp, share):
    config = dataclasses.replace(KIMI_K3_MOE_TINY, num_layers=3, first_k_dense=3, num_experts=None)
    assert config.attention_pattern == [1, 1, 0]
    one = layout(pp=1, ep=1, cp=cp, tp=2, dp=1, num_microbatches=1)
    rows = 64 / cp
    # hidden state and low-rank decay are whole on each of two TP ranks, the output is cut into heads
    moved = 2 * rows * (128 + 32 + 4 * 32 / 2) * share
    state = 4 * 2 * 32 * (32 + 32) * (cp - 1)
    halo = 2 * 3 * 3 * 4 * 32 / 2
    latent = 2 * rows * (48 + 8) * (cp - 1)
    for policy, passes in (("keep", 2), ("full", 3)):
        cost = of_layout(job(config, cp * 2, 64, 1), one, Options(policy=policy), (3,), HARDWARE)
        assert cost.sent["CP"] == passes * (2 * (moved + state + halo) + latent)


def test_the_output_layer_is_not_computed_again():
    one, asked = layout(), job()
    flops, last = sum(asked.layer_flops[3:]), asked.last_flops

    def seconds(**options):
        return of_layout(asked, one, Options(**options), (3, 5), HARDWARE).compute_seconds

    speed = 64 * 8 / (989e12 * 0.5)
    assert seconds(policy="keep") == pytest.approx(speed * 3 * (flops + last))
    assert seconds(policy="full") == pytest.approx(speed * (4 * flops + 3 * last))
    # router, latent projections, shared experts and 4 of 16 experts of 5 layers
    again = 5 * 2 * (128 * 16 + 2 * 128 * 64 + 3 * 64 * (128 + 4 * 64))
    assert seconds(policy="selective") == pytest.approx(speed * (3 * (flops + last) + again))


def read_back(words):
    """The options that a command line of the planner's says, by the dry run's reading."""
    from argparse import Namespace

    from k3_plugins.plan.from_arguments import options_of

    args = {
        "recompute_granularity": None,
        "recompute_modules": None,
        "recompute_method": None,
        "recompute_num_layers": 1,
        "cpu_offloading_num_layers": 0,
        "optimizer": "adam",
        "num_experts": None,
        "transformer_impl": "transformer_engine",
        "fp16": False,
        "accumulate_allreduce_grads_in_fp32": True,  # Megatron's check, for bf16
        "use_precision_aware_optimizer": False,
        "main_params_dtype": torch.float32,
        "exp_avg_dtype": torch.float32,
        "exp_avg_sq_dtype": torch.float32,
        "mtp_num_layers": None,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
        "zero2_optimizer_device": "device",
        "activation_policy": None,
        "moe_moonep_memory_efficient": True,
        "moe_moonep_transport": "torch",
    }
    lists = {"recompute_modules"}
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    for start, end in itertools.pairwise([*starts, len(words)]):
        name, given = words[start][2:].replace("-", "_"), words[start + 1 : end]
        args[name] = given if name in lists else given[0] if given else True
    args["recompute_num_layers"] = int(args["recompute_num_layers"])
    args["optimizer_offload_fraction"] = float(args["optimizer_offload_fraction"])
    found, notes = options_of(Namespace(**args), args["k3_plugins"].split(","), 0.0)
    assert notes == []
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_the_flags_say_the_options(policy):
    one, choices = layout(vpp=4), (False, True)
    for zero2, moonep, on_host in itertools.product(choices, choices, (0.0, 1.0)):
        options = Options(policy, pipeline_zero2=zero2, moonep=moonep, optimizer_on_host=on_host, reserve=0.0)
        cost = of_layout(job(), one, options, (1,) * 8, HARDWARE)
        words = flags(job(), Found(one, options, (1,) * 8, (), cost), "kimi_k3_moe_tiny")
        assert read_back(words) == options, words


def test_reasons():
    asked = Job(KIMI_K3, 4096, 8192, 8192)
    assert impossible(asked, 3, 1, 1, 1, 1, 1) == "TP x CP x PP does not divide the number of GPUs"
    assert impossible(asked, 1, 1, 64, 2, 1, 1) == "more chunks than layers"
    assert impossible(asked, 1, 1, 8, 1, 256, 1) == "EP does not divide the experts"
    assert impossible(asked, 1, 1, 1, 2, 1, 1) == "virtual stages without a pipeline"
    assert impossible(asked, 8, 1, 8, 4, 128, 1) == ""
    assert "heads" in impossible(dataclasses.replace(asked, gpus=4096 * 64), 64, 1, 1, 1, 1, 1)
    found = [one for one, _ in candidates(asked, {"tp": 8, "pp": 8}, 8) if one is not None]
    assert found and all(one.tp == 8 and one.pp == 8 and one.dp * 64 * one.cp == 4096 for one in found)
    assert layout_string([2, 1, 3]) == "Ett|t|tttL"


def test_command_line(tmp_path, capsys):
    base = ["--model", "kimi_linear", "--gpus", "64"]
    files = ["--json", str(tmp_path / "plan.json"), "--png", str(tmp_path / "plan.png")]
    assert main([*base, *files, "--top", "3"]) == 0
    text = capsys.readouterr().out
    report = json.loads((tmp_path / "plan.json").read_text())
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert report["model"]["parameters"] == 49_122_675_072 and len(report["layouts"]) == 3
    assert report["considered"] == report["fitting"] + sum(report["rejected"].values())
    seconds = [entry["seconds_per_step"] for entry in report["layouts"]]
    assert seconds == sorted(seconds) and "--k3-model kimi_linear" in text
    for entry in report["layouts"]:
        assert max(sum(rank.values()) for rank in entry["device_bytes_by_rank"]) <= 80e9
        assert sum(entry["layers_per_chunk"]) == KIMI_LINEAR.num_layers
    assert main([*base[:2], "--gpus", "1", "--gpu-memory", "24"]) == 1
    text = capsys.readouterr().out
    assert "No layout fits" in text and "nearest: " in text and "does not fit under any policy" in text
    with pytest.raises(SystemExit):
        main([*base, "--png", str(tmp_path / "plan.json")])
    assert "plan.json must end in .png" in capsys.readouterr().err


def test_the_flags_of_a_plan_train(tmp_path):
    """Virtual stages, ZeRO-2, EP, recomputation with layer inputs in host memory: as printed, on 4 CPU processes."""
    path = tmp_path / "plan.json"
    words = """--model kimi_k3_moe_tiny --gpus 4 --context 64 --global-batch-tokens 512 --pipeline-parallel 2
        --virtual-stages 4 --expert-parallel 2 --tensor-parallel 1 --micro-batch 1 --policies full+cpu"""
    assert main([*words.split(), "--json", str(path)]) == 0
    flags = json.loads(path.read_text())["layouts"][0]["flags"]
    features = "kda,gated-mla,attnres,latent-moe,quantile-balancing,moonep,pipeline-zero2,activation-manager"
    assert flags[flags.index("--k3-plugins") + 1] == features
    once = "--train-iters 1 --lr-warmup-iters 0 --vocab-size 127 --max-position-embeddings 64 --k3-platform cpu"
    run = launch(DOOR, [*TRAINING, *CPU, *once.split(), *flags], nprocs=4, timeout=300)
    log = "".join(run.logs)
    assert log.count("lm loss: ") == 1 and all(f"witness {name}" in log for name in ("moonep", "pipeline-zero2"))


@pytest.mark.parametrize(
    ("model", "gpus", "context", "more"),
    [
        ("kimi_k3", 4096, 8192, "--policies selective,full --optimizer-on-host"),
        ("kimi_k3", 4096, 262144, "--policies full,full+cpu"),
        ("kimi_linear", 64, 65536, "--policies selective --optimizer-on-host --no-pipeline-zero2"),
    ],
)
def test_megatron_accepts_the_flags_for_the_published_models(model, gpus, context, more, tmp_path):
    """Its own checks, as in a job of so many ranks; nothing is built."""
    path = tmp_path / "plan.json"
    words = ["--model", model, "--gpus", str(gpus), "--context", str(context), "--json", str(path)]
    assert main([*words, *more.split()]) == 0
    flags = json.loads(path.read_text())["layouts"][0]["flags"]
    once = ["--ranks", gpus, "--vocab-size", "163840", "--bf16", "--k3-platform", "cpu"]
    run = launch("k3_plugins.doctor", [*once, *TRAINING, *CPU, *flags, "--vocab-size", "163840"], check=False)
    (log,) = run.logs
    assert run.rc in (0, 1) and "Megatron accepts tensor_model_parallel_size" in log, log[-3000:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 0", "'0' is not a whole number from 1"),
        ("--gpu-memory nan", "'nan' is not a number above 0"),
        ("--policies keep,everything", "--policies 'everything' is unknown"),
        ("--context 3000", "--global-batch-tokens 67108864 is no multiple of --context 3000"),
        ("--efficiency 2", "--efficiency 2 must not be above 1"),
        ("--json nowhere/plan.json", "--json nowhere/plan.json: its folder does not exist"),
        ("--png nowhere/plan.png", "--png nowhere/plan.png: its folder does not exist"),
        ("--model kimi_k9", "invalid choice"),
        ("--tensor-parallel 3", "TP must divide the 32 heads of kimi_linear; there are layouts with"),
    ],
)
def test_bad_input_is_one_sentence(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--model", "kimi_linear", "--gpus", "8", *words.split()])
    assert end.value.code == 2 and message in capsys.readouterr().err
