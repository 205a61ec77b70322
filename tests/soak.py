"""A training job whose ranks are killed at random and that is started again, against the same job left alone.

    python -m tests.soak --minutes 30 [--steps 200] [--seed 0] [--folder DIR]

The job has the whole preset k3 on four processes (PP 2, VPP 2, EP 2, text and images), as `tests.distributed.models.
test_everything`, saves every few steps, and is started by torchrun as a user does. A kill is SIGKILL to one rank at a
random moment, in the middle of a save too. After every start the first step must be the one behind the last complete
checkpoint, and at the end every step's loss and gradient norm must have the bits of the undisturbed run. Killing ends
with the minutes, or with the job if that comes first: give it steps enough. A start that fails by itself ends the test,
and a test in which nothing was killed has shown nothing and does not pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.distributed.models import test_everything
from tests.harness import losses
from tests.harness.forkserver import ROOT
from tests.harness.k3_model import CPU

SAVE_EVERY = 5
TRACKER = "latest_checkpointed_iteration.txt"
# What is chosen by timing would be chosen anew after every start, and sums would be taken in another order.
FIXED = "--vision-bubble-times 1,2,1,2 --attn-res-two-phase off"


@dataclass
class Soak:
    """What happened."""

    kills: int
    starts: int
    resumed_from: list[int]
    """The last complete checkpoint at every start but the first."""
    steps: int
    first_difference: str | None
    """From the undisturbed run; None if every step has the same bits."""
    lost: list[str]
    """Starts that did not go on behind the last complete checkpoint."""

    def faults(self) -> list[str]:
        """Why the test did not pass; empty if it did."""
        faults = [*self.lost]
        if not self.kills:
            faults.append("no rank was killed: give the job more --steps or the kills more --minutes")
        if self.first_difference:
            faults.append(f"the undisturbed run: {self.first_difference}")
        return faults


class Job:
    """The training job in a folder of its own."""

    def __init__(self, folder: Path, data: Sequence[str], steps: int) -> None:
        self.folder, self.records = folder, folder / "records"
        checkpoints = folder / "checkpoints"
        self.tracker = checkpoints / TRACKER
        words = [*CPU, *test_everything.COMMON, *data, *test_everything.EVERYTHING.split(), test_everything.POLICY]
        saving = f"--save {checkpoints} --load {checkpoints} --save-interval {SAVE_EVERY} --k3-allow-empty-load"
        words += [*FIXED.split(), *saving.split(), "--train-iters", str(steps), "--eval-iters", "0"]
        self.command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m",
                        "tests.harness.recorded", str(self.records), test_everything.DOOR, *words]  # fmt: skip
        self.starts = 0

    def start(self) -> subprocess.Popen:
        """The launcher's process; its output goes into a log of its own."""
        self.starts += 1
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        with (self.folder / f"start{self.starts}.log").open("w") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)

    def saved(self) -> int:
        """The last complete checkpoint."""
        return int(self.tracker.read_text()) if self.tracker.exists() else 0

    def steps(self) -> list[int]:
        """Iterations in the order in which rank 0 recorded them, repeated ones too."""
        file = self.records / "rank0.jsonl"
        if not file.exists():
            return []
        # a kill may have cut the last line
        return [json.loads(line)["iteration"] for line in file.read_text().splitlines() if line.endswith("}")]


def ranks(launcher: subprocess.Popen) -> list[psutil.Process]:
    """The training processes."""
    try:
        return psutil.Process(launcher.pid).children()
    except psutil.NoSuchProcess:
        return []


def kill_one(victims: Sequence[psutil.Process], draw: random.Random) -> bool:
    """SIGKILL to one of the processes; False if there is none or it has ended by itself."""
    if not victims:
        return False
    try:
        victims[draw.randrange(len(victims))].send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    return True


def end(launcher: subprocess.Popen) -> None:
    """Leave neither the launcher nor a rank behind, however the test ends."""
    if launcher.poll() is None:
        for process in [*ranks(launcher), launcher]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.wait()


def soak(folder: Path, steps: int, minutes: float, most_kills: int | None = None, seed: int = 0) -> Soak:
    """Run the disturbed job for so many minutes of kills and then to its end, and the undisturbed one."""
    draw = random.Random(seed)
    data = test_everything.make_data(folder / "data")
    (folder / "disturbed").mkdir()
    (folder / "left_alone").mkdir()
    job = Job(folder / "disturbed", data, steps)
    kills, resumed, lost, until = 0, [], [], time.monotonic() + 60 * minutes
    while True:
        before, saved = len(job.steps()), job.saved()
        if job.starts:
            resumed.append(saved)
        launcher = job.start()
        killing = time.monotonic() < until and (most_kills is None or kills < most_kills)
        # wait for the first step of this start, then for a random time that may end inside a save
        wanted, killed = draw.uniform(0, 1.5 * SAVE_EVERY), False
        try:
            while launcher.poll() is None:
                time.sleep(0.05)
                if killing and len(job.steps()) - before >= wanted:
                    time.sleep(draw.uniform(0, 1))
                    killed = kill_one(ranks(launcher), draw)
                    break
            code = launcher.wait()
        finally:
            end(launcher)
        kills += killed and code != 0  # a signal that came behind the last step has killed nothing
        fresh = job.steps()[before:]
        if fresh and fresh[0] != saved + 1:
            lost.append(f"start {job.starts} began with step {fresh[0]}, the checkpoint was {saved}")
        if job.saved() < saved:
            lost.append(f"start {job.starts} lost the checkpoint of step {saved}")
        if code == 0:
            break
        if not killed:
            raise RuntimeError(f"start {job.starts} ended with {code} without a kill: see {job.folder}")
    alone = Job(folder / "left_alone", data, steps)
    launcher = alone.start()
    try:
        code = launcher.wait()
    finally:
        end(launcher)
    if code:
        raise RuntimeError(f"the undisturbed run ended with {code}: see {alone.folder}")
    ours, theirs = losses.read(job.records), losses.read(alone.records)
    return Soak(kills, job.starts, resumed, len(theirs), losses.first_difference(ours, theirs), lost)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if ranks were killed and nothing was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="time in which ranks are killed (default 30)")
    parser.add_argument("--steps", type=int, default=200, help="steps of the job (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="an empty or new folder to keep (default: a temporary one)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = soak(folder, options.steps, options.minutes, seed=options.seed)
    print(f"{result.kills} kills, {result.starts} starts, resumed from {result.resumed_from}, {result.steps} steps")
    faults = result.faults()
    print("\n".join(faults or ["nothing was lost, and every step has the bits of the undisturbed run"]))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
