"""Checkpoints through Megatron's distributed checkpoint: other layouts continue bit for bit; foreign state is refused.

Saved at DP 2 after three steps, in both of the distributed optimizer's formats and without it.
"""

import pytest
import torch

from tests.distributed.optimizer.per_head_muon import muon_cases
from tests.distributed.optimizer.per_head_muon.muon_cases import Case
from tests.harness.spawn import spawn

FORMATS = {
    "buckets": {"distrib_optim_sharding_type": "dp_reshardable"},
    "model": {"distrib_optim_sharding_type": "fully_reshardable"},
}
PLAIN = {"distrib_optim_sharding_type": None}
CONVERT = (("muon_adamw_checkpoint", "convert"), ("muon_adamw_lr", None))
SAVED, STEPS = 3, 6


def save(rank, world_size, folder):
    """Save in every format; the weights after all steps without an interruption."""
    run = muon_cases.Run(Case())
    for number in range(SAVED):
        run.step(number)
    for name, metadata in FORMATS.items():
        run.save(f"{folder}/{name}", **metadata)
    plain = muon_cases.Run(Case(sharded=False))
    for number in range(SAVED):
        plain.step(number)
    plain.save(f"{folder}/plain")
    adamw = muon_cases.Run(Case(stock=True))
    for number in range(SAVED):
        adamw.step(number)
    adamw.save(f"{folder}/adamw", **FORMATS["buckets"])
    adamw_plain = muon_cases.Run(Case(stock=True, sharded=False))
    adamw_plain.step(0)
    adamw_plain.save(f"{folder}/adamw plain")
    for number in range(SAVED, STEPS):
        run.step(number)
    return run.whole()


def resume(rank, world_size, folder, plans):
    """Weights of the remaining steps in other layouts."""
    results = {}
    for name, case in plans:
        run = muon_cases.Run(case)
        run.load(f"{folder}/{name}", **FORMATS.get(name, {}))
        assert {inner.param_groups[0]["step"] for inner in run.inners} == {SAVED}
        for number in range(SAVED, STEPS):
            run.step(number)
        results[name, case] = run.whole()
    return results


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder, and the weights of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("muon")
    for name in (*FORMATS, "plain", "adamw", "adamw plain"):
        (folder / name).mkdir()
    return folder, muon_cases.assemble(spawn(save, 2, str(folder)))


PLANS = {
    1: [("buckets", Case()), ("model", Case()), ("plain", Case(sharded=False))],
    2: [("buckets", Case()), ("model", Case(tp=2)), ("model", Case(pp=2, vpp=2)), ("plain", Case(tp=2, sharded=False))],
    4: [("buckets", Case()), ("model", Case(tp=2, flags=(("muon_owner", "largest-piece"),)))],
}


@pytest.mark.parametrize("nprocs", PLANS)
def test_other_layouts_continue(nprocs, checkpoints):
    folder, expected = checkpoints
    by_rank = spawn(resume, nprocs, str(folder), PLANS[nprocs])
    for key in by_rank[0]:
        error, worst = muon_cases.difference(muon_cases.assemble([rank[key] for rank in by_rank]), expected)
        # The same sums in the same order: a lost momentum or step count would be 1e-2.
        assert error <= 1e-6, f"{key}: {worst} is off by {error:.1e}"


def refused(function, *arguments, **keywords):
    """The text of the error, or an empty one."""
    try:
        function(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def foreign(rank, world_size, folder):
    """AdamW's state under Muon, refused and converted; Muon's state under AdamW; a parameter that changed sides."""
    heard = {}
    muon = muon_cases.Run(Case(flags=(("muon_adamw_lr", None),)))
    heard["refuse"] = refused(muon.load, f"{folder}/adamw", **FORMATS["buckets"])
    plain = muon_cases.Run(Case(sharded=False))
    heard["plain"] = refused(plain.load, f"{folder}/adamw plain")

    adamw = muon_cases.Run(Case(stock=True))
    adamw.load(f"{folder}/adamw", **FORMATS["buckets"])
    heard["stock"] = refused(muon_cases.Run(Case(stock=True)).load, f"{folder}/buckets", **FORMATS["buckets"])

    converted = muon_cases.Run(Case(flags=CONVERT))
    converted.load(f"{folder}/adamw", **FORMATS["buckets"])
    (ours,), (theirs,) = converted.optimizer.chained_optimizers, adamw.optimizer.chained_optimizers
    same = 0
    shards = ours.main_shards()
    for parameter, other in zip(_parameters(converted), _parameters(adamw), strict=True):
        if parameter not in shards:
            continue
        mine = ours.optimizer.state[shards[parameter]]
        group, place = theirs.model_param_group_index_map[other]
        state = theirs.optimizer.state[theirs.optimizer.param_groups[group]["params"][place]]
        assert torch.equal(mine["exp_avg"], state["exp_avg"])
        assert "exp_avg_sq" not in mine or torch.equal(mine["exp_avg_sq"], state["exp_avg_sq"])
        same += 1
    assert same > 10
    steps = {group["step"] for group in ours.optimizer.param_groups}
    assert steps == {SAVED}, "the bias corrections of AdamW go on where they were"
    converted.step(SAVED)

    other_lr = muon_cases.Run(Case(flags=(("muon_adamw_lr", 0.001),)))
    heard["lr"] = refused(other_lr.load, f"{folder}/buckets", **FORMATS["buckets"])

    from k3_plugins.optimizer.per_head_muon import rules

    name = "k3_plugins.transformer.kda.layer:KimiDeltaAttention"
    rule = rules._RULES.pop(name)
    heard["side"] = refused(muon_cases.Run(Case()).load, f"{folder}/buckets", **FORMATS["buckets"])
    rules._RULES[name] = rule
    return heard


def _parameters(run):
    return [parameter for chunk in run.chunks for parameter in chunk.parameters()]


def test_foreign_optimizer_state_is_refused_or_converted(checkpoints):
    folder, _ = checkpoints
    for heard in spawn(foreign, 2, str(folder)):
        assert heard["refuse"].startswith("FeatureError") and "--muon-adamw-checkpoint convert" in heard["refuse"]
        assert heard["plain"].startswith("FeatureError") and "--no-load-optim" in heard["plain"]
        # Bare Megatron has no other words; the doors refuse it before anything is built (test_muon_training.py).
        assert heard["stock"].startswith("KeyError")
        assert "'max_lr': 0.001" in heard["lr"] and "--muon-adamw-lr" in heard["lr"]
        assert "holds Muon's state for 0.decoder.layers" in heard["side"] and "no splitting rule" in heard["side"]
