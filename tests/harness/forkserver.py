"""Start ranks by fork from one process that has imported torch and Megatron already.

A fresh rank spends 10 to 20 CPU seconds in imports, more than most tests compute. The server pays that once for a
test session; a rank is then a fork, ready in milliseconds, that shares the imported pages. It has run nothing but
imports, so a rank begins as a fresh process does after its imports, with the CPU platform installed.

Tests use `tests.harness.launch` and `tests.harness.spawn`, not this module. Protocol: one JSON job a line on stdin,
one JSON answer a line on stdout; end of input ends the server, and its end kills the ranks.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What every training run imports in the end, some of it only when it gets there.
_PRELOAD = (
    "megatron.training",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.text",
    "multiprocessing.managers",
)
_START_LIMIT_S = 600  # imports take 15 CPU seconds; a machine that is shared by many jobs gives them slowly
_GRACE_S = 10  # after the first rank failed: time for the others to report what they saw


class ForkServer:
    """The client side: starts the server on first use and sends it jobs, one at a time."""

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._output = None  # what the imports print; shown only if the server fails

    def run(self, job: dict, timeout: float) -> dict:
        """Run one job; see `_serve` for its fields. Returns {"exit_codes": [...], "timed_out": bool}."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._process.stdin.write(json.dumps({**job, "timeout": timeout}) + "\n")
        self._process.stdin.flush()
        return self._answer(timeout + _GRACE_S + 30)

    def _start(self) -> None:
        self._output = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.forkserver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        atexit.register(self.stop)
        self._answer(_START_LIMIT_S)

    def _answer(self, limit: float) -> dict:
        ready, _, _ = select.select([self._process.stdout], [], [], limit)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.stop()
            self._output.seek(0)
            raise RuntimeError(f"the fork server gave no answer within {limit:.0f} s:\n{self._output.read()[-4000:]}")
        return json.loads(line)

    def stop(self) -> None:
        """End the server; its ranks die with it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


server = ForkServer()


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve() -> None:
    """Import, then answer jobs: {"nprocs", "call": [module, function, *arguments], "logs": [path], "env", "cwd"}."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print must not mix with the answers

    from k3_plugins import platform

    platform.select("cpu")
    for module in _PRELOAD:
        importlib.import_module(module)
    _remember_docstrings()

    answers.write(json.dumps({"ready": os.getpid()}) + "\n")
    for line in sys.stdin:
        job = json.loads(line)
        answers.write(json.dumps(_run(job)) + "\n")


def _remember_docstrings() -> None:
    """Megatron reads the --help of each configuration class from its source, twice a run: over a second of parsing.

    The answer depends on the class alone, so the server takes it once and the ranks inherit it.
    """
    from megatron.training import argument_utils, arguments

    factory = argument_utils.ArgumentGroupFactory
    read = factory._get_field_docstrings
    remembered: dict[type, dict[str, str]] = {}

    def field_docstrings(self, config_class: type) -> dict[str, str]:
        if config_class not in remembered:
            remembered[config_class] = read(self, config_class)
        return dict(remembered[config_class])

    factory._get_field_docstrings = field_docstrings
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _run(job: dict) -> dict:
    port = free_port()
    ranks = {}
    for rank in range(job["nprocs"]):
        pid = os.fork()
        if pid == 0:
            _rank(job, rank, port)
        ranks[pid] = rank
    exit_codes: list[int | None] = [None] * job["nprocs"]
    deadline = time.monotonic() + job["timeout"]
    timed_out = False
    while any(code is None for code in exit_codes):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            if pid in ranks:
                code = os.waitstatus_to_exitcode(status)
                exit_codes[ranks[pid]] = code
                if code:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            continue
        if time.monotonic() > deadline:
            timed_out = timed_out or not any(exit_codes)
            for pid, rank in ranks.items():
                if exit_codes[rank] is None:
                    os.killpg(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.01)
    return {"exit_codes": exit_codes, "timed_out": timed_out}


def _rank(job: dict, rank: int, port: int) -> None:
    """The body of one forked rank. Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)  # so that its own workers can be killed with it
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        log = os.open(job["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(job["nprocs"]),
            LOCAL_WORLD_SIZE=str(job["nprocs"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            **job["env"],
        )
        os.chdir(job["cwd"])
        module, function, *arguments = job["call"]
        getattr(__import__(module, fromlist=[function]), function)(*arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the forked stack is the server's loop.
        os._exit(code)


if __name__ == "__main__":
    _serve()
