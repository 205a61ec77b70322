"""Which blocks a hop carries: closed forms, hand-made cases, and a model of the ranks that holds sets of blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_plugins.pipeline_parallel.attnres_payload.plan import PipelinePlan, cached_blocks, naive_blocks


def test_rows_of_a_small_layout():
    # P 4, V 2, one layer a chunk, 3 layers a block; counted by hand and measured in an independent experiment
    layout = (4, (1,) * 8, 3)
    assert PipelinePlan(*layout, "off").rows_per_hop() == [2, 2, 2, 3, 3, 3, 4]
    assert PipelinePlan(*layout, "on").rows_per_hop() == [2, 2, 2, 2, 2, 1, 2]


@pytest.mark.parametrize(("p", "v", "n"), [(4, 4, 8), (16, 4, 8), (2, 2, 1), (2, 4, 3), (8, 1, 2), (3, 5, 2)])
@pytest.mark.parametrize("block_size", [1, 3])
def test_totals_equal_the_papers_formulas(p, v, n, block_size):
    """n whole blocks per chunk. The embedding is not in the formulas: a row a hop, or (cached) in the first round."""
    layers = (n * block_size,) * (p * v)
    chunks = p * v
    assert sum(PipelinePlan(p, layers, block_size, "off").rows_per_hop()) == naive_blocks(chunks, n) + chunks - 1
    assert sum(PipelinePlan(p, layers, block_size, "received").rows_per_hop()) == cached_blocks(p, v, n) + p - 1
    # a rank that also keeps what it computed saves its own n blocks in every later round
    own = (v - 1) * p * n
    assert sum(PipelinePlan(p, layers, block_size, "on").rows_per_hop()) == cached_blocks(p, v, n) + p - 1 - own


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_every_chunk_can_assemble_what_it_needs(data):
    """Play the plan with sets: nobody sends what it lacks, and every chunk ends up with all finished blocks."""
    size = data.draw(st.integers(2, 4))
    chunks = size * data.draw(st.integers(1, 4))
    layers = tuple(data.draw(st.lists(st.integers(0, 3), min_size=chunks, max_size=chunks)))
    block_size = data.draw(st.integers(1, 5))
    cache = data.draw(st.sampled_from(["on", "received", "off"]))
    output = data.draw(st.one_of(st.none(), st.integers(0, chunks - 1)))
    plan = PipelinePlan(size, layers, block_size, cache, output)

    def finished(count):  # straight from the definition of a block, one layer at a time
        ids = {0}
        for layer in range(1, count + 1):
            if layer % block_size == 0:
                ids.add(layer // block_size)
        return ids

    kept = [set() for _ in range(size)]
    has = {0}
    for chunk in range(chunks):
        rank = plan.rank(chunk)
        if chunk:
            hop = plan.hop(chunk - 1)
            assert set(hop.block_ids) <= has, "a chunk sends a block it does not have"
            assert hop.rows >= 1
            arrived = set(hop.block_ids)
            if plan.past_output(chunk - 1):
                assert hop.rows == 1
                continue
            from_cache = set(plan.cached_for(chunk))
            assert from_cache <= kept[rank], "a chunk reads a block that its rank does not keep"
            assert not from_cache & arrived, "a block is sent although the rank keeps it"
            has = arrived | from_cache
            assert plan.kept_on_arrival(chunk) <= hop.finished_ids
            before = plan.layers_before(chunk)
            needed = finished(before) - ({before // block_size} if before % block_size == 0 else set())
            assert has == needed
            kept[rank] |= plan.kept_on_arrival(chunk)
        computed = finished(plan.layers_through(chunk))
        assert plan.kept_at_end(chunk) <= computed
        if chunk < chunks - 1 and not plan.past_output(chunk):
            assert plan.kept_at_end(chunk) <= set(plan.hop(chunk).row_ids), "its deposits would have no way back"
        kept[rank] |= plan.kept_at_end(chunk)
        has = has | computed


def test_cache_off_keeps_nothing_and_one_virtual_stage_needs_no_cache():
    for plan in (PipelinePlan(2, (2,) * 4, 2, "off"), PipelinePlan(4, (2,) * 4, 2, "on")):
        assert not any(plan.kept_on_arrival(chunk) | plan.kept_at_end(chunk) for chunk in range(4))


def test_hops_after_the_output_carry_one_row():
    plan = PipelinePlan(2, (2, 2, 0, 0), 2, "on", output_chunk=1)
    assert [plan.hop(chunk).row_ids for chunk in range(3)] == [(0, 1), (-1,), (-1,)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, (1, 1, 1), 2), "cannot be placed"), ((2, (1, -1), 2), "negative"), ((2, (1, 1), 0), "positive")],
)
def test_impossible_layouts(arguments, message):
    with pytest.raises(ValueError, match=message):
        PipelinePlan(*arguments)
