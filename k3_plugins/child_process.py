"""A child process in a session of its own that does not outlive its parent. Imports neither torch nor megatron.

The session keeps a whole run (ranks, data workers) in one process group, apart from the parent's terminal; the parent
must then pass its own end on. torchrun starts its ranks in sessions of their own: they end when it is asked to, not
when it is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

GRACE = 40.0
"""Seconds between SIGTERM and SIGKILL; torchrun gives its ranks 30."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(words: Sequence[str], *, timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run`` for a program that starts others: nothing of it is left, however this call ends.

    SIGTERM and SIGHUP, which would end this process on the spot, become ``SystemExit(128 + number)`` meanwhile; a
    handler of the caller's and a signal that is ignored stay as they are.

    Args:
        timeout: seconds.
        options: of ``subprocess.Popen``.

    Raises:
        subprocess.TimeoutExpired: the program was ended after ``timeout``.
    """
    noted: list[int] = []
    raising = False

    def leave(number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal raising
        noted.append(number)
        if raising:  # not before the child is known, and not while it is being ended
            raising = False
            leave(number)

    replaced = {}
    with suppress(ValueError):  # outside the main thread Python sets no handlers
        for number in _ENDING:
            if (before := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, handler)
                replaced[number] = before
    try:
        process = subprocess.Popen(words, start_new_session=True, **options)
        try:
            try:
                raising = True
                if noted:
                    leave(noted[0])
                output, errors = process.communicate(timeout=timeout)
            finally:
                raising = False
        finally:
            _end(process)
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)
    if noted:
        leave(noted[0])
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def _end(process: subprocess.Popen[Any]) -> None:
    """End what still runs of it."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):  # the rest of its group, or nothing
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()  # not read to its end: whoever left the session may still hold it
