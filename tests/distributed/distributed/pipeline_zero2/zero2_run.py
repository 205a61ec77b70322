"""Run a training module unchanged; write its steps, its final parameters and what pipeline-zero2 reports.

    python -m tests.distributed.distributed.pipeline_zero2.zero2_run RECORDS TARGET [arguments of TARGET]

K3_TEST_KILL=1 kills a rank in its second save (tests.distributed.platform.test_kill).
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import sys
from pathlib import Path

import torch

from tests.harness import losses
from tests.harness.launch import launch
from tests.harness.recorded import hook_training, record

MODULE = "tests.distributed.distributed.pipeline_zero2.zero2_run"
DOOR = "k3_plugins.pretrain_gpt"


def main() -> None:
    directory, target = Path(sys.argv[1]), sys.argv[2]
    hook_training(target, lambda module: _watch(module, directory))
    record(directory, digest=True, target=target)
    sys.argv = sys.argv[2:]
    runpy.run_module(target, run_name="__main__", alter_sys=True)


def _watch(module, directory: Path) -> None:
    if os.environ.get("K3_TEST_KILL"):
        from tests.distributed.platform.test_kill import die_in_second_save

        die_in_second_save()
    train = module.train

    def train_then_dump(forward_step_func, model, *args, **kwargs):
        try:
            return train(forward_step_func, model, *args, **kwargs)
        finally:  # it leaves by sys.exit at an --exit-interval
            _dump(model, directory)

    module.train = train_then_dump


def _dump(model, directory: Path) -> None:
    rank = os.environ.get("RANK", "0")
    named = {f"{i}.{name}": p.detach().clone() for i, chunk in enumerate(model) for name, p in chunk.named_parameters()}
    torch.save(named, directory / f"parameters{rank}.pt")
    if "k3_plugins.distributed.pipeline_zero2.attach" in sys.modules:
        from k3_plugins.distributed.pipeline_zero2.attach import CURRENT

        report = dataclasses.asdict(CURRENT[0].report())
        (directory / f"report{rank}.json").write_text(json.dumps(report))


@dataclasses.dataclass
class Run:
    """What a run wrote: steps by iteration, and by rank parameters by name and reports."""

    steps: dict[int, losses.Step]
    parameters: list[dict[str, torch.Tensor]]
    reports: list[dict]
    logs: list[str]


def train(records: Path, words: list[str], nprocs: int, zero2: bool, **options) -> Run:
    """Through the product's door, with the feature or without."""
    plugins = ["--k3-plugins", "pipeline-zero2"] if zero2 else []
    result = launch(MODULE, [records, DOOR, *words, "--k3-platform", "cpu", *plugins], nprocs=nprocs, **options)
    if result.rc:
        return Run({}, [], [], result.logs)
    reports = [json.loads((records / f"report{r}.json").read_text()) for r in range(nprocs)] if zero2 else []
    parameters = [torch.load(records / f"parameters{r}.pt") for r in range(nprocs)]
    return Run(losses.read(records), parameters, reports, result.logs)


def differences(run: Run, reference: Run) -> tuple[float, float, float]:
    """Largest relative difference of the losses, of the gradient norms, and of the parameters (over a tensor's largest
    entry, or over 0.01, from where weights start, for biases that start at 0)."""
    assert run.steps.keys() == reference.steps.keys()
    loss = losses.relative_difference(run.steps, reference.steps)
    norms = [(run.steps[i].grad_norm, step.grad_norm) for i, step in reference.steps.items()]
    assert all((mine is None) == (his is None) for mine, his in norms), "steps were skipped in one run only"
    norm = max(abs(mine - his) / his for mine, his in norms if his is not None)
    worst = 0.0
    for mine, his in zip(run.parameters, reference.parameters, strict=True):
        assert mine.keys() == his.keys()
        for name, value in his.items():
            scale = value.abs().max().clamp(min=1e-2).float()
            worst = max(worst, ((mine[name] - value).abs().max().float() / scale).item())
    return loss, norm, worst


if __name__ == "__main__":
    main()
