"""The plan of loans, simulated up to 64 pipeline ranks, and its schedule against Megatron's own functions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_plugins.memory.remote.plan import ChunkCost, make_plan, simulate
from k3_plugins.memory.remote.schedule import Schedule


def uniform(schedule, layers, size=1000):
    return [[ChunkCost((size,) * layers)] * schedule.chunks] * schedule.ranks


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
@pytest.mark.parametrize(("chunks", "group"), [(1, None), (2, None), (4, None), (2, 3)])
def test_in_flight_micro_batches(ranks, chunks, group):
    """The formula of the warm-up is what the order of passes holds at most; every pass runs once, and in order."""
    schedule = Schedule(ranks, micro_batches=4 * ranks, chunks=chunks, group=group)
    for rank in {0, 1, ranks // 2, ranks - 1}:
        passes = schedule.passes(rank)
        held, most = set(), 0
        for step in passes:
            key = (step.micro_batch, step.chunk)
            if step.kind == "forward":
                held.add(key)
            else:
                held.remove(key)
            most = max(most, len(held))
        assert not held and len(passes) == 2 * 4 * ranks * chunks
        assert most == schedule.in_flight(rank)
        if chunks == 1:
            assert most == ranks - rank
        elif group is None:
            assert most == 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1


def test_order_of_passes_is_megatrons(monkeypatch):
    from megatron.core.pipeline_parallel import schedules

    for ranks, chunks, micro_batches, group in ((4, 2, 8, 4), (2, 3, 6, 2), (4, 2, 10, 5)):
        schedule = Schedule(ranks, micro_batches, chunks, group)
        assert schedule._table() == schedules.get_schedule_table(micro_batches, chunks, group)
        for rank in range(ranks):
            place = {"get_pipeline_model_parallel_world_size": ranks, "get_pipeline_model_parallel_rank": rank}
            place["get_virtual_pipeline_model_parallel_world_size"] = chunks
            for name, value in place.items():
                monkeypatch.setattr(schedules.parallel_state, name, lambda value=value: value)
            counts = schedules.get_pp_rank_microbatches(micro_batches, chunks, group)
            assert counts[2] == schedule.warm_up(rank)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("chunks", "layers"), [(1, 4), (2, 2), (2, 3)])
def test_peaks_are_level(ranks, chunks, layers):
    """Without loans the first rank holds at least twice as much as the last; with them all are within 10 %."""
    schedule = Schedule(ranks, micro_batches=4 * ranks, chunks=chunks)
    plan = make_plan(schedule, uniform(schedule, layers))
    if chunks == 1 or ranks >= 4:
        assert max(plan.unlevelled) >= 2 * min(plan.unlevelled)
    assert max(plan.levelled) <= 1.10 * min(plan.levelled), plan
    # nothing is lost: what is not on the rank is at a lender, or has come back
    mean = sum(plan.unlevelled) / ranks
    assert max(plan.levelled) <= 1.05 * mean + 3000


def test_a_plan_by_hand():
    """P 4, V 2: 11, 9, 7 and 5 micro-batch-chunks; rank 0 lends out 3 to rank 3, rank 1 lends out 1 to rank 2."""
    schedule = Schedule(4, micro_batches=16, chunks=2)
    plan = make_plan(schedule, uniform(schedule, layers=1), fetched=0)
    assert plan.unlevelled == (11000, 9000, 7000, 5000)
    assert plan.levelled == (8000, 8000, 8000, 8000)
    assert {(loan.borrower, loan.lender, loan.nbytes) for loan in plan.loans} == {(0, 3, 3000), (1, 2, 1000)}
    # with two pieces back at a time, which rank 1 would gain nothing from
    plan = make_plan(schedule, uniform(schedule, layers=1))
    assert plan.levelled == (9000, 9000, 7000, 9000) and plan.levels[1] - plan.levels[0] == 2000
    assert {(loan.borrower, loan.lender, loan.nbytes) for loan in plan.loans} == {(0, 3, 4000)}


@settings(max_examples=60)
@given(st.data())
def test_any_plan_is_sound(data):
    """Uneven layers and fixed parts: no rank above the highest peak before, every loan is used and within the level."""
    ranks = data.draw(st.integers(1, 8))
    chunks = data.draw(st.integers(1, 3))
    schedule = Schedule(ranks, data.draw(st.integers(1, 16)), chunks)
    sizes = st.lists(st.integers(0, 5000), max_size=4).map(tuple)
    cost = st.builds(ChunkCost, sizes, st.integers(0, 3000))
    costs = [[data.draw(cost) for _ in range(chunks)] for _ in range(ranks)]
    plan = make_plan(schedule, costs)
    assert max(plan.levelled) <= max(plan.unlevelled)
    borrowers, lenders = {loan.borrower for loan in plan.loans}, {loan.lender for loan in plan.loans}
    assert not borrowers & lenders and all(loan.nbytes > 0 for loan in plan.loans)
    for rank in range(ranks):
        room = [loan.nbytes for loan in plan.of_borrower(rank)]
        peaks, used = simulate(schedule, rank, costs[rank], plan.levels[rank] if room else None, room or None)
        assert used == room or not room
        assert peaks == plan.peaks[rank]
        held = sum(loan.nbytes for loan in plan.of_lender(rank))
        back = max(plan.levels) - plan.levels[rank]
        assert peaks.own + held + back == plan.levelled[rank]


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="ranks >= 1"):
        Schedule(0, 1)
    with pytest.raises(ValueError, match="need as many costs"):
        make_plan(Schedule(2, 2), [[ChunkCost((1,))]])
