"""Settings for the whole test suite: determinism, and the visible count of tests that need a GPU.

``pythonpath = .`` in pytest.ini puts the repository on ``sys.path``, so that tests import helpers as ``tests.harness``.
"""

import ctypes
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and cuda_device_count() == 0:
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    # The outermost wrapper: the count stands below every other summary, beside the verdict.
    yield
    skipped = sum(NO_GPU in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(f"gpu: {skipped} tests NOT run: {NO_GPU}", yellow=True)
