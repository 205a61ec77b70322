"""Whether processes that a test did not start itself have ended."""

import time
from collections.abc import Callable
from pathlib import Path


def ended(pid: int) -> bool:
    """A process that is gone, or that nobody has waited for yet."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def waits(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Until the condition holds; AssertionError if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
