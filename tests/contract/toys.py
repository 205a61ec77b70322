"""Small targets, features and ranks for the contract tests.

toy_package(tmp_path, {"a": source, ...})      importable modules with a unique package name
record(patches)                                a fingerprint store made from what is installed now
toy_feature(name, ...)                         an object that satisfies the Feature protocol
run_ranks(target, arguments, nprocs, env)      exit code and output of every rank, forked with Megatron imported
"""

import importlib
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from k3_plugins.feature import Witness
from k3_plugins.patching import Patch, PatchKind
from k3_plugins.patching.fingerprint import FingerprintStore, take
from k3_plugins.patching.target import resolve

_numbers = itertools.count()
TOYS = Path(__file__).parent / "toy_plugin"
"""A folder with one installed distribution (hand-made metadata): put it on the import path to have its feature."""

TINY_GPT = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 63 --make-vocab-size-divisible-by 64 --transformer-impl local --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --use-cpu-initialization --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --eval-iters 1 --eval-interval 100 --log-interval 1 --split 90,5,5 --ckpt-format torch_dist
    """.split()
"""Flags of the smallest GPT that Megatron trains on the CPU."""


def toy_package(folder: Path, modules: Mapping[str, str]) -> str:
    """Write and register a package; returns its name. Its modules are not imported yet."""
    name = f"toy_target_{next(_numbers)}"
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    for module, source in modules.items():
        (package / f"{module}.py").write_text(textwrap.dedent(source).replace("PACKAGE", name))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return name


def forget(name: str) -> None:
    """Remove a toy package from this process."""
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[module]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def patch(target: str, implementation: Callable, kind: PatchKind = PatchKind.WRAP, **changes: Any) -> Patch:
    """A patch with filled-in paperwork."""
    values = {"id": f"toy.{target.partition(':')[2]}", "feature": "toy", "reason": "a test", "remove_when": "never"}
    return Patch(target=target, kind=kind, implementation=implementation, **{**values, **changes})


def record(patches: Sequence[Patch]) -> FingerprintStore:
    return FingerprintStore({p.target: take(resolve(p.target, p.id)) for p in patches}, "1.0")


def toy_feature(name: str = "toy", **changes: Any) -> Any:
    """A feature without patches; keyword arguments replace members (None in a method's place removes it)."""
    members = {
        "name": name,
        "requires": (),
        "conflicts": (),
        "config": None,
        "changes_parameters": False,
        "patches": lambda: (),
        "validate": lambda args, config: None,
        "witness": lambda model_chunks, args: Witness("ran", True),
    }
    members |= changes
    return SimpleNamespace(**members)


@dataclass
class Ranks:
    """What became of a job."""

    codes: list[int]
    logs: list[str]
    timed_out: bool

    def __str__(self) -> str:
        outcomes = zip(self.codes, self.logs, strict=True)
        return "\n".join(f"--- rank {i}: exit {code}\n{log[-3000:]}" for i, (code, log) in enumerate(outcomes))


def run_ranks(
    target: str, arguments: Sequence[str], tmp_path: Path, nprocs: int = 1, timeout: float = 300, **env: str
) -> Ranks:
    """Run a module or script on forked ranks whose import path holds the toy plug-in."""
    from tests.harness.forkserver import ROOT, server

    logs = [tmp_path / f"rank{i}.log" for i in range(nprocs)]
    call = ["tests.contract.toys", "rank_main", target, [str(a) for a in arguments]]
    job = {"nprocs": nprocs, "call": call, "logs": [str(p) for p in logs], "env": env, "cwd": str(ROOT)}
    answer = server.run(job, timeout)
    return Ranks(answer["exit_codes"], [p.read_text(errors="replace") for p in logs], answer["timed_out"])


def rank_main(target: str, arguments: list[str]) -> None:
    """What a rank of :func:`run_ranks` executes.

    TOY_WITHOUT names a rank that is started without the plug-ins; TOY_WORDS_1 holds more words for rank 1 alone;
    TOY_FOLDER is the folder of another distribution than the toy's.
    """
    from tests.harness.launch import run_target

    sys.path.insert(1, os.environ.get("TOY_FOLDER", str(TOYS)))  # the launch door replaces entry 0
    if os.environ.get("TOY_WITHOUT") == os.environ["RANK"]:
        position = arguments.index("--k3-plugins")
        arguments = [a for i, a in enumerate(arguments) if i not in (position, position + 1)]
    arguments = [*arguments, *os.environ.get(f"TOY_WORDS_{os.environ['RANK']}", "").split()]
    run_target(target, arguments, None, False)
