"""Splits and plans: every element of a parameter in exactly one matrix, every rank with the same plan, traffic as the
formula says. Pure planning on one process."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from k3_plugins.optimizer.per_head_muon.planner import Place, assign, even_bounds, least_busiest, message_size, view
from k3_plugins.optimizer.per_head_muon.splits import Split, SplitError, matrices, whole
from tests.distributed.optimizer.per_head_muon import traffic

GROUP = (("q", 4), ("q", 4), ("k", 4), ("v", 4))


def covered(found, tensor_rank, size):
    """How often each element of one rank's parameter is in a matrix."""
    counts = [0] * size
    for matrix in found[tensor_rank]:
        for part in matrix.parts:
            if part.tensor_rank == tensor_rank:
                for start, stop in part.intervals:
                    for element in range(start, stop):
                        counts[element] += 1
    return counts


def test_fused_query_key_value_rows_per_head_and_joined():
    split = Split(GROUP, repeat=2, each="head")
    (heads,) = matrices("w", split, (32, 3), None, 1)
    names = {m.label: m.parts[0].intervals for m in heads}
    assert list(names) == ["q 0", "q 1", "k 0", "v 0", "q 2", "q 3", "k 1", "v 1"]
    assert names["k 1"] == ((24 * 3, 28 * 3),)
    (joined,) = matrices("w", split.without_heads(), (32, 3), None, 1)
    assert {m.label: m.parts[0].intervals for m in joined} == {
        "q": ((0, 24), (48, 72)),
        "k": ((24, 36), (72, 84)),
        "v": ((36, 48), (84, 96)),
    }


def test_a_gated_projection_has_a_block_more_than_query_key_and_value():
    split = Split((("q", 4), ("gate", 4), ("k", 4), ("v", 4)), repeat=2, each="head")
    (found,) = matrices("w", split, (32, 3), None, 1)
    assert [m.label for m in found if m.label.startswith("gate")] == ["gate 0", "gate 1"]
    with pytest.raises(SplitError, match=r"w has 32 rows.*describes 24"):
        matrices("w", Split((("q", 4), ("k", 4), ("v", 4)), 2, "head"), (32, 3), None, 1)


@pytest.mark.parametrize("tensor_ranks", [2, 4])
def test_whole_heads_stay_on_their_tensor_rank_and_cut_ones_are_joined(tensor_ranks):
    split = Split(GROUP, repeat=2, each="head")
    found = matrices("w", split, (32 // tensor_ranks, 3), 0, tensor_ranks)
    assert not any(m.joined for rank in found for m in rank)
    assert [len(rank) for rank in found] == [8 // tensor_ranks] * tensor_ranks
    one_group = Split((("q", 6), ("k", 6), ("v", 4)), 1, "head")
    found = matrices("w", one_group, (16 // tensor_ranks, 3), 0, tensor_ranks)
    shared = {m.label: len(m.parts) for rank in found for m in rank if m.joined}
    assert shared == ({"k 0": 2} if tensor_ranks == 2 else {"q 0": 2, "k 0": 2})
    for rank in range(tensor_ranks):
        assert covered(found, rank, 48 // tensor_ranks) == [1] * (48 // tensor_ranks)


def test_gate_and_up_of_a_tensor_parallel_layer():
    """Every rank holds [gate_t; up_t]: the whole gate is the ranks' gates in order."""
    found = matrices("w", Split((("gate", 2), ("up", 2)), order="local"), (4, 3), 0, 2)
    gate, up = found[0]
    assert found[1] == [gate, up] and (gate.rows, gate.columns) == (4, 3)
    assert [(p.tensor_rank, p.intervals, p.offset) for p in up.parts] == [(0, ((6, 12),), 0), (1, ((6, 12),), 6)]


def test_columns_over_tensor_ranks_and_stacked_experts():
    ((matrix,), (same,)) = matrices("w", whole(4), (4, 3), 1, 2)
    assert matrix is same and (matrix.rows, matrix.columns, matrix.slabs) == (4, 6, 2)
    experts = Split((("gate", 2), ("up", 2)), 3, "expert", "local")
    (found,) = matrices("w", experts, (3, 4, 5), None, 1)
    assert [m.label for m in found][:3] == ["expert 0 gate", "expert 0 up", "expert 1 gate"]
    assert {(m.rows, m.columns) for m in found} == {(2, 5)} and covered([found], 0, 60) == [1] * 60
    found = matrices("w", experts, (3, 4, 5), 0, 2)
    assert {(m.rows, m.columns) for m in found[0]} == {(4, 5)} and all(m.joined for m in found[1])


def test_heads_must_be_described_over_the_whole_weight():
    with pytest.raises(ValueError, match="over the whole weight"):
        Split((("q", 2),), 2, "head", "local")


def test_replicated_parameters_belong_to_every_tensor_rank():
    found = matrices("w", whole(4), (4, 3), None, 2)
    assert [rank[0].parts[0].tensor_rank for rank in found] == [0, 1] and not found[0][0].joined


parameters = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["head", "whole", "columns"])),
    min_size=1,
    max_size=6,
)


@given(
    parameters,
    st.integers(1, 5),
    st.sampled_from([1, 2]),
    st.sampled_from(["balanced", "largest-piece"]),
    st.booleans(),
)
def test_plans(shapes, data_ranks, tensor_ranks, rule, sharded):
    """Pieces tile every matrix; every message has the same pieces on both sides; the traffic is 2 sum(n - own)."""
    found: list[list] = [[] for _ in range(tensor_ranks)]
    bounds: list[dict] = [{} for _ in range(tensor_ranks)]
    places, cursor = [], 0
    for index, (rows, columns, heads, kind) in enumerate(shapes):
        name, size = f"p{index}", rows * heads * columns
        split = Split((("h", rows),), heads * tensor_ranks, "head") if kind == "head" else whole(rows * heads)
        dim = {"head": 0, "whole": None, "columns": 1}[kind]
        for own, more in zip(found, matrices(name, split, (rows * heads, columns), dim, tensor_ranks), strict=True):
            own.extend(more)
        places.append((name, cursor, cursor + size))
        cursor += size + 3  # padding between parameters
    total = math.ceil(cursor / data_ranks) * data_ranks
    for per_rank in bounds:
        for name, start, stop in places:
            per_rank[name] = even_bounds(start, stop, 0, total, data_ranks)
            assert per_rank[name][0] == 0 and per_rank[name] == sorted(per_rank[name])
    assignments = assign(found, bounds if sharded else None, data_ranks, rule)
    grid = [Place(t, d) for t in range(tensor_ranks) for d in range(data_ranks)]
    plans = {place: view(assignments, place) for place in grid}

    for assignment in assignments:
        positions = sorted((p.start, p.stop) for p in assignment.sources)
        assert positions[0][0] == 0 and positions[-1][1] == assignment.matrix.size
        assert all(a[1] == b[0] for a, b in zip(positions, positions[1:], strict=False))
        assert assignment.owner in {p.holder for p in assignment.targets}
        if sharded:
            assert assignment.targets == assignment.sources
    for here, plan in plans.items():
        for peer in grid:
            other = plans[peer]
            assert plan.gather_sends.get(peer) == other.gather_receives.get(here)
            assert plan.return_sends.get(peer) == other.return_receives.get(here)
        received = [*plan.gather_receives.values(), *plan.return_receives.values()]
        assert plan.elements_received == sum(map(message_size, received))
    if sharded:
        own = {id(a): sum(p.size for p in a.sources if p.holder == a.owner) for a in assignments}
        expected = 2 * sum(a.matrix.size - own[id(a)] for a in assignments)
        assert sum(plan.elements_received for plan in plans.values()) == expected
    done = [a for plan in plans.values() for a in (*plan.local, *plan.owned)]
    assert sorted(map(id, done)) == sorted(map(id, assignments))
    # every element of every rank's parameter learns exactly one update
    for place in grid:
        for name, start, stop in places:
            pieces = sorted(
                (p.element, p.element + p.size)
                for a in assignments
                if a.matrix.parameter == name
                for p in a.targets
                if p.holder == place
            )
            held = (0, stop - start)
            if sharded:
                cuts = bounds[place.tensor_rank][name]
                held = cuts[place.data_rank], cuts[place.data_rank + 1]
            assert sum(b - a for a, b in pieces) == held[1] - held[0]
            assert all(a[1] <= b[0] for a, b in zip(pieces, pieces[1:], strict=False))


def test_at_most_one_matrix_less_than_ranks_is_cut_in_a_bucket():
    found = matrices("w", Split((("h", 4),), 100, "head"), (400, 8), None, 1)
    bounds = [{"w": even_bounds(0, 3200, 0, 3200, 7)}]
    assert sum(not a.local for a in assign(found, bounds, 7)) <= 6


def test_balanced_owners_spread_the_work_that_largest_pieces_pile_up():
    """Two ranks, each matrix cut in two thirds and one third, the larger piece always on rank 0."""
    found: list[list] = [[]]
    bounds: list[dict] = [{}]
    for index in range(6):
        found[0] += matrices(f"p{index}", whole(3), (3, 4), None, 1)[0]
        bounds[0][f"p{index}"] = [0, 8, 12]

    def load(rule):
        owners = [a.owner.data_rank for a in assign(found, bounds, 2, rule)]
        return [owners.count(rank) for rank in range(2)]

    assert load("largest-piece") == [6, 0]
    assert load("balanced") == [3, 3]


def test_balanced_owners_move_no_more_than_the_balance_needs():
    """Rank 0 has a large matrix of its own, so that ranks 1 and 2 may take what they hold most of."""
    found = [[*matrices("big", whole(30), (30, 40), None, 1)[0], *matrices("cut", whole(3), (3, 4), None, 1)[0]]]
    found[0] += matrices("after", whole(3), (3, 4), None, 1)[0]
    bounds = [{"big": [0, 1200, 1200, 1200], "cut": [0, 0, 9, 12], "after": [0, 0, 9, 12]}]
    owners = {a.matrix.parameter: a.owner.data_rank for a in assign(found, bounds, 3)}
    assert owners == {"big": 0, "cut": 1, "after": 1}


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=8),
    st.integers(1, 5),
)
def test_balanced_owners_against_largest_pieces(shapes, ranks):
    """The busiest rank never has more work than with the other rule; with the same work, no more elements travel."""
    found, bounds, cursor = [[]], [{}], 0
    total = math.ceil(sum(rows * columns for rows, columns in shapes) / ranks) * ranks
    for index, (rows, columns) in enumerate(shapes):
        found[0] += matrices(f"p{index}", whole(rows), (rows, columns), None, 1)[0]
        bounds[0][f"p{index}"] = even_bounds(cursor, cursor + rows * columns, 0, total, ranks)
        cursor += rows * columns

    def measured(rule):
        assignments = assign(found, bounds, ranks, rule)
        loads = [0] * ranks
        for a in assignments:
            loads[a.owner.data_rank] += a.matrix.cost
        travelling = sum(view(assignments, Place(0, rank)).elements_received for rank in range(ranks))
        assert least_busiest(assignments) <= max(loads)
        return max(loads), travelling

    assert measured("balanced") <= measured("largest-piece")


@pytest.mark.parametrize("bucket", [None, 30_000])
@pytest.mark.parametrize("rule", ["balanced", "largest-piece"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 32])
def test_every_rank_receives_what_megatrons_bucket_layout_says(ranks, rule, bucket):
    """Rank by rank and element by element, on the layout that Megatron computes for its distributed optimizer."""
    shapes = {f"{i}.{n}": s for i in range(3) for n, s in (("norm", (24,)), ("qkv", (96, 64)), ("fc", (160, 64)))}
    params = {name: torch.nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
    layout = DistributedOptimizer._compute_per_buffer_param_layout(
        list(params.values()), bucket, ranks, DistributedDataParallelConfig(use_distributed_optimizer=True)
    )
    found, bounds, held = [], {}, {}
    for name, (rows, *columns) in shapes.items():
        if not columns:
            continue
        start, stop, number = layout.param_index_map[params[name]]
        bounds[name] = even_bounds(start, stop, *layout.bucket_indices[number], ranks)
        heads = name.endswith("qkv")
        split = Split((("q", 8), ("q", 8), ("k", 8), ("v", 8)), 3, "head") if heads else whole(rows)
        found += matrices(name, split, (rows, 64), None, 1)[0]
        where = traffic.holders(start, stop, *layout.bucket_indices[number], ranks)
        height = 8 if heads else rows
        held |= {(name, at): where[at : at + height * 64] for at in range(0, rows * 64, height * 64)}
    assignments = assign([found], [bounds], ranks, rule)
    owners = {(a.matrix.parameter, a.sources[0].element): a.owner.data_rank for a in assignments}
    assert owners.keys() == held.keys()
    by_hand = [(held[key], owner) for key, owner in owners.items()]
    expected = traffic.received(by_hand, ranks)
    assert [view(assignments, Place(0, rank)).elements_received for rank in range(ranks)] == expected
    assert sum(expected) == traffic.formula(by_hand) > 0


def test_unknown_owner_rule():
    with pytest.raises(ValueError, match="no owner rule 'first'"):
        assign([[]], [{}], 1, "first")


def one(name, rows, columns):
    ((matrix,),) = matrices(name, whole(rows), (rows, columns), None, 1)
    return matrix


def test_work_is_counted_in_multiplications_of_the_smaller_side():
    """X X^T and its product with X, and the square, for the 8 x 32 matrix or its transpose: 2 * 8 * 8 * 32 + 8^3."""
    assert one("wide", 8, 32).cost == one("tall", 32, 8).cost == 2 * 8 * 8 * 32 + 8**3


def test_owners_balance_work_and_not_the_number_of_matrices():
    """One matrix of 12,288 multiplications against three of 192: it keeps a rank for itself."""
    found = [[one("large", 16, 16), *(one(f"small {i}", 4, 4) for i in range(3))]]
    owners = {a.matrix.parameter: a.owner.data_rank for a in assign(found, None, 2, "balanced")}
    large = owners.pop("large")
    assert set(owners.values()) == {1 - large}
