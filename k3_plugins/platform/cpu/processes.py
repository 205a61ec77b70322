"""Child processes of a rank end with the rank.

Megatron's checkpoint writer starts a multiprocessing manager, which waits for requests for ever. If the rank is killed,
the manager stays, holds the job's standard output open, and `torchrun ... | tee log` never returns although the job is
dead. The kernel can end a child together with its parent; other systems than Linux cannot.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import util

_PR_SET_PDEATHSIG = 1
_forked_by_main_thread = True


def install() -> None:
    """Arrange that children forked by `multiprocessing` receive SIGKILL when this process ends, however it ends."""
    if sys.platform != "linux":
        return
    os.register_at_fork(before=_note_thread)
    util.register_after_fork(sys.modules[__name__], _die_with_parent)


def _note_thread() -> None:
    global _forked_by_main_thread
    _forked_by_main_thread = threading.current_thread() is threading.main_thread()


def _die_with_parent(_: object) -> None:
    # The kernel watches the thread that forked, not its process: a child of a short-lived helper thread would be
    # killed too early. Megatron forks from the main thread.
    parent = multiprocessing.parent_process()
    if not _forked_by_main_thread or parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it ended before the call
        os._exit(1)
