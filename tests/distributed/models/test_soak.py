"""Random kills and resumes with everything on; ``python -m tests.soak --minutes 30`` is the long form."""

import pytest

from tests.soak import SAVE_EVERY, soak


@pytest.mark.slow
def test_kills_lose_nothing_behind_the_last_checkpoint(tmp_path):
    result = soak(tmp_path, steps=14, minutes=10, most_kills=2)
    assert result.kills == 2 and result.starts == 3 and result.steps == 14
    assert result.lost == [] and result.first_difference is None
    assert all(step % SAVE_EVERY == 0 for step in result.resumed_from)
