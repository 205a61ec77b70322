"""Run a training module unchanged; record gradients, losses, and what each balanced MoE layer did in every pass.

    python -m tests.distributed.models.balanced_run RECORDS [--skew | --no-gradients] TARGET [arguments of TARGET]

Adds to `tests.harness.gradients` the file `RECORDS/moe<N>.jsonl`: one line for each forward pass of a balanced layer.
With --skew the checkpoint-to-be gets random norm weights and router biases that make the router itself produce one kind
of load in each layer (see `KINDS`). --no-gradients is for bf16: the dump of gradients gives parameters another dtype
for a moment, after which Megatron's accumulation of them no longer works.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from tests.harness import gradients
from tests.harness.recorded import before_training, hook_training, record

KINDS = ("balanced", "zipf", "single_hot", "tight")  # of layers 1, 2, 3, 4


def offsets(kind: str, num_experts: int) -> torch.Tensor:
    """Router biases: scores at the start are 0.5 with a spread of a few hundredths."""
    e = torch.arange(num_experts, dtype=torch.float32)
    return {
        "balanced": 0 * e,
        "zipf": -0.05 * torch.log1p(e),
        "single_hot": torch.where(e == num_experts - 1, 1.0, 0.0),
        "tight": torch.where(e < num_experts // 4, -1.0, 0.0),  # the first rank of four gets nothing
    }[kind]


def main() -> None:
    directory, *rest = sys.argv[1:]
    skew, no_gradients = rest[0] == "--skew", rest[0] == "--no-gradients"
    if skew or no_gradients:
        rest = rest[1:]
    watches = [functools.partial(_watch, directory=Path(directory), skew=skew)]
    if not no_gradients:
        watches.append(functools.partial(gradients.write_gradients, directory=Path(directory), perturb=skew))
    for watch in watches:
        hook_training(rest[0], lambda module, watch=watch: before_training(module, watch))
    record(directory, digest=False, target=rest[0])
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


def _watch(arguments: dict[str, Any], directory: Path, skew: bool) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    model, optimizer = arguments["model"], arguments["optimizer"]
    path, step = directory / f"moe{os.environ.get('RANK', '0')}.jsonl", [1]
    for layer in (m for chunk in model for m in chunk.modules() if isinstance(m, MoELayer)):
        if skew:
            bias = layer.router.expert_bias
            bias.copy_(offsets(KINDS[layer.layer_number - 1], len(bias)))
        layer.register_forward_hook(lambda layer, _inputs, _output: _note(layer, step[0], path))
    original = optimizer.step

    def counted_step(*step_args, **step_kwargs):
        step[0] += 1
        return original(*step_args, **step_kwargs)

    optimizer.step = counted_step


def _note(layer, step: int, path: Path) -> None:
    report = getattr(layer, "report", None)
    if report is None:
        return
    line = {"step": step, "layer": layer.layer_number, "sent": report.sent, "buffer": report.buffer_rows}
    line |= {name: int(getattr(report, name)) for name in ("rows", "share", "slots", "slots_anywhere")}
    with path.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def read(directory: Path) -> list[dict]:
    """All ranks' lines."""
    return [json.loads(line) for path in sorted(directory.glob("moe*.jsonl")) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
