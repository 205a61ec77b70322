"""Run a door unchanged; write its steps, the first step's gradients and the parameters after the last one.

    python -m tests.distributed.matrix.watched RECORDS [--start FOLDER] [--gradients] DOOR [arguments of DOOR]

With --start every one-dimensional parameter is made random before training, so that a gradient assigned to the wrong
head or channel cannot hide behind equal values, and a checkpoint of these weights is written: the one that the other
runs start from.
"""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.harness import gradients
from tests.harness.recorded import before_training, hook_training, record

MODULE = "tests.distributed.matrix.watched"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--gradients", action="store_true")
    own, rest = parser.parse_known_args(sys.argv[1:])
    hook_training(rest[0], functools.partial(_save_parameters_after_training, directory=own.records))
    if own.gradients:
        watch = functools.partial(gradients.write_gradients, directory=own.records)
        hook_training(rest[0], lambda module: before_training(module, watch))
    if own.start:
        publish = functools.partial(_write_start, folder=own.start)
        hook_training(rest[0], lambda module: before_training(module, publish))
    record(own.records, digest=False, target=rest[0])
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


def _write_start(arguments: dict[str, Any], folder: Path) -> None:
    from megatron.training import checkpointing, get_args

    model, optimizer = arguments["model"], arguments["optimizer"]
    gradients.make_vectors_random(model)
    optimizer.reload_model_params()
    args = get_args()
    save, args.save = args.save, str(folder)
    checkpointing.save_checkpoint(1, model, optimizer, arguments["opt_param_scheduler"], 0)
    args.save = save


def _save_parameters_after_training(module: ModuleType, directory: Path) -> None:
    train = module.train

    @functools.wraps(train)
    def train_then_save(forward_step_func: Any, model: Any, *arguments: Any, **keywords: Any) -> Any:
        result = train(forward_step_func, model, *arguments, **keywords)
        gradients.save_parameters(model, directory)
        return result

    module.train = train_then_save


if __name__ == "__main__":
    main()
