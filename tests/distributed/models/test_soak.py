"""Random kills and resumes with everything on; ``python -m tests.soak --minutes 30`` is the long form."""

import random
import subprocess
import sys
import time

import psutil
import pytest

from tests.soak import SAVE_EVERY, Soak, end, kill_one, ranks, soak


@pytest.mark.slow
def test_kills_lose_nothing_behind_the_last_checkpoint(tmp_path):
    result = soak(tmp_path, steps=14, minutes=10, most_kills=2)
    assert result.kills == 2 and result.starts == 3 and result.steps == 14
    assert result.lost == [] and result.first_difference is None
    assert all(step % SAVE_EVERY == 0 for step in result.resumed_from)


def test_a_test_without_a_kill_does_not_pass():
    nothing = Soak(kills=0, starts=1, resumed_from=[], steps=200, first_difference=None, lost=[])
    assert ["no rank was killed" in fault for fault in nothing.faults()] == [True]
    assert Soak(1, 2, [5], 200, None, []).faults() == []
    assert Soak(1, 2, [5], 200, "step 7", ["start 2"]).faults() == ["start 2", "the undisturbed run: step 7"]


def test_a_rank_that_ended_by_itself_was_not_killed():
    process = subprocess.Popen([sys.executable, "-c", ""])
    victim = psutil.Process(process.pid)
    process.wait()
    assert not kill_one([victim], random.Random(0)) and not kill_one([], random.Random(0))


def test_neither_launcher_nor_ranks_are_left():
    start = "import subprocess, time; subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(60)"
    launcher = subprocess.Popen([sys.executable, "-c", start])
    while not (children := ranks(launcher)):
        time.sleep(0.01)
    end(launcher)
    assert launcher.poll() is not None
    assert psutil.wait_procs(children, timeout=5)[1] == []
    end(launcher)  # nothing left to do
