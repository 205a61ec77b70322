"""MoonEP on ranks: every gradient equals the token loop, perfect balance, no host read, poison stays invisible."""

import pytest
import torch

from tests.distributed.transformer.moe import flight_cases, moonep_stand_in
from tests.distributed.transformer.moe import layer_harness as harness
from tests.distributed.transformer.moe.flight_cases import FlightCase
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


def build(case, memory_efficient=True, **settings):
    from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig
    from k3_plugins.transformer.moe.latent_moe.layer import LatentMoELayer
    from k3_plugins.transformer.moe.latent_moe.spec import moe_module_spec
    from k3_plugins.transformer.moe.moonep.config import MoonEPConfig
    from k3_plugins.transformer.moe.moonep.spec import layer_options

    harness.start(case)
    config = harness.config_of(case)
    options = layer_options(LatentMoELayer, MoonEPConfig(moe_moonep_memory_efficient=memory_efficient, **settings))
    layer = moe_module_spec(config, LatentMoEConfig(), **options)(config=config, layer_number=1)
    layer.set_layer_number(1)
    harness.fill(layer, case)
    return layer


class NoHostReadOps(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails on every operation that would make the host wait for the device."""

    forbidden = (
        "_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default", "is_nonzero", "bincount",
        "repeat_interleave.Tensor", "repeat_interleave.self_Tensor", "tensor_split.tensor",
    )  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in self.forbidden), f"host read: {func}"
        if "index.Tensor" in str(func) or "index_put" in str(func):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"host read: {func} with a mask has a size that only the device knows"
        return func(*args, **(kwargs or {}))


class NoHostReadMethods(torch.overrides.TorchFunctionMode):
    """Fails on the methods that read a CPU tensor without an operation of their own."""

    forbidden = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert getattr(func, "__name__", "") not in self.forbidden, f"host read: {func}"
        return func(*args, **(kwargs or {}))


def check_balance(layer, case):
    """Rows per rank exactly equal; redundant slots were used where the routing is skewed."""
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    _, _, padding = harness.tokens_of(case)
    group = ps.get_expert_model_parallel_group()
    pairs = case.tokens_per_rank * case.k
    rows = torch.tensor([int(layer.report.rows)])
    assert layer.report.rows == layer.report.share and layer.report.sent == pairs
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
    exact_probabilities(world_size)
    if world_size > 1:
        overlap(world_size)
        uneven_tokens(world_size)
        package_transport(world_size)


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
        with NoHostReadMethods(), NoHostReadOps():
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


def exact_probabilities(world_size):
    """The experts alone, all in fp64: the gradient of the routing weights included. Sums of at most 24 terms."""
    from k3_plugins.transformer.moe.moonep.exchange import CollectiveExchange
    from k3_plugins.transformer.moe.moonep.transport import AllToAll

    harness.start(Case(ep=world_size))
    for load in ("zipf", "single_hot"):
        case = FlightCase(load=load)
        want = flight_cases.expected(case)
        for memory_efficient in (True, False):
            exchange = CollectiveExchange(AllToAll(torch.distributed.group.WORLD))
            got, flight = flight_cases.run(case, exchange, memory_efficient)
            flight_cases.compare(got, want, 1e-13, (case, memory_efficient))
            assert world_size == 1 or flight.report.slots_anywhere > 0


class Diary:
    """What happens in which order: collectives of the layer's transport started and waited for, modules run."""

    def __enter__(self):
        import torch.distributed as dist

        self.events = []
        self.originals = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_into_tensor")}
        for name, original in self.originals.items():
            setattr(dist, name, self.watched(name, original))
        return self

    def watched(self, name, original):
        def collective(received, sent, **options):
            work = original(received, sent, **options)
            if not options.get("async_op"):
                return work
            width = sent.shape[2] if sent.dim() == 3 else 0
            label = {"all_gather_into_tensor": "counts"}.get(name, f"rows {width}")
            self.events.append(f"start {label}")
            return Watched(work, lambda: self.events.append(f"wait {label}"))

        return collective

    def module(self, name, module):
        module.register_forward_hook(lambda *_: self.events.append(name))
        module.register_full_backward_hook(lambda *_: self.events.append(f"{name} backward"))

    def __exit__(self, *error):
        import torch.distributed as dist

        for name, original in self.originals.items():
            setattr(dist, name, original)

    def order(self, *events):
        """The events occur in this order (each after the one before)."""
        at = -1
        for event in events:
            assert event in self.events[at + 1 :], (event, events, self.events)
            at = self.events.index(event, at + 1)


class Watched:
    def __init__(self, work, note):
        self.work, self.note = work, note

    def wait(self):
        self.note()
        return self.work.wait()


def overlap(world_size):
    """The projection runs while counts travel, the shared experts while rows travel, forward and backward; and the
    results have the same bits as without."""
    case = Case(d=16, l=8, f=8, F=10, ep=world_size, routing="zipf", dtype=torch.float32)
    collectives, results = [], []
    for overlapping in (True, False):
        layer = build(case, moe_moonep_overlap=overlapping)
        with Diary() as diary:
            diary.module("projection", layer.fc1_latent_proj)
            diary.module("shared", layer.shared_experts)
            layer.register_forward_hook(lambda *_, diary=diary: diary.events.append("forward done"))
            results.append(harness.run(layer, case))
        rows = f"rows {case.l}"
        if overlapping:
            diary.order("start counts", "projection", "wait counts", f"start {rows}", "shared", f"wait {rows}")
            sent = diary.events.index(f"start {rows}")
            assert f"wait {rows}" not in diary.events[sent : diary.events.index("shared")]
            # Backward: the gradient's rows, then the input's rows again, are on their way during the shared experts.
            done, shared = diary.events.index("forward done"), diary.events.index("shared backward")
            assert diary.events[done:shared].count(f"start {rows}") == 2 and f"wait {rows}" in diary.events[shared:]
            assert not any(event.startswith("wait") for event in diary.events[done:shared]), diary.events
        else:
            for i, event in enumerate(diary.events):
                if event.startswith("start"):
                    assert diary.events[i + 1] == event.replace("start", "wait"), diary.events
        collectives.append(sorted(e for e in diary.events if e.startswith("start")))
    assert collectives[0] == collectives[1] and len(collectives[0]) == 25, collectives
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name


def uneven_tokens(world_size):
    """Ranks with different numbers of tokens: a sentence on every rank, not a hang."""
    import torch.distributed as dist

    case = Case(ep=world_size)
    layer = build(case)
    rows = 4 if dist.get_rank() == 0 else 6
    with pytest.raises(RuntimeError, match="ranks hold different numbers of tokens; pad the shorter ones"):
        layer(torch.randn(rows, 1, case.d, dtype=case.dtype))


def package_transport(world_size):
    """The adapter for the public package, over a stand-in with its interface: close to the token loop in bf16."""
    moonep_stand_in.install()
    from k3_plugins.transformer.moe.moonep.package import PackageExchange

    for load in ("zipf", "single_hot"):
        case = FlightCase(l=128, f=128, load=load, dtype=torch.bfloat16)
        want = flight_cases.expected(case)
        exchange = PackageExchange(torch.distributed.group.WORLD)
        for memory_efficient in (True, False):
            for _ in range(2):  # the second time over used pools
                got, flight = flight_cases.run(case, exchange, memory_efficient)
                # bf16 rounds rows, hidden layer, activation and result to 2^-9 each, of values up to the largest.
                flight_cases.compare(got, want, 0.03, (case, memory_efficient))
                assert flight.report.rows == flight.report.share == case.T * case.k and flight.report.slots_anywhere > 0

    case = Case(d=16, l=128, f=128, ep=world_size, routing="single_hot", dtype=torch.bfloat16)
    layers = [build(case, moe_moonep_transport=transport) for transport in ("moonep", "torch")]
    results = [harness.run(layer, case) for layer in layers]
    pairs = {"output": (results[0][0], results[1][0])} | {n: (g, results[1][1][n]) for n, g in results[0][1].items()}
    for name, (ours, theirs) in pairs.items():
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error <= 0.02, (name, error)  # the order of sums over a padded segment
    padded = Case(d=16, l=128, f=128, ep=world_size, dtype=torch.bfloat16, padding="some")
    with pytest.raises(ValueError, match="routes every token, and this batch has padding"):
        harness.run(build(padded, moe_moonep_transport="moonep"), padded)


@pytest.mark.parametrize("ranks", CASES)
def test_balanced_layer_equals_the_token_loop(ranks):
    spawn(check, ranks, timeout=300)
