"""Training programs as child processes: output in a log file, nothing left behind when the parent is ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from k3_plugins import child_process

DOOR = "k3_plugins.pretrain_gpt"


def door(nproc: int) -> list[str]:
    """The words after ``python`` that start the training program on this many ranks of this machine."""
    if nproc == 1:
        return ["-m", DOOR]
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), "-m", DOOR]


def run(words: Sequence[str], log: Path) -> int:
    """``python WORDS`` with its output in ``log``; the exit code."""
    with open(log, "w") as file:
        return child_process.run([sys.executable, *words], stdout=file, stderr=subprocess.STDOUT).returncode


def tail(log: Path) -> str:
    """Why a run ended: its own error sentences, or the end of the log."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("k3_plugins: error:")]
    return "\n".join(errors[:3] or lines[-15:])
