"""Run a training script or module on N gloo ranks, with a time limit, and keep each rank's output.

    result = launch("tests.harness.stock_gpt", flags, nprocs=2, records=tmp_path / "rec")
    losses = read(result.records)

By default the ranks are forked from a process that has Megatron imported (tests.harness.forkserver). `torchrun=True`
starts them as a user does, with fresh interpreters: needed for what happens before or during imports and for
torchrun's own behaviour, 10 to 20 s slower.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.harness.forkserver import ROOT, server

_TAIL = 40


class LaunchError(AssertionError):
    """A run that failed or took too long; the message holds the tail of every rank's output."""


@dataclass
class Result:
    """rc: 0, or the first rank's non-zero code (torchrun: its own). logs: stdout and stderr together, per rank.

    agent: what torchrun printed itself ("" for forked ranks). records: the folder for tests.harness.losses.read.
    """

    rc: int
    timed_out: bool
    logs: list[str]
    agent: str
    records: Path | None

    def tail(self) -> str:
        """The last lines of everything, for an error message."""
        parts = [f"rc {self.rc}{', time limit reached' if self.timed_out else ''}"]
        for name, text in [*((f"rank {i}", log) for i, log in enumerate(self.logs)), ("torchrun", self.agent)]:
            if text:
                parts.append(f"--- {name}\n" + "\n".join(text.splitlines()[-_TAIL:]))
        return "\n".join(parts)


def launch(
    target: str,
    args: Sequence[str] = (),
    *,
    nprocs: int = 1,
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    records: str | os.PathLike | None = None,
    digest: bool = False,
    torchrun: bool = False,
    check: bool = True,
) -> Result:
    """Run `target` (a module name, or a path that ends in .py) with `args` on `nprocs` ranks.

    records: folder in which every rank writes its bit-exact losses (tests.harness.recorded); digest adds a hash of
    the parameters after each step. check: raise LaunchError unless every rank ended with 0 in time.
    """
    args = [str(a) for a in args]
    target = str(target)
    env = {"OMP_NUM_THREADS": "1", **(env or {})}
    records = Path(records) if records is not None else None
    with tempfile.TemporaryDirectory(prefix="k3-launch-") as directory:
        run = _torchrun if torchrun else _forked
        result = run(target, args, nprocs, timeout, env, Path(cwd or ROOT), records, digest, Path(directory))
    if check and (result.rc or result.timed_out):
        raise LaunchError(f"{target}: {result.tail()}")
    return result


def _forked(target, args, nprocs, timeout, env, cwd, records, digest, directory) -> Result:
    logs = [directory / f"rank{i}.log" for i in range(nprocs)]
    call = [__name__, "run_target", target, args, str(records) if records else None, digest]
    job = {"nprocs": nprocs, "call": call, "logs": [str(p) for p in logs], "env": env, "cwd": str(cwd)}
    answer = server.run(job, timeout)
    codes = answer["exit_codes"]
    # The rank that failed first makes the others fail with a lost connection or our kill: prefer a real exit code.
    rc = next((c for c in codes if c > 0), next((c for c in codes if c), 0))
    return Result(rc, answer["timed_out"], [p.read_text(errors="replace") for p in logs], "", records)


def run_target(target: str, args: Sequence[str], records: str | None, digest: bool) -> None:
    """What each rank executes: `python target args`, or `python -m target args`, recorded if `records` is given."""
    if records is not None:
        from tests.harness import recorded

        recorded.record(records, digest, target)
    sys.argv = [target, *args]
    if target.endswith(".py"):
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


def _torchrun(target, args, nprocs, timeout, env, cwd, records, digest, directory) -> Result:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nprocs}"]
    command += ["--redirects=3", f"--log-dir={directory}"]
    if records is not None:
        command += ["-m", "tests.harness.recorded", str(records), *(["--digest"] if digest else [])]
        command += [target, *args]
    else:
        command += [target, *args] if target.endswith(".py") else ["-m", target, *args]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    timed_out = False
    try:
        agent, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
        _kill_tree(process.pid)
        agent, _ = process.communicate()
    logs = []
    for rank in range(nprocs):
        files = sorted(directory.glob(f"*/attempt_0/{rank}/std*.log"))
        logs.append("".join(f.read_text(errors="replace") for f in files))
    return Result(process.returncode, timed_out, logs, agent, records)


def _kill_tree(pid: int) -> None:
    # torchrun puts each rank into a session of its own: killing torchrun's group would leave them.
    for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
