"""LatentMoE through its spec against the token loop, on 1, 2 and 4 ranks: output and every gradient; checkpoints."""

import math

import torch

from tests.distributed.transformer.moe import layer_harness as harness
from tests.distributed.transformer.moe.layer_harness import Case
from tests.harness.spawn import spawn

# Megatron computes scores and routing weights in fp32 (2^-24 relative each), everything else here is fp64.
FP64 = 2e-6

CASES = {
    1: [
        Case(),
        Case(l=None),
        Case(F=None, k=3),
        Case(k=8),
        Case(dispatcher="allgather"),
        Case(routing="single_hot"),
        Case(beta_gate=0.7, beta_up=1.5, norm_eps=0.3),
        Case(beta_gate=math.inf, beta_up=math.inf),
        Case(norm=False),
        Case(scaling=2.446),
    ],
    2: [Case(ep=2), Case(), Case(tp=2), Case(tp=2, ep=2), Case(tp=2, etp=2)],
    4: [Case(ep=4), Case(tp=2, ep=2), Case(tp=2, ep=4), Case(ep=2, routing="zipf", dispatcher="allgather")],
}


def build(case, **settings):
    from k3_plugins.transformer.moe.latent_moe.spec import moe_module_spec

    harness.start(case)
    config = harness.config_of(case)
    layer = moe_module_spec(config, harness.latent_config_of(case, **settings))(config=config, layer_number=1)
    layer.set_layer_number(1)
    harness.fill(layer, case)
    return layer


def check(rank, world_size):
    for case in harness.by_layout(CASES[world_size]):
        harness.compare(build(case), case, FP64)
        if case.tp > 1:
            harness.compare(build(case, moe_latent_projection="sharded"), case, FP64)


def checkpoint(rank, world_size, folder):
    """Saved by one layout, loaded by another, and by Megatron's own SequentialMLP."""
    from functools import partial

    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    from k3_plugins.transformer.moe.latent_moe.mlp import _prepare
    from k3_plugins.transformer.moe.ops.activation import SITU

    def sharded(layer):
        from megatron.core import parallel_state as ps

        metadata = {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
        return layer.sharded_state_dict(prefix="decoder.layers.0.mlp.", metadata=metadata)

    def restore(layer):
        for parameter in layer.parameters():
            parameter.data.fill_(float("nan"))
        # Megatron's linear layers describe an extra state (for fp8) that stacked experts do not write.
        wanted = sharded(layer)
        for key in [key for key in wanted if "local_experts" in key and "_extra" in key]:
            del wanted[key]
        loaded = dist_checkpointing.load(wanted, folder)
        prefix = "decoder.layers.0.mlp."
        missing, unexpected = layer.load_state_dict(
            {key.removeprefix(prefix): value for key, value in loaded.items()}, strict=False
        )
        assert not unexpected and all(key.endswith("_extra_state") for key in missing), (missing, unexpected)

    layouts = [Case(), Case(ep=2), Case(ep=4), Case(tp=2, etp=2), Case(tp=2, ep=2)]
    dist_checkpointing.save(sharded(build(layouts[2])), folder)
    for case in layouts:
        for projection in ("duplicated", "sharded"):
            layer = build(case, moe_latent_projection=projection)
            restore(layer)
            harness.compare(layer, case, FP64)

    case = Case(ep=2)
    layer = build(case)
    config, submodules = _prepare(
        harness.config_of(case), MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear), SITU
    )
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    layer.experts = partial(SequentialMLP, submodules=submodules)(4, config, pg_collection=get_default_pg_collection())
    restore(layer)
    output, gradients = harness.run(layer, case)
    want, expected, _ = harness.oracle(case)
    torch.testing.assert_close(output, want[harness.local_tokens(case)], rtol=FP64, atol=FP64)
    for name in ("router", "down", "up", "norm", "shared1", "shared2"):
        torch.testing.assert_close(
            gradients[name], harness.shares(layer, case)[name][1](expected[name]), rtol=1e-5, atol=FP64 * 100
        )


def four_ranks(rank, world_size, folder):
    check(rank, world_size)
    checkpoint(rank, world_size, folder)


def two_ranks(rank, world_size):
    check(rank, world_size)
    same_start(rank, world_size)


def same_start(rank, world_size):
    """Every expert-parallel layout draws the same weights."""
    import torch.distributed as dist

    def draw(case):
        harness.start(case)
        torch.manual_seed(5)
        from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig
        from k3_plugins.transformer.moe.latent_moe.spec import moe_module_spec

        config = harness.config_of(case)
        experts = moe_module_spec(config, LatentMoEConfig())(config=config, layer_number=1).experts
        return experts.weight1.detach(), experts.weight2.detach()

    whole, split = draw(Case()), draw(Case(ep=2))
    for one, part in zip(whole, split, strict=True):
        gathered = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(gathered, part)
        assert torch.equal(torch.cat(gathered), one)
        assert len(one.unique()) > one.numel() * 0.99  # every expert drew its own


def test_one_rank_equals_the_token_loop():
    spawn(check, 1)


def test_two_ranks_equal_the_token_loop_and_start_from_the_same_weights():
    spawn(two_ranks, 2)


def test_four_ranks_equal_the_token_loop_and_checkpoints_move_between_layouts(tmp_path):
    (tmp_path / "ckpt").mkdir()
    spawn(four_ranks, 4, str(tmp_path / "ckpt"), timeout=240)
