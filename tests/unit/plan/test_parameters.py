"""Counts of the planner against published totals, against `transformers`, and against what Megatron builds."""

import json
import math
import re

import pytest
import torch

from k3_plugins.models.kimi_k3.config import KIMI_K3, KIMI_LINEAR, PRESETS
from k3_plugins.plan import parameters
from k3_plugins.plan.flops import layer_flops, model_flops
from k3_plugins.plan.layout import split_layers
from k3_plugins.plan.memory import chunk_parameters
from tests.harness.k3_model import CPU, DOOR, TRAINING
from tests.harness.launch import launch


def test_published_totals():
    assert parameters.total(KIMI_K3) == pytest.approx(2.8e12, rel=0.01)
    assert parameters.active(KIMI_K3) == pytest.approx(104e9, rel=0.01)
    # published as 48B-A3B, rounded down
    assert 48e9 <= parameters.total(KIMI_LINEAR) < 50e9 and 3.0e9 <= parameters.active(KIMI_LINEAR) < 3.5e9


def test_the_vision_encoder():
    """Beside the language model: about 0.4 B as published, and within the 1 % to which the published total is known."""
    assert 0.4e9 <= parameters.vision(KIMI_K3) < 0.45e9
    assert parameters.total(KIMI_K3) + parameters.vision(KIMI_K3) == pytest.approx(2.8e12, rel=0.01)
    assert parameters.vision(KIMI_LINEAR) == 0
    # a small checkpoint whose shapes are written out by their published names
    from k3_plugins.models.kimi_k3.hf_config import read
    from tests.unit.models.kimi_k3 import small_k3

    tensors = small_k3.tensors()
    towers = [value.numel() for name, value in tensors.items() if name.startswith(("vision_tower.", "mm_projector."))]
    assert parameters.vision(read(small_k3.CONFIG)[0].config) == sum(towers)


def test_kimi_linear_has_the_parameters_that_transformers_builds():
    from k3_plugins.models.kimi_k3.hf_config import ModelDescription, write
    from tests.unit.models.kimi_k3.oracle import hidden

    with hidden("fla", "causal_conv1d"):
        from transformers import KimiLinearConfig, KimiLinearForCausalLM

    description = ModelDescription(
        KIMI_LINEAR, tuple(KIMI_LINEAR.attention_pattern), tuple(KIMI_LINEAR.moe_pattern), dtype="bfloat16"
    )
    values = {name: value for name, value in write(description).items() if name not in ("auto_map", "architectures")}
    with torch.device("meta"):
        model = KimiLinearForCausalLM(KimiLinearConfig(**values))
    # its own copies of buffers that are no parameters here
    counted = sum(p.numel() for name, p in model.named_parameters() if "e_score_correction_bias" not in name)
    assert counted == parameters.total(KIMI_LINEAR)


@pytest.mark.parametrize(
    ("model", "features", "tp", "pp", "ep", "mtp"),
    [
        ("kimi_k3_moe_tiny", "k3", 2, 2, 2, 0),
        ("kimi_linear_tiny", "kda,gated-mla", 1, 2, 2, 0),
        ("kimi_k3_moe_tiny", "k3", 1, 2, 1, 1),
    ],
)
def test_every_rank_holds_what_megatron_builds(model, features, tp, pp, ep, mtp):
    """Megatron prints the parameters of every tensor and pipeline rank."""
    config = PRESETS[model]
    sizes = tuple([config.num_layers // pp + config.num_layers % pp] + [config.num_layers // pp] * (pp - 1))
    uneven = "" if len(set(sizes)) == 1 else f"--decoder-first-pipeline-num-layers {sizes[0]}"
    words = f"""--k3-plugins {features} --k3-model {model} --k3-platform cpu --train-iters 1 --lr-warmup-iters 0
        --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --expert-model-parallel-size {ep}
        --expert-tensor-parallel-size 1 --seq-length 64 --max-position-embeddings 64 --vocab-size {config.vocab_size}
        --moe-token-dispatcher-type alltoall {"--sequence-parallel" if tp > 1 else ""} {uneven}
        {f"--mtp-num-layers {mtp}" if mtp else ""}"""
    run = launch(DOOR, [*TRAINING, *CPU, *words.split()], nprocs=max(tp * pp, pp * ep), timeout=300)
    printed = re.findall(r"parallel rank \((\d+), \d+, (\d+)\): (\d+)", "".join(run.logs))
    counts = chunk_parameters(config, tp, ep, sizes, mtp)
    built = {(int(t), int(p)): int(count) for t, p, count in printed}
    assert built == {(t, p): sum(counts[p]) for t in range(tp) for p in range(pp)}


def test_muon_updates_what_the_optimizers_own_table_says():
    words = """--k3-plugins k3 --k3-model kimi_k3_moe_tiny --k3-platform cpu --optimizer --json --mtp-num-layers 1
        --seq-length 64 --max-position-embeddings 64 --vocab-size 320 --micro-batch-size 1 --train-iters 1 --lr 1e-3
        --tokenizer-type NullTokenizer --transformer-impl local"""
    run = launch("k3_plugins.doctor", words.split())
    table = json.loads(run.logs[0][run.logs[0].index("{") :])["optimizer"]
    def alike(name):
        """``layers.[1-3,7].weight`` are 4 parameters."""
        spans = [span.split("-") for span in re.sub(r".*\[(.*)\].*|.*", r"\1", name).split(",")]
        return sum(int(span[-1]) - int(span[0]) + 1 if span[0] else 1 for span in spans)

    muon = [entry for entry in table if entry["optimizer"] == "muon"]
    own = sum(alike(entry["parameter"]) * math.prod(entry["shape"]) for entry in muon)
    (counted,) = chunk_parameters(PRESETS["kimi_k3_moe_tiny"], 1, 1, (8,), mtp_layers=1, muon_only=True)
    assert sum(counted) == own > 0


def test_flops_are_those_of_the_throughput_figure():
    """The features' own counts: KDA layers by their formula, everything else two per weight and token."""
    from k3_plugins.transformer.kda.flops import kda_flops_per_token

    kda, _ = parameters.kda_sizes(KIMI_K3)
    one = kda_flops_per_token(kda, KIMI_K3.hidden_size, KIMI_K3.num_attention_heads, KIMI_K3.kda_head_dim) / 3
    dense = 2 * 3 * KIMI_K3.hidden_size * KIMI_K3.dense_ffn_hidden_size
    assert layer_flops(KIMI_K3, 0, 8192) == one + dense
    # twice the context costs more in the full-attention layers alone: H (K + V) multiply-adds per token and key
    more = model_flops(KIMI_K3, 16384) - model_flops(KIMI_K3, 8192)
    assert more == pytest.approx(24 * 2 * 96 * (192 + 128) * 4096, rel=1e-9)


def test_layers_are_split_as_evenly_as_whole_layers_allow():
    from itertools import combinations

    costs = [3.0, 1.0, 1.0, 2.0, 1.0, 1.0, 4.0, 1.0]
    for chunks in range(1, 9):
        sizes = split_layers(costs, 1.5, chunks)
        assert len(sizes) == chunks and sum(sizes) == 8 and min(sizes) >= 1

        def heaviest(cuts, chunks=chunks):
            edges = [0, *cuts, 8]
            loads = [sum(costs[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
            loads[-1] += 1.5
            return max(loads)

        edges, position = [], 0
        for size in sizes[:-1]:
            position += size
            edges.append(position)
        best = min(heaviest(cuts) for cuts in combinations(range(1, 8), chunks - 1))
        assert heaviest(edges) == pytest.approx(best)
