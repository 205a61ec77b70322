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
import json
import os
import runpy
import sys
from pathlib import Path

from k3_plugins.platform.cpu.import_hook import after_import


def record(directory: str, digest: bool) -> None:
    """Arrange that Megatron's training loop writes the records, once it is imported."""
    path = Path(directory) / f"rank{os.environ.get('RANK', '0')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    after_import("megatron.training.training", functools.partial(_wrap, path=path, digest=digest))


def _wrap(module, path: Path, digest: bool) -> None:
    model_of_step = []
    train_step, training_log = module.train_step, module.training_log

    @functools.wraps(train_step)
    def recorded_train_step(forward_step_func, data_iterator, model, *args, **kwargs):
        model_of_step[:] = model
        return train_step(forward_step_func, data_iterator, model, *args, **kwargs)

    @functools.wraps(training_log)
    def recorded_training_log(
        loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, flag, skipped, grad_norm, *args, **kwargs
    ):
        line = {
            "iteration": iteration,
            "losses": {key: float(value).hex() for key, value in loss_dict.items()},
            "grad_norm": None if grad_norm is None else float(grad_norm).hex(),
        }
        if digest:
            line["parameters"] = _digest(model_of_step)
        with path.open("a") as f:
            f.write(json.dumps(line) + "\n")
        return training_log(
            loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, flag, skipped, grad_norm, *args, **kwargs
        )

    module.train_step = recorded_train_step
    module.training_log = recorded_training_log


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
    record(directory, digest)
    sys.argv = rest
    if rest[0].endswith(".py"):
        runpy.run_path(rest[0], run_name="__main__")
    else:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
