"""Experts of every kind round what ModelOpt's packed tensors hold, wherever rows and weights travel."""

import pytest
import torch

from tests.distributed.transformer.moe import layer_harness as harness
from tests.distributed.transformer.moe.layer_harness import Case
from tests.harness.spawn import spawn

pytest.importorskip("modelopt.torch.quantization")

# As in the other tests of this layer: the router's scores are fp32, everything else fp64. A wrong rounding of one
# operand would show as percents.
FP64 = 2e-6


def cases(ranks):
    sizes = dict(d=16, l=32, f=64, F=None, ep=ranks)
    plain = [(Case(routing=routing, **sizes), False) for routing in ("plain", "single_hot")]
    if ranks == 1:
        return [*plain, (Case(**sizes), True)]
    return [
        *plain,
        *((Case(routing=routing, **sizes), True) for routing in ("zipf", "single_hot", "tight")),
        (Case(tp=2, etp=2, **{**sizes, "ep": 1}), False),  # 32 of 64 columns on each rank
        (Case(tp=2, **sizes), True),
        (Case(**{**sizes, "F": 24}, routing="zipf"), True),
    ]


def check_layers(rank, world_size):
    from tests.distributed.post_training.mxfp4_qat import qat_layers

    for case, balanced in cases(world_size):
        for memory_efficient in (True, False) if balanced else (True,):
            layer = qat_layers.build(case, balanced, memory_efficient)
            found = qat_layers.errors(layer, case)
            worst = max(found, key=found.__getitem__)
            assert found[worst] <= FP64, f"{case}, balanced {balanced}: {worst} is off by {found[worst]:.1e}"
            if balanced and world_size > 1 and case.routing in ("zipf", "single_hot", "tight"):
                assert layer.report.slots_anywhere > 0, case
    same_bits(world_size)
    unrounded(world_size)
    sequential(world_size)
    refused()


def same_bits(world_size):
    """MoonEP's slots compute with the bits of the home experts: outputs equal all-to-all dispatch in fp32 too."""
    from tests.distributed.post_training.mxfp4_qat import qat_layers

    case = Case(d=16, l=32, f=64, F=None, ep=world_size, routing="zipf", dtype=torch.float32)
    outputs = [harness.run(qat_layers.build(case, balanced), case) for balanced in (False, True)]
    (plain, plain_grads), (slots, slots_grads) = outputs
    # Only the order in which a token's results are added differs; without rounding it differs as much.
    assert (plain - slots).abs().max() <= 1e-6 * plain.abs().max()
    for name, gradient in plain_grads.items():
        assert (gradient - slots_grads[name]).abs().max() <= 2e-6 * gradient.abs().max(), name


def unrounded(world_size):
    """The comparison above sees rounding: without quantizers the same layer is percents away from the oracle."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    from tests.distributed.post_training.mxfp4_qat import qat_layers

    case = Case(d=16, l=32, f=64, F=None, ep=world_size)
    for part in ("weight", "input"):
        layer = qat_layers.build(case, balanced=False)
        for name, module in layer.named_modules():
            if isinstance(module, TensorQuantizer) and part in name:
                module.disable()
        assert qat_layers.errors(layer, case)["output"] > 1e-3


def sequential(world_size):
    """Megatron's SequentialMLP through ModelOpt's own classes for linear layers: the same outputs and gradients."""
    from functools import partial

    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    from k3_plugins.post_training.mxfp4_qat.config import MXFP4QATConfig
    from k3_plugins.post_training.mxfp4_qat.convert import quantize_routed_experts, quantizers
    from k3_plugins.transformer.moe.latent_moe.mlp import ActivationModule
    from k3_plugins.transformer.moe.ops.activation import SITU
    from tests.distributed.post_training.mxfp4_qat import qat_layers

    case = Case(d=16, l=32, f=64, F=None, ep=world_size, dtype=torch.float32)
    layer = qat_layers.build(case, balanced=False)
    stacked = layer.experts
    expected, expected_grads = harness.run(layer, case)

    backend = LocalSpecProvider()
    submodules = MLPSubmodules(
        linear_fc1=backend.column_parallel_linear(),
        linear_fc2=backend.row_parallel_linear(),
        activation_func=lambda config: ActivationModule(SITU),
    )
    config = harness.config_of(case)
    config.use_te_activation_func = True
    config.hidden_size = case.l
    groups = layer_groups()
    layer.experts = SequentialMLP(case.E // case.ep, config, submodules, pg_collection=groups)
    for i, expert in enumerate(layer.experts.local_experts):
        expert.linear_fc1.weight.data.copy_(stacked.weight1[i].detach())
        expert.linear_fc2.weight.data.copy_(stacked.weight2[i].detach())
    keys = set(layer.experts.sharded_state_dict())
    quantize_routed_experts(layer, MXFP4QATConfig())
    assert set(layer.experts.sharded_state_dict()) == keys  # checkpoints are those of plain training
    assert len(quantizers(layer)) == 4 * case.E // case.ep

    run = partial(harness.run, layer, case)
    output, grads = run()
    assert (output - expected).abs().max() <= 1e-6 * expected.abs().max()
    for name, gradient in grads.items():
        assert (gradient - expected_grads[name]).abs().max() <= 2e-6 * expected_grads[name].abs().max(), name
    for i, expert in enumerate(layer.experts.local_experts):
        for linear, weight in (("linear_fc1", stacked.weight1), ("linear_fc2", stacked.weight2)):
            gradient = getattr(expert, linear).weight.grad
            assert (gradient - weight.grad[i]).abs().max() <= 2e-6 * weight.grad.abs().max(), (i, linear)


def layer_groups():
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    return get_default_pg_collection()


def refused():
    from k3_plugins.feature import FeatureError
    from tests.distributed.post_training.mxfp4_qat import qat_layers

    for sizes, text in (({"l": 48, "f": 64}, "linear_fc1 has 48"), ({"l": 32, "f": 24}, "linear_fc2 has 24")):
        with pytest.raises(FeatureError, match=rf"experts \(layer 1\): {text} input columns"):
            qat_layers.build(Case(d=16, F=None, **sizes), balanced=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_to_the_experts_equals_the_loop_over_tokens(ranks):
    spawn(check_layers, ranks, timeout=400)
