"""Parts of a lease: never two at the same place, everything comes back, and a full one says so."""

from hypothesis import given
from hypothesis import strategies as st

from k3_plugins.memory.remote.region import ALIGNMENT, Region


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=60))
def test_parts_do_not_overlap(steps):
    region, taken = Region(2048), {}
    for give_back, value in steps:
        if give_back and taken:
            start = sorted(taken)[value % len(taken)]
            del taken[start]
            region.give_back(start)
        elif (start := region.take(value)) is not None:
            size = max(value, 1)
            assert start % ALIGNMENT == 0 and start + size <= 2048
            assert all(start + size <= other or other + length <= start for other, length in taken.items())
            taken[start] = size
        assert region.used >= sum(taken.values())
    for start in list(taken):
        region.give_back(start)
    assert region.used == 0 and region.take(2048) == 0 and region.take(1) is None
