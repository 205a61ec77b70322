"""Settings for the whole test suite: determinism, and the visible count of tests that need what a machine lacks.

``pythonpath = .`` in pytest.ini puts the repository on ``sys.path``, so that tests import helpers as ``tests.harness``.
"""

import ctypes
import ctypes.util
import importlib.util
import os
from collections.abc import Generator

import hypothesis
import pytest

# Before anything imports torch: several processes share few cores, and one thread adds numbers in one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every run and machine; slow machines are not failures.
hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("deterministic")

NO_GPU = "needs a CUDA device, and there is none"
NO_LIBRARY = "needs the system library libibverbs, and it is missing (Debian, Ubuntu: apt-get install libibverbs1)"
NO_PACKAGE = "needs mooncake, and it is missing (pip install mooncake-transfer-engine-non-cuda==0.3.13.post1)"


def cuda_device_count() -> int:
    """Devices that the CUDA driver sees. torch is not asked: the CPU platform makes it say that there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def missing_for_mooncake() -> str | None:
    """What remote activations need and this machine lacks."""
    if ctypes.util.find_library("ibverbs") is None:
        return NO_LIBRARY
    return None if importlib.util.find_spec("mooncake") else NO_PACKAGE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = (("gpu", None if cuda_device_count() else NO_GPU), ("mooncake", missing_for_mooncake()))
    for marker, reason in needs:
        if reason is not None:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    # The outermost wrapper: the count stands below every other summary, beside the verdict.
    yield
    reports = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for kind, reason in (("gpu", NO_GPU), ("mooncake", NO_LIBRARY), ("mooncake", NO_PACKAGE)):
        skipped = sum(reason in text for text in reports)
        if skipped:
            terminalreporter.write_line(f"{kind}: {skipped} tests NOT run: {reason}", yellow=True)
