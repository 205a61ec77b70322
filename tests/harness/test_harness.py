"""The harness itself: a failing, hanging or killed rank is an error with its output, within the time limit."""

import os
import signal
import sys
import time

import psutil
import pytest

from tests.harness.launch import LaunchError, launch
from tests.harness.losses import logged_losses
from tests.harness.spawn import spawn


def add(rank, world_size, value):
    import torch

    total = torch.tensor(float(value + rank))
    torch.distributed.all_reduce(total)
    return {"rank": rank, "total": total.item()}


def fail_on_rank_1(rank, world_size):
    if rank == 1:
        raise ValueError("the third layer is wrong")
    import torch

    torch.distributed.barrier()


def hang(rank, world_size, path):
    import subprocess

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(f"{path}/{rank}", "w") as f:
        f.write(f"{os.getpid()} {child.pid}")
    print("waiting for something", flush=True)
    time.sleep(600)


def orphan(rank, world_size, path):
    import multiprocessing

    manager = multiprocessing.get_context("fork").Manager()
    with open(path, "w") as f:
        f.write(str(manager._process.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def gone(pid):
    """Within 10 s: the kernel ends it, and its parent collects it, in their own time."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_results_come_back_by_rank():
    assert spawn(add, 2, 5) == [{"rank": 0, "total": 11.0}, {"rank": 1, "total": 11.0}]
    assert spawn(add, 1, 2) == [{"rank": 0, "total": 2.0}]


def test_a_failing_rank():
    with pytest.raises(LaunchError, match="ValueError: the third layer is wrong"):
        spawn(fail_on_rank_1, 2)


def test_a_hanging_rank_and_its_children_are_killed(tmp_path):
    with pytest.raises(LaunchError, match=r"(?s)time limit reached.*waiting for something"):
        spawn(hang, 2, str(tmp_path), timeout=6)
    for rank in range(2):
        for pid in (tmp_path / str(rank)).read_text().split():
            assert gone(int(pid))
    assert spawn(add, 1, 0)[0]["total"] == 0.0  # the server goes on


def test_helper_processes_end_with_a_killed_rank(tmp_path):
    """Megatron's checkpoint writer has such a helper; one that stays keeps the job's output open for ever."""
    with pytest.raises(LaunchError, match="rc -9"):
        spawn(orphan, 1, str(tmp_path / "pid"))
    assert gone(int((tmp_path / "pid").read_text()))


def test_spawn_refuses_what_it_cannot_find_again():
    def inner(rank, world_size):
        pass

    with pytest.raises(ValueError, match="top level"):
        spawn(inner, 1)


SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.environ["EXTRA"])
sys.exit(3 if os.environ["RANK"] == sys.argv[1] else 0)
"""


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_launch_a_script(tmp_path, torchrun):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    good = launch(script, ["-1", "x"], nprocs=2, env={"EXTRA": "yes"}, torchrun=torchrun)
    assert good.rc == 0
    assert [log.strip() for log in good.logs] == [f"rank {r} of 2 ['-1', 'x'] yes" for r in range(2)]
    bad = launch(script, [1], nprocs=2, env={"EXTRA": "yes"}, torchrun=torchrun, check=False)
    assert bad.rc == (1 if torchrun else 3)
    with pytest.raises(LaunchError, match="rank 1 of 2"):
        launch(script, [1], nprocs=2, env={"EXTRA": "yes"}, torchrun=torchrun)


def test_log_lines():
    log = """
 [2026-01-02 10:00:00.1] iteration        1/       5 | consumed samples: 8 | lm loss: 5.571881E+00 | loss scale: 1.0 |
 [2026-01-02 10:00:01.1] iteration       12/      50 | consumed samples: 96 | lm loss: 4.2E-01 | grad norm: 1.1 |
"""
    assert logged_losses(log) == {1: 5.571881, 12: 0.42}
