"""Flags of `attnres`: the two ways to count a block, refusals, what the doctor shows, and the FLOPs that follow."""

from argparse import Namespace

import pytest

from k3_plugins.arguments import config_from_args, flag_line
from k3_plugins.feature import FeatureError
from k3_plugins.manifest import parameter_fields
from k3_plugins.transformer.attention_residuals.config import (
    AttentionResidualsConfig,
    block_size_from_sublayers,
    forward_flops_per_token,
)
from k3_plugins.transformer.attention_residuals.feature import FEATURE

PLAIN = {
    "overlap_moe_expert_parallel_comm": False,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "distribute_saved_activations": False,
    "recompute_granularity": None,
    "fp8": None,
    "fp4": None,
    "cpu_offloading_num_layers": 0,
    "offload_modules": None,
    "fine_grained_activation_offloading": False,
    "hybrid_layer_pattern": None,
}


def validate(config=None, **changes):
    args = Namespace(**{**PLAIN, **changes})
    FEATURE.validate(args, config or AttentionResidualsConfig())
    return args


def test_a_block_counted_in_sublayers_is_one_of_half_as_many_layers():
    config = AttentionResidualsConfig(attn_res_block_sublayers=12)
    assert config.attn_res_block_size == 6 and block_size_from_sublayers(12) == 6
    # what reads Megatron's arguments, and the flags a checkpoint prints, have the size in layers
    assert validate(config).attn_res_block_size == 6
    assert flag_line(config, parameter_fields(FEATURE)) == ["--attn-res-block-size", "6"]
    assert parameter_fields(FEATURE) == ["attn_res_block_size"]


@pytest.mark.parametrize("sublayers", [0, -2, 1, 7])
def test_no_whole_number_of_layers_is_refused(sublayers):
    args = Namespace(
        attn_res_block_size=12, attn_res_block_sublayers=sublayers, attn_res_two_phase="auto",
        attn_res_recompute_input="on", attn_res_pp_cache="on",
    )
    with pytest.raises(FeatureError, match=f"--attn-res-block-sublayers {sublayers} is no whole number"):
        config_from_args(FEATURE, args)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"cuda_graph_impl": "local"}, "CUDA graphs"),
        ({"enable_cuda_graph": True}, "CUDA graphs"),
        ({"external_cuda_graph": True}, "CUDA graphs"),
        ({"distribute_saved_activations": True}, "--distribute-saved-activations"),
        ({"recompute_granularity": "full", "fp8": "e4m3"}, "--recompute-granularity selective"),
        ({"recompute_granularity": "full", "fp4": "e2m1"}, "--recompute-granularity selective"),
        ({"cpu_offloading_num_layers": 2}, "--attn-res-recompute-input off"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["mlp_norm", "core_attn"]},
            "--offload-modules mlp_norm",
        ),
        ({"hybrid_layer_pattern": "M*"}, "--hybrid-layer-pattern"),
    ],
)
def test_flags_that_cannot_be_combined_are_refused_by_name(changes, words):
    with pytest.raises(FeatureError, match=words):
        validate(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "fp8": "e4m3"},
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
        {"offload_modules": ["attn_norm"]},
    ],
)
def test_flags_that_can_be_combined_are_not_refused(changes):
    validate(**changes)
    off = AttentionResidualsConfig(attn_res_recompute_input="off")
    validate(off, cpu_offloading_num_layers=2)


@pytest.mark.parametrize(("layers", "block"), [(1, 1), (5, 2), (8, 3), (8, 4), (93, 12)])
def test_flops_are_those_of_the_sources_that_are_read(layers, block):
    """Count the sources layer by layer as the equations say; each costs a norm, a logit and a weighted sum of d."""
    sources, finished, partial = 0, 1, False
    for layer in range(layers):
        if layer % block == 0:
            finished += layer > 0
            partial = False
        for _ in ("attention", "MLP"):
            sources += finished + partial
            partial = True
    sources += finished + partial
    assert forward_flops_per_token(layers, block, 40) == sources * 40 * (2 + 2 + 2)


def test_megatrons_flop_count_gets_three_forwards_of_the_aggregations(monkeypatch):
    from k3_plugins import activation
    from k3_plugins.transformer.attention_residuals.metrics import correct_flops

    class Active:
        def config(self, name):
            assert name == "attnres"
            return AttentionResidualsConfig(attn_res_block_size=3)

    monkeypatch.setattr(activation, "_current", Active())
    count = correct_flops(lambda args, batch, squares=None, tokens=None: 1000.0)
    args = Namespace(num_layers=8, hidden_size=40, seq_length=32)
    once = forward_flops_per_token(8, 3, 40)
    assert count(args, 4) == 1000 + 3 * once * 4 * 32
    # padding does not count where Megatron counts real tokens
    assert count(args, 4, 1.0, 100) == 1000 + 3 * once * 100
