"""The feature: protocol, light imports, flags with Moonlight's defaults, and bad options refused by name."""

import argparse
import subprocess
import sys
from argparse import Namespace

import pytest

from k3_plugins.feature import FeatureError, verify
from k3_plugins.optimizer.per_head_muon.config import PerHeadMuonConfig
from k3_plugins.optimizer.per_head_muon.feature import FEATURE, ONE_BUCKET
from k3_plugins.optimizer.per_head_muon.settings import MOONLIGHT, MuonSettings


def good(**changes):
    values = {
        "optimizer": "adam",
        "muon_nesterov": False,
        "muon_scalar_optimizer": "adam",
        "muon_fp32_matmul_prec": "medium",
        "muon_split_qkv": True,
        "tensor_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "expert_model_parallel_size": 1,
        "num_experts": None,
        "fp16": False,
        "use_megatron_fsdp": False,
        "use_torch_fsdp2": False,
        "optimizer_cpu_offload": False,
        "use_precision_aware_optimizer": False,
        "optimizer_cuda_graph": False,
        "fp8_param_gather": False,
        "fp4_param_gather": False,
        "overlap_param_gather_with_optimizer_step": False,
        "num_distributed_optimizer_instances": 1,
        "use_mup": False,
        "tensor_parallel_num_weight_shards": None,
        "overlap_grad_reduce": False,
        "ddp_bucket_size": None,
        "ddp_num_buckets": None,
    }
    return Namespace(**(values | MOONLIGHT | changes))


def test_protocol_and_patches():
    verify(FEATURE, registered_as="per-head-muon", origin="test")
    assert all(patch.feature == FEATURE.name for patch in FEATURE.patches())


def test_importing_the_feature_imports_neither_torch_nor_megatron():
    program = (
        "import sys, k3_plugins.optimizer.per_head_muon.feature as f; f.FEATURE.patches();"
        "assert not {'torch', 'megatron', 'emerging_optimizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_megatron_sees_an_adam_and_one_bucket_per_chunk():
    for name in ("adam", "muon"):
        args = good(optimizer=name, overlap_grad_reduce=True)
        FEATURE.validate(args, PerHeadMuonConfig())
        assert args.optimizer == "adam" and args.ddp_bucket_size == ONE_BUCKET and args.muon_nesterov
    args = good(overlap_grad_reduce=True, ddp_bucket_size=1000)
    FEATURE.validate(args, PerHeadMuonConfig(muon_heavy_ball=True))
    assert args.ddp_bucket_size == 1000 and not args.muon_nesterov


@pytest.mark.parametrize(
    ("changes", "config", "words"),
    [
        ({"optimizer": "sgd"}, {}, "--optimizer sgd"),
        ({"muon_nesterov": True}, {"muon_heavy_ball": True}, "--muon-nesterov and --muon-heavy-ball"),
        ({"muon_scalar_optimizer": "lion"}, {}, "--muon-scalar-optimizer lion"),
        ({"muon_fp32_matmul_prec": "low"}, {}, "--muon-fp32-matmul-prec low"),
        ({"muon_tp_mode": "blockwise", "tensor_model_parallel_size": 2}, {}, "--muon-tp-mode blockwise"),
        ({"muon_momentum": 1.0}, {}, "--muon-momentum 1.0"),
        ({"muon_num_ns_steps": 0}, {}, "--muon-num-ns-steps 0"),
        ({"muon_extra_scale_factor": 0.0}, {}, "--muon-extra-scale-factor 0.0"),
        ({"muon_coefficient_type": "cubic"}, {}, "--muon-coefficient-type cubic is none of simple, quintic"),
        ({}, {"muon_batch_elements": 0}, "--muon-batch-elements 0"),
        ({}, {"muon_adamw_lr": -1.0}, "--muon-adamw-lr -1.0"),
        ({}, {"muon_adamw_min_lr": 1.0}, "--muon-adamw-min-lr needs --muon-adamw-lr"),
        ({}, {"muon_adamw_lr": 1.0, "muon_adamw_min_lr": 2.0}, "--muon-adamw-min-lr 2.0 is greater"),
        ({"fp16": True}, {}, "--fp16"),
        ({"use_megatron_fsdp": True}, {}, "--use-megatron-fsdp"),
        ({"use_torch_fsdp2": True}, {}, "--use-torch-fsdp2"),
        ({"optimizer_cpu_offload": True}, {}, "--optimizer-cpu-offload"),
        ({"use_precision_aware_optimizer": True}, {}, "--use-precision-aware-optimizer"),
        ({"optimizer_cuda_graph": True}, {}, "--optimizer-cuda-graph"),
        ({"fp8_param_gather": True}, {}, "--fp8-param-gather"),
        ({"fp4_param_gather": True}, {}, "--fp4-param-gather"),
        ({"overlap_param_gather_with_optimizer_step": True}, {}, "--overlap-param-gather-with-optimizer-step"),
        ({"num_distributed_optimizer_instances": 2}, {}, "--num-distributed-optimizer-instances 2"),
        ({"use_mup": True}, {}, "--use-mup"),
        ({"tensor_parallel_num_weight_shards": 4}, {}, "--tensor-parallel-num-weight-shards 4"),
        (
            {"num_experts": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            {},
            "--expert-tensor-parallel-size 1",
        ),
    ],
)
def test_bad_options_are_refused_by_name(changes, config, words):
    with pytest.raises(FeatureError) as refusal:
        FEATURE.validate(good(**changes), PerHeadMuonConfig(**config))
    assert words in str(refusal.value)


def test_moonlight_is_the_default_of_megatrons_flags_and_every_flag_is_honoured():
    from megatron.training.arguments import add_megatron_arguments

    from k3_plugins.arguments import extend_parser

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    extend_parser(parser, [FEATURE])
    flags = PerHeadMuonConfig()
    settings = MuonSettings.resolve(parser.parse_args([]), flags)
    assert settings == MuonSettings()  # momentum 0.95, Nesterov, 5 steps of (3.4445, -4.7750, 2.0315), 0.2 sqrt(max)
    given = parser.parse_args(
        "--muon-momentum 0.9 --muon-coefficient-type quintic --muon-num-ns-steps 6 --muon-scale-mode unit_rms_norm "
        "--muon-extra-scale-factor 1.0 --muon-fp32-matmul-prec high --muon-no-split-qkv".split()
    )
    changed = MuonSettings.resolve(given, PerHeadMuonConfig(muon_heavy_ball=True, muon_per_head=False))
    assert changed == MuonSettings(
        momentum=0.9,
        nesterov=False,
        steps=6,
        coefficients="quintic",
        scale_mode="unit_rms_norm",
        extra_scale=1.0,
        matmul_precision="high",
        per_head=False,
        split_qkv=False,
    )


def test_a_default_of_a_flag_that_megatron_does_not_have_is_an_error():
    from k3_plugins.arguments import extend_parser

    class Misspelt:
        name, config = "misspelt", None

        def argument_defaults(self):
            return {"muon_momentun": 0.9}

    with pytest.raises(FeatureError, match=r"feature 'misspelt' sets flags .* \['muon_momentun'\]"):
        extend_parser(argparse.ArgumentParser(), [Misspelt()])


def test_waits_are_taken_on_ranks_without_a_writer(monkeypatch):
    """A rank that never writes the metric must not keep what it measured."""
    import megatron.training
    from megatron.training import global_vars

    from k3_plugins.optimizer.per_head_muon import training

    taken = []
    exchange = Namespace(take_waited_ms=lambda: taken.append(1) or 0.0)
    monkeypatch.setattr(training, "OPTIMIZERS", [Namespace(exchange=exchange)])
    monkeypatch.setattr(megatron.training, "get_args", lambda: Namespace(tensorboard_log_interval=2))
    for name in ("get_tensorboard_writer", "get_wandb_writer"):
        monkeypatch.setattr(global_vars, name, lambda: None)
    training_log = training.wrap_training_log(lambda *_: None)
    training_log({}, {}, None, 3)
    assert not taken
    training_log({}, {}, None, 4)
    assert taken == [1]


def test_a_gradient_of_another_size_is_not_spread_over_the_shard():
    """One element would broadcast: every momentum would take in the same number."""
    import torch

    from k3_plugins.optimizer.per_head_muon.optimizer import MUON, PerHeadMuon, Shard

    main = torch.nn.Parameter(torch.ones(6))
    optimizer = PerHeadMuon([{"params": [main], "optimizer": MUON}], MuonSettings(), lr=0.1)
    optimizer.init_states()
    shard = Shard("0.weight", main, 0)
    with pytest.raises(RuntimeError, match=r"0\.weight has no gradient"):
        optimizer.gradient_of(shard)
    main.grad = torch.ones(6)
    main.grad.data = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"gradient of 0\.weight has 1 elements on this rank, its shard 6"):
        optimizer.advance_momentum(shard, 0.1, 0.1)
    assert not optimizer.state[main]["exp_avg"].any()


def stepped(trained, steps=1, orthogonalised=None, received=None):
    """What the witness sees of an optimizer with two local matrices, one that moves, and 10 elements per step."""
    plan = Namespace(local=[1, 2], owned=[3], elements_received=10)
    return Namespace(
        work=[Namespace(plan=plan)],
        trained=trained,
        steps=steps,
        orthogonalised=3 * steps if orthogonalised is None else orthogonalised,
        exchange=Namespace(elements_received=10 * steps if received is None else received),
    )


def test_the_witness_wants_updates_of_every_parameter_by_these_optimizers(monkeypatch):
    import torch

    from k3_plugins.optimizer.per_head_muon import runtime

    dense, expert, frozen = (torch.nn.Parameter(torch.ones(1), requires_grad=grad) for grad in (True, True, False))
    model = [Namespace(parameters=lambda: iter([dense, expert, frozen]))]

    def hear(*optimizers):
        monkeypatch.setattr(runtime, "OPTIMIZERS", list(optimizers))
        return FEATURE.witness(model, Namespace())

    good = hear(stepped([dense]), stepped([expert], steps=2))
    assert good.ok and good.summary == "6 matrices owned, 30 elements received"
    other = torch.nn.Parameter(torch.ones(1))
    for optimizers, words in (
        ([], "2 trainable parameters belong to no Per-Head Muon optimizer"),
        ([stepped([dense])], "1 trainable parameters belong to no"),
        ([stepped([dense]), stepped([expert], steps=0)], "made no update in the first step"),
        ([stepped([dense, expert]), stepped([other])], "belongs to another model"),
        ([stepped([dense, expert], orthogonalised=2)], "1 matrices less than planned were orthogonalised"),
        ([stepped([dense, expert], received=9)], "10 elements were planned"),
    ):
        bad = hear(*optimizers)
        assert not bad.ok and words in bad.summary, (optimizers, bad)
    frozen_only = [Namespace(parameters=lambda: iter([frozen]))]
    monkeypatch.setattr(runtime, "OPTIMIZERS", [])
    assert FEATURE.witness(frozen_only, Namespace()).ok, "a stage without trainable parameters has no optimizer"
