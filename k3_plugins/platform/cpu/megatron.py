"""Repairs of Megatron-Core's modules that are needed once the "GPU" is the CPU. Each is applied at import."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from typing import Any

from k3_plugins.failure import fail
from k3_plugins.platform.cpu import checkpoint_tracker, distributed_optimizer
from k3_plugins.platform.cpu.import_hook import after_import


def install() -> None:
    """Register the repairs; Megatron is not imported here."""
    after_import("megatron.training.initialize", _no_warm_up)
    after_import("megatron.training.arguments", _no_sensors)
    after_import("megatron.core.datasets.utils", _no_recompilation)
    after_import("megatron.core.tensor_parallel.random", _no_fp8_question)
    after_import("megatron.training.checkpointing", checkpoint_tracker.repair)
    after_import("megatron.core.optimizer.distrib_optimizer", distributed_optimizer.repair)
    after_import("megatron.core.dist_checkpointing.strategies.filesystem_async", _forked_results_queue)


def _no_warm_up(module: Any) -> None:
    # The warm-up of the fused functions draws random tensors "on the GPU", as many as the layout says. From
    # the one generator of the CPU this would make the initial weights depend on --tensor-model-parallel-size,
    # silently. Nothing is compiled here (TORCHDYNAMO_DISABLE), so there is nothing to warm up.
    @functools.wraps(module._warmup_jit_function)
    def _warmup_jit_function(*args: Any, **kwargs: Any) -> None:
        return None

    module._warmup_jit_function = _warmup_jit_function


def _forked_results_queue(module: Any) -> None:
    # A checkpoint's first save starts a queue server by `spawn`, because a process with a CUDA context must not
    # fork. Without CUDA that costs 10 CPU seconds and 0.8 GB a rank for nothing: the server imports torch and
    # Megatron again.
    module.get_write_results_queue = functools.partial(module.get_write_results_queue, mp_mode="fork")


def _no_recompilation(module: Any) -> None:
    # The wheel ships the index builder compiled, without the Makefile: `make` there ends the job. A source
    # checkout that has not built it yet still does, with the python3 on PATH: let that be this one.
    original = module.compile_helpers

    @functools.wraps(original)
    def compile_helpers(*args: Any, **kwargs: Any) -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            path = os.environ.get("PATH", "")
            os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), path])
            try:
                original(*args, **kwargs)
            finally:
                os.environ["PATH"] = path

    module.compile_helpers = compile_helpers


def _no_fp8_question(module: Any) -> None:
    # --recompute-modules layernorm (and moe_act): CheckpointWithoutOutput asks Transformer Engine whether fp8 is on
    # unless fp8 is None, and its default is False: a NameError where Transformer Engine is not installed.
    checkpoint = module.CheckpointWithoutOutput
    original = checkpoint.__init__

    @functools.wraps(original)
    def __init__(self: Any, fp8: object = None) -> None:
        original(self, fp8 or None)

    checkpoint.__init__ = __init__


def _no_sensors(module: Any) -> None:
    # These flags read GPU sensors at the first log interval, when steps have been computed already. Say it before.
    original = module.validate_args

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        for flag in ("log_straggler", "log_energy"):
            if getattr(args, flag, False):
                fail(f"--{flag.replace('_', '-')} reads GPU sensors, which a CPU does not have: remove it.")
        return original(args, *rest, **kwargs)

    module.validate_args = validate_args
