"""Run one Python function on N gloo ranks and collect what it returns.

    def check(rank, world_size, hidden):        # at the top level of the test's module
        ...collectives, asserts...
        return loss.item()

    losses = spawn(check, 2, 64)                # [rank 0's, rank 1's]

The ranks are forks of a process with torch and Megatron imported and the CPU platform installed; torch.distributed is
initialised. Do many checks in one function: what remains per spawn is the start of gloo.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.forkserver import ROOT, server
from tests.harness.launch import LaunchError, Result


def spawn(function: Callable[..., Any], nprocs: int, *arguments: Any, timeout: float = 300) -> list[Any]:
    """`function(rank, world_size, *arguments)` on every rank; the list of results, by rank.

    Arguments and results must be picklable; `function` is found again by its file and name, so it must stand at the
    top level of a module. Raises LaunchError, with every rank's output, if a rank raises, exits or takes longer than
    `timeout` seconds.
    """
    if "<" in function.__qualname__ or "." in function.__qualname__:
        raise ValueError(f"{function.__qualname__}: spawn needs a function at the top level of a module")
    with tempfile.TemporaryDirectory(prefix="k3-spawn-") as directory:
        folder = Path(directory)
        (folder / "arguments").write_bytes(pickle.dumps(arguments))
        logs = [folder / f"rank{i}.log" for i in range(nprocs)]
        call = [__name__, "run_function", inspect.getsourcefile(function), function.__name__, directory]
        job = {"nprocs": nprocs, "call": call, "logs": [str(p) for p in logs], "env": {}, "cwd": str(ROOT)}
        answer = server.run(job, timeout)
        if any(answer["exit_codes"]):
            rc = next(code for code in answer["exit_codes"] if code)
            texts = [p.read_text(errors="replace") for p in logs]
            raise LaunchError(f"{function.__qualname__}: {Result(rc, answer['timed_out'], texts, '', None).tail()}")
        return [pickle.loads((folder / f"result{i}").read_bytes()) for i in range(nprocs)]


def run_function(file: str, name: str, directory: str) -> None:
    """What each rank executes."""
    import torch.distributed as dist

    module = _module(file)
    folder = Path(directory)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    arguments = pickle.loads((folder / "arguments").read_bytes())
    result = getattr(module, name)(rank, world_size, *arguments)
    (folder / f"result{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()


def _module(file: str) -> Any:
    path = Path(file).resolve()
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts) if path.is_relative_to(ROOT) else path.stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
