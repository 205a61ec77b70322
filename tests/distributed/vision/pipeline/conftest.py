"""One checkpoint for all tests of this folder, and every run from it once."""

import pytest

from tests.distributed.vision.pipeline.uneven_runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("uneven"))
