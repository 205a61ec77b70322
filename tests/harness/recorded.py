"""Run a training script or module unchanged and record every step bit-exactly.

    python -m tests.harness.recorded RECORDS [--digest] TARGET [arguments of TARGET]

TARGET is a module name or a path that ends in .py. In `RECORDS/rank<N>.jsonl` each rank writes one line per
training step: the iteration, the reduced losses (last pipeline stage only) and the gradient norm as
`float.hex()`, and with --digest a SHA-256 of its parameters after the step. Megatron's own log rounds to
seven digits, which hides the last bits. `tests.harness.losses` reads the records.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from k3_plugins.platform.cpu.import_hook import after_import


def record(directory: str, digest: bool, target: str) -> None:
    """Arrange that Megatron's training loop writes the records when `target` runs it."""
    path = Path(directory) / f"rank{os.environ.get('RANK', '0')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    after_import("megatron.core.datasets.gpt_dataset", _fewer_mock_documents)
    hook_training(target, functools.partial(_wrap, path=path, digest=digest))


def _fewer_mock_documents(module: ModuleType) -> None:
    # Megatron's 100 000 mock documents are indexed anew by every run, which takes longer than a test trains.
    module.MockGPTLowLevelDataset.size = int(os.environ.get("K3_TEST_MOCK_DOCUMENTS", "500"))


def hook_training(target: str, install: Callable[[ModuleType], None]) -> None:
    """Call `install` with megatron.training.training before training starts.

    The plug-in's own doors check that the functions they patch are Megatron's, so there the hook waits until the
    features are active; any other target is hooked as soon as Megatron is imported.
    """
    if not target.startswith("k3_plugins."):
        after_import("megatron.training.training", install)
        return
    from k3_plugins import bootstrap

    activate = bootstrap.activate

    @functools.wraps(activate)
    def activate_then_hook(*args, **kwargs):
        activation = activate(*args, **kwargs)
        after_import("megatron.training.training", install)
        return activation

    bootstrap.activate = activate_then_hook


def before_training(module: ModuleType, action: Callable[[dict[str, Any]], None]) -> None:
    """Call `action` with the arguments of Megatron's `train` by name, when model, optimizer and data are ready.

    The plug-in patches the functions around it and refuses a second hand on them; nobody patches `train`.
    """
    train = module.train
    signature = inspect.signature(train)

    @functools.wraps(train)
    def watched_train(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        action(bound.arguments)
        return train(*bound.args, **bound.kwargs)

    module.train = watched_train


def _wrap(module, path: Path, digest: bool) -> None:
    # training_log is patched by the plug-in, but its first calls are to getters that nobody patches: its arguments are
    # read from there.
    model = []
    before_training(module, lambda arguments: model.extend(arguments["model"]))
    get_one_logger = module.get_one_logger

    @functools.wraps(get_one_logger)
    def recorded_get_one_logger():
        caller = sys._getframe(1)
        if caller.f_code.co_name == "training_log":
            values = caller.f_locals
            line = {
                "iteration": values["iteration"],
                "losses": {key: float(value).hex() for key, value in values["loss_dict"].items()},
                "grad_norm": None if values["grad_norm"] is None else float(values["grad_norm"]).hex(),
            }
            if digest:
                line["parameters"] = _digest(model)
            with path.open("a") as f:
                f.write(json.dumps(line) + "\n")
        return get_one_logger()

    module.get_one_logger = recorded_get_one_logger


def _digest(model) -> str:
    import torch

    sha = hashlib.sha256()
    for chunk in model:
        for name, parameter in sorted(chunk.named_parameters()):
            sha.update(name.encode())
            sha.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    directory, *rest = sys.argv[1:]
    digest = rest[0] == "--digest"
    if digest:
        rest = rest[1:]
    record(directory, digest, rest[0])
    sys.argv = rest
    if rest[0].endswith(".py"):
        runpy.run_path(rest[0], run_name="__main__")
    else:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
