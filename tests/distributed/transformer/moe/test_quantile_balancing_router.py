"""The router on ranks: any split gives the same biases to the last bit; what must not be counted is not."""

import torch

from tests.distributed.transformer.moe import layer_harness as harness
from tests.distributed.transformer.moe.layer_harness import Case
from tests.harness.spawn import spawn

E, D, TOKENS = 16, 8, 64


def make_router(case, **settings):
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from k3_plugins.transformer.moe.quantile_balancing.config import QuantileBalancingConfig
    from k3_plugins.transformer.moe.quantile_balancing.spec import router_spec

    harness.start(case)
    router = router_spec(QuantileBalancingConfig(**settings))(
        config=harness.config_of(case), pg_collection=get_default_pg_collection(), is_mtp_layer=False
    )
    # Multiples of 1/8 and 1/4: every product and sum is exact in fp32, so logits do not depend on the GEMM's shape.
    g = torch.Generator().manual_seed(0)
    router.weight.data.copy_(torch.randint(-8, 9, (E, D), generator=g) / 8)
    return router.train()


def batch(step):
    g = torch.Generator().manual_seed(100 + step)
    x = torch.randint(-8, 9, (TOKENS, D), generator=g) / 4
    x[:, 0] = torch.linspace(-2, 2, TOKENS).mul(4).round() / 4  # content drifts along the batch
    return x.float()


def biases(case, parts_per_rank=1, between=None, steps=3, bins="centred", **settings):
    """Train-like steps over a global batch, each rank its share; all biases, step by step."""
    import torch.distributed as dist

    from k3_plugins.transformer.moe.quantile_balancing.router import update

    world, rank = dist.get_world_size(), dist.get_rank()
    router = make_router(case, moe_qb_bins=bins, **settings)
    other = make_router(case, moe_qb_bins=bins)  # a second layer: one all-reduce for both
    history = []
    for step in range(steps):
        mine = batch(step).chunk(world)[rank]
        for part in mine.chunk(parts_per_rank):
            router(part.view(-1, 1, D))
            other(part.flip(1).view(-1, 1, D))
        if between is not None:
            between(router)
        calls = []
        reduce = dist.all_reduce
        dist.all_reduce = lambda *a, calls=calls, reduce=reduce, **k: (calls.append(a[0].dtype), reduce(*a, **k))[1]
        try:
            update([router, other])
        finally:
            dist.all_reduce = reduce
        assert calls == [torch.int32]
        assert router.last_metrics[2] == TOKENS and router.qb_counts.sum() == 0
        history.append(router.expert_bias.clone())
    return torch.stack(history)


def case_of(**options):
    return Case(d=D, E=E, k=2, l=None, F=None, dtype=torch.float32, **options)


def collect(rank, world_size):
    result = {"plain": biases(case_of()), "four micro-batches": biases(case_of(), parts_per_rank=4)}
    result["uniform"] = biases(case_of(), bins="uniform")
    if world_size == 2:
        result["sequence parallel"] = biases(case_of(tp=2))
        result["expert parallel"] = biases(case_of(ep=2))
        return result

    def evaluate(router):
        router.eval()
        router(batch(77).view(-1, 1, D))
        router.train()

    def recompute(router):
        from torch.utils.checkpoint import checkpoint

        # The pair counts once: reentrant runs forward without autograd, non-reentrant with; both again in backward.
        for reentrant in (True, False):
            counts, calls = router.qb_counts.clone(), router.counted_forwards
            x = batch(5).view(-1, 1, D).requires_grad_()
            probs, _ = checkpoint(router, x, use_reentrant=reentrant)
            probs.sum().backward()
            assert router.counted_forwards == calls + 1
            router.qb_counts.copy_(counts)

    def padding(router):
        mask = torch.ones(16, 1, dtype=torch.bool)
        router(torch.full((16, 1, D), 3.0), padding_mask=mask)

    for name, action in (("evaluation", evaluate), ("recomputation", recompute), ("padding", padding)):
        result[name] = biases(case_of(), between=action)
    half = biases(case_of(), moe_qb_ema=0.5)
    torch.testing.assert_close(half[0], result["plain"][0] / 2, rtol=1e-6, atol=1e-7)

    # The routing itself: sigmoid scores, bias for selection only.
    router = make_router(case_of())
    router.expert_bias.copy_(result["plain"][-1])
    probs, chosen = router(batch(0).view(-1, 1, D))
    from k3_plugins.transformer.moe.ops.naive import route

    experts, weights = route(batch(0).double(), router.weight.double(), router.expert_bias.double(), 2)
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, experts, True))
    torch.testing.assert_close(probs.double().gather(1, experts), weights, rtol=1e-6, atol=1e-7)

    # bf16 conversion of the model leaves the bias fp32 and its value alone.
    before = router.expert_bias.clone()
    router.bfloat16()
    router.expert_bias.data = before.clone()
    state = router.state_dict()
    assert state["expert_bias"].dtype == torch.float32 and torch.equal(state["expert_bias"], before)
    assert "qb_counts" not in state
    return result


def test_any_split_gives_the_same_bits():
    (one,) = spawn(collect, 1)
    assert one["plain"].abs().max() > 0.05 and one["plain"].mean().abs() < 1e-6
    for name in ("four micro-batches", "evaluation", "recomputation", "padding"):
        assert torch.equal(one[name], one["plain"]), name
    for rank, two in enumerate(spawn(collect, 2)):
        for name in ("plain", "four micro-batches", "sequence parallel", "expert parallel"):
            assert torch.equal(two[name], one["plain"]), (rank, name)
        assert torch.equal(two["uniform"], one["uniform"])
