"""Loops that numba compiles, with and without it."""

import logging

import pytest

from k3_plugins.compat import compiled, optional


@pytest.fixture
def numba(monkeypatch):
    """numba(error): what importing it raises; everything is asked anew, as in another process."""

    def numba(error):
        def importing(name):
            raise error

        monkeypatch.setattr(optional.importlib, "import_module", importing)
        monkeypatch.setattr(compiled, "probe", optional.probe.__wrapped__)
        compiled._numba.cache_clear()

    yield numba
    compiled._numba.cache_clear()


def test_a_broken_numba_is_named_once_and_the_loops_run_as_they_are(numba, caplog):
    # what numba raises under a NumPy that is too new, and where its compiler's library is missing
    for error in (ImportError("Numba needs NumPy 2.4 or less"), OSError("libllvmlite.so: cannot open")):
        numba(error)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert compiled.compiled(max) is max and compiled.compiled(min) is min
        (text,) = caplog.messages
        assert f"numba is installed but broken ({type(error).__name__}: {error})" in text
        assert "pip install numba==" in text


def test_the_planners_are_compiled_where_numba_works():
    pytest.importorskip("numba")
    from k3_plugins.pipeline_parallel.vision_bubble import paths
    from k3_plugins.transformer.moe.moonep import planner_core

    assert hasattr(paths.insert, "py_func") and hasattr(planner_core.fill, "py_func")
