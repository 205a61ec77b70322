"""A rank that is killed in the middle of a save: the job ends at once, and the checkpoint before stays loadable."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from tests.harness.forkserver import ROOT
from tests.harness.launch import launch
from tests.harness.losses import first_difference, read
from tests.harness.stock_flags import TARGET, stock

FLAGS = [*stock("--use-distributed-optimizer"), "--train-iters", "6", "--save-interval", "2"]
SETUP = "tests.distributed.platform.test_kill:die_in_second_save"
# The promise is 60 s; a dead connection is noticed at once, and what remains is a slow machine.
LIMIT_S = 60


def die_in_second_save():
    """Runs in each rank: at step 4, rank K3_KILL_RANK kills itself at the point K3_KILL_POINT of the save."""
    rank, point = os.environ["K3_KILL_RANK"], os.environ["K3_KILL_POINT"]
    if os.environ["RANK"] != rank:
        return

    def die_instead(original):
        def killed(*args, **kwargs):
            from megatron.training import get_args

            if get_args().curr_iteration >= 3:
                print("killed at", time.time(), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return killed

    if point == "writing the data":
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync as Writer

        Writer.write_preloaded_data = staticmethod(die_instead(Writer.write_preloaded_data))
    elif point == "after the data":
        from megatron.core.dist_checkpointing import serialization

        serialization.save_config = die_instead(serialization.save_config)
    elif point == "writing the tracker":
        from k3_plugins.platform.cpu import checkpoint_tracker

        # Written, not yet in its place. The data files are synchronised by the real os.
        checkpoint_tracker.os = SimpleNamespace(**{**vars(os), "fsync": die_instead(os.fsync)})
    else:
        assert point == "before the tracker"
        from megatron.training import checkpointing

        checkpointing.get_checkpoint_tracker_filename = die_instead(checkpointing.get_checkpoint_tracker_filename)


def environment(rank, point):
    return {"K3_TEST_SETUP": SETUP, "K3_KILL_RANK": str(rank), "K3_KILL_POINT": point}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return read(launch(TARGET, FLAGS[:-2], nprocs=2, records=tmp_path_factory.mktemp("whole"), digest=True).records)


def resume(checkpoint, uninterrupted, records):
    """Start again in the same folder, over the half-written checkpoint, and train to the end."""
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (checkpoint / "iter_0000004").is_dir(), "the save was not under way"
    flags = [*FLAGS, "--load", checkpoint, "--save", checkpoint]
    steps = read(launch(TARGET, flags, nprocs=2, records=records, digest=True).records)
    assert min(steps) == 3
    assert first_difference(steps, {i: s for i, s in uninterrupted.items() if i >= 3}) is None
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "6"


def test_under_torchrun(tmp_path, uninterrupted):
    """As a user runs it, with the output piped into another program, which ends only when every writer has."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", TARGET]
    command += [*FLAGS, "--save", str(tmp_path / "checkpoint")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment(1, "writing the data")}
    env["K3_TEST_WITHOUT"] = "modelopt,fla,transformers"
    with log.open("w") as f:
        job = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        cat = subprocess.Popen(["cat"], stdin=job.stdout, stdout=f)
        job.stdout.close()
        try:
            cat.wait(timeout=400)
            ended = time.time()
            assert job.wait(timeout=10) != 0
        finally:
            for process in [*psutil.Process(job.pid).children(recursive=True), job] if job.poll() is None else []:
                process.kill()
    text = log.read_text()
    killed = float(text.split("killed at ")[1].split()[0])
    assert ended - killed < LIMIT_S
    assert "Signal 9 (SIGKILL) received" in text
    assert "exitcode  : -9" in text
    resume(tmp_path / "checkpoint", uninterrupted, tmp_path / "records")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (1, "writing the data"),
        (0, "writing the data"),
        (0, "after the data"),
        (0, "before the tracker"),
        (0, "writing the tracker"),
    ],
)
def test_without_torchrun(tmp_path, uninterrupted, rank, point):
    """Nobody ends the other rank: it must find out by itself, and say so."""
    checkpoint = tmp_path / "checkpoint"
    flags = [*FLAGS, "--save", checkpoint]
    job = launch(TARGET, flags, nprocs=2, env=environment(rank, point), check=False)
    assert job.rc == 1, job.tail()  # the survivor's own exit code, not the server's kill after its grace
    assert "killed at" in job.logs[rank]
    if point == "writing the tracker":
        assert list(checkpoint.glob("latest_checkpointed_iteration.txt.*.tmp")), "killed too early or too late"
    assert "Connection closed by peer" in job.logs[1 - rank] or "Connection reset by peer" in job.logs[1 - rank]
    resume(checkpoint, uninterrupted, tmp_path / "records")
