"""A child process does not outlive its parent, nor do the processes that it started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from k3_plugins import child_process
from tests.harness.processes import ended, waits

ROOT = Path(__file__).parents[2]

LAUNCHER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: (rank.terminate(), rank.wait(), sys.exit(1)))
rank = subprocess.Popen(["sleep", "600"], start_new_session=True)
worker = subprocess.Popen(["sleep", "600"])
print(rank.pid, worker.pid, flush=True)
time.sleep(600)
"""
"""As torchrun does: a rank in a session of its own, ended on SIGTERM. The worker stays in the launcher's session."""


def started(log):
    """The processes that the launcher has told of."""
    waits(lambda: log.exists() and log.read_text().endswith("\n"))
    return [int(word) for word in log.read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_the_parent_ends_the_recipes_training(number, tmp_path):
    log = tmp_path / "log.txt"
    call = f"process.run(['-c', {LAUNCHER!r}], pathlib.Path({str(log)!r}))"
    source = f"import pathlib\nfrom k3_plugins.recipes import process\n{call}"
    parent = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, stderr=subprocess.DEVNULL)
    pids = started(log)
    parent.send_signal(number)
    assert parent.wait(20) == (-number if number == signal.SIGINT else 128 + number)
    for pid in pids:
        waits(lambda pid=pid: ended(pid))


def test_a_time_limit_ends_what_takes_no_notice_of_sigterm(tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "GRACE", 0.2)
    deaf = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    source = f"{deaf}; print(os.getpid(), flush=True); time.sleep(600)"
    log = tmp_path / "log.txt"
    with open(log, "w") as file, pytest.raises(subprocess.TimeoutExpired):
        child_process.run([sys.executable, "-c", source], timeout=2, stdout=file)
    (pid,) = started(log)
    assert ended(pid)


@pytest.fixture
def as_started():
    """Signals as in a new process; other tests may have left handlers here."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_output_code_and_handlers_are_the_callers(as_started):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    done = child_process.run([sys.executable, "-c", "print('said'); exit(3)"], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (3, "said\n")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_signal_while_the_child_is_started_waits_until_the_child_is_known(as_started, monkeypatch):
    begun = []

    def start(*words, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        begun.append(subprocess_popen(*words, **options))
        return begun[0]

    subprocess_popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(SystemExit) as error:
        child_process.run(["sleep", "600"])
    assert error.value.code == 128 + signal.SIGTERM and begun[0].returncode == -signal.SIGTERM
