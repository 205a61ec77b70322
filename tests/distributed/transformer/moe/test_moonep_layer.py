"""MoonEP on ranks: every gradient equals the token loop, perfect balance, no host read, poison stays invisible."""

import pytest
import torch

from tests.distributed.transformer.moe import layer_harness as harness
from tests.distributed.transformer.moe.layer_harness import Case
from tests.harness.spawn import spawn

# As in test_latent_moe_layer: scores and routing weights are fp32, everything else fp64.
FP64 = 2e-6
ROUTINGS = ("balanced", "zipf", "single_hot", "tight")


def cases(ep, **options):
    return [Case(ep=ep, routing=routing, **options) for routing in ROUTINGS] + [
        Case(ep=ep, padding="some", routing="zipf", **options),
        Case(ep=ep, padding="rank0", **options),
        Case(ep=ep, padding="all", **options),
        Case(ep=ep, k=8, **options),
    ]


CASES = {
    1: cases(1)[:3] + [Case(padding="all")],
    2: [*cases(2), Case(), Case(tp=2, ep=2, routing="single_hot"), Case(ep=2, l=None, F=None, k=3, routing="zipf")],
    4: [
        *cases(4),
        Case(ep=2, routing="single_hot"),
        Case(tp=2, ep=2, routing="zipf"),
        Case(tp=2, ep=4, routing="single_hot"),
        Case(ep=4, k=3, tokens_per_rank=6, routing="single_hot"),
    ],
}


def build(case, memory_efficient=True):
    from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig
    from k3_plugins.transformer.moe.latent_moe.layer import LatentMoELayer
    from k3_plugins.transformer.moe.latent_moe.spec import moe_module_spec
    from k3_plugins.transformer.moe.moonep.config import MoonEPConfig
    from k3_plugins.transformer.moe.moonep.spec import layer_options

    harness.start(case)
    config = harness.config_of(case)
    settings = MoonEPConfig(moe_moonep_memory_efficient=memory_efficient)
    options = layer_options(LatentMoELayer, settings)
    layer = moe_module_spec(config, LatentMoEConfig(), **options)(config=config, layer_number=1)
    layer.set_layer_number(1)
    harness.fill(layer, case)
    return layer


class NoHostRead(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails on every operation that would make the host wait for the device."""

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in self.forbidden), f"host read: {func}"
        return func(*args, **(kwargs or {}))


def check_balance(layer, case):
    """Rows per rank exactly equal; redundant slots were used where the routing is skewed."""
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    _, _, padding = harness.tokens_of(case)
    group = ps.get_expert_model_parallel_group()
    pairs = case.tokens_per_rank * case.k
    rows = torch.tensor([int(layer.report.rows)])
    everyone = [torch.zeros_like(rows) for _ in range(group.size())]
    dist.all_gather(everyone, rows, group=group)
    everyone = [int(r) for r in everyone]
    if case.padding == "none":
        assert everyone == [pairs] * group.size(), (case, everyone)
    else:
        assert max(everyone) - min(everyone) <= 1, (case, everyone)
    assert layer.report.buffer_rows == pairs
    if case.ep > 1 and case.routing in ("zipf", "single_hot", "tight") and case.k < case.E:
        assert layer.report.slots_anywhere > 0, case
    if case.routing == "tight" and case.ep > 1 and ps.get_expert_model_parallel_rank() == 0:
        assert layer.report.slots >= 1


def check(rank, world_size):
    for case in harness.by_layout(CASES[world_size]):
        for memory_efficient in (True, False) if case.padding == "none" else (True,):
            layer = build(case, memory_efficient)
            names = {name for name, _ in layer.named_parameters()} | set(layer.state_dict())
            harness.compare(layer, case, FP64)
            check_balance(layer, case)
            # Slots are neither parameters nor state.
            assert {name for name, _ in layer.named_parameters()} | set(layer.state_dict()) == names
            assert layer.experts.weight1.shape[0] == case.E // case.ep
    poisoned(world_size)
    host_reads(world_size)
    saved_bytes(world_size)
    refusals(world_size)


def poisoned(world_size):
    """Every receive buffer starts as NaN."""
    original = torch.empty_like
    torch.empty_like = lambda t, *a, **k: (
        original(t, *a, **k).fill_(float("nan")) if t.is_floating_point() else original(t, *a, **k)
    )
    try:
        for routing, padding in (("single_hot", "none"), ("zipf", "some")):
            case = Case(ep=world_size, routing=routing, padding=padding)
            harness.compare(build(case), case, FP64)
    finally:
        torch.empty_like = original


def host_reads(world_size):
    """fp32 and widths that the grouped kernel takes, forward and backward."""
    case = Case(d=16, l=8, f=8, F=None, ep=world_size, routing="zipf", dtype=torch.float32)
    for memory_efficient in (True, False):
        layer = build(case, memory_efficient)
        layer.train()
        x, upstream, _ = (t[harness.local_tokens(case)] for t in harness.tokens_of(case))
        hidden = x.float().view(8, 2, 16).requires_grad_()
        with NoHostRead():
            output, _ = layer(hidden)
            output.backward(upstream.float().view_as(output))
        assert torch.isfinite(hidden.grad).all()


def saved_bytes(world_size):
    """The memory-efficient path keeps the dispatch input only, and its gradients have the same bits."""
    case = Case(d=16, l=8, f=8, F=None, ep=world_size, routing="zipf", dtype=torch.float32)
    kept, gradients = [], []
    for memory_efficient in (True, False):
        layer = build(case, memory_efficient)
        seen = {}
        parameters = {p.data_ptr() for p in layer.parameters()}

        def pack(t, seen=seen, parameters=parameters):
            if t.data_ptr() not in parameters and t.is_floating_point():
                seen[t.data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            _, grads = harness.run(layer, case)
        kept.append(sum(seen.values()))
        gradients.append(grads)
    assert kept[0] < kept[1], kept
    for name, g in gradients[0].items():
        assert torch.equal(g, gradients[1][name]), name


def refusals(world_size):
    for options, words in (
        ({"options": {"moe_expert_capacity_factor": 1.0}}, "drops tokens"),
        ({"k": 9}, "--moe-router-topk is more"),
    ):
        with pytest.raises((ValueError, AssertionError), match=words):
            build(Case(ep=world_size, **options))


@pytest.mark.parametrize("ranks", CASES)
def test_balanced_layer_equals_the_token_loop(ranks):
    spawn(check, ranks, timeout=300)
