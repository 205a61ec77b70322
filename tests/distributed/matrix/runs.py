"""Run a case and compare it with one process.

    runs = Runs(folder)
    outcome = runs.outcome(case)

The one process of a case is trained once for all cases that are compared with it. It writes the checkpoint from which
they start, and that of step `SAVED`, from which those go on that begin there.
"""

from __future__ import annotations

import itertools
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from k3_plugins.failure import EXIT_BAD_ARGUMENTS, PREFIX
from tests.distributed.matrix.cases import Case
from tests.distributed.matrix.table import SAVED, STEPS
from tests.distributed.matrix.watched import MODULE
from tests.distributed.vision.pipeline import uneven_pairs
from tests.harness import gradients, losses
from tests.harness.launch import LaunchError, Result, launch

EQUAL, DIFFERENT, REFUSED, FAILED = "equal", "different", "refused", "failed"


@dataclass
class Outcome:
    """What came of a case."""

    result: str
    """One of the four above."""
    measured: dict[str, float] = field(default_factory=dict)
    """Largest relative differences, by what was compared (the fields of Bounds)."""
    bounds: dict[str, float] = field(default_factory=dict)
    """What they had to stay below."""
    text: str = ""
    """The sentence of a refusal, or what went wrong."""
    seconds: float = 0.0


class Runs:
    """Runs in one folder, each made once."""

    def __init__(self, folder: Path, limit: float = 200) -> None:
        self.folder = folder
        self.limit = limit
        """Seconds after which a run is given up."""
        self._images: list[str] | None = None

    def outcome(self, case: Case) -> Outcome:
        """Train, compare, and tell; never raises because of what a run does."""
        started = time.monotonic()
        try:
            outcome = self._compared(case)
        except (LaunchError, AssertionError) as error:
            outcome = Outcome(FAILED, text=str(error))
        outcome.seconds = round(time.monotonic() - started, 1)
        return outcome

    def _compared(self, case: Case) -> Outcome:
        reference = self._one_process(case.reference())
        begin, expected = reference / "start", reference
        if case.layout.goes_on:
            expected = self._one_process(case.without_layout(), start=reference / "start")
            begin = expected / "saved"
        folder = self.place(case)
        assert folder not in (reference, expected), f"{case.id} would be compared with itself"
        run = self._train(folder, case, begin=begin)
        if run.rc == EXIT_BAD_ARGUMENTS:
            return Outcome(REFUSED, text=sentence(run).replace(str(begin), "DIR"))
        if run.rc or run.timed_out:
            return Outcome(FAILED, text=run.tail()[-2000:])
        return compare(case, folder, expected)

    def _one_process(self, case: Case, start: Path | None = None) -> Path:
        """The folder of a run on one process: without `start` it makes its own weights and writes them there."""
        folder = self.place(case)
        if not (folder / "done").exists():
            run = self._train(folder, case, begin=start, save=True)
            if run.rc or run.timed_out:
                raise LaunchError(f"{case.id}: {run.tail()}")
            (folder / "done").touch()
        return folder

    def _train(self, folder: Path, case: Case, begin: Path | None, save: bool = False) -> Result:
        shutil.rmtree(folder, ignore_errors=True)  # what a run that was given up has left
        folder.mkdir(parents=True)
        own, words = [folder], list(case.words)
        if case.gradients:
            own.append("--gradients")
        if begin is None:
            own += ["--start", folder / "start"]
        else:
            words += ["--load", begin]
            if case.layout.goes_on:
                words += ["--ckpt-step", SAVED]
            else:
                words += ["--finetune", "--no-load-optim", "--no-load-rng"]
        if save:
            words += ["--save", folder / "saved", "--save-interval", SAVED]
        if case.vision:
            words += self.images()
        arguments = [*own, case.door, *words]
        return launch(MODULE, arguments, nprocs=case.ranks, timeout=self.limit, check=False)

    def place(self, case: Case) -> Path:
        """Where a case runs."""
        return self.folder / case.digest

    def images(self) -> list[str]:
        """Flags for a data set of images and texts, made on first use."""
        if self._images is None:
            folder = self.folder / "images"
            if not folder.exists():
                uneven_pairs.write(folder, 24, seed=0)
            self._images = ["--vision-data", str(folder)]
        return self._images


def compare(case: Case, folder: Path, expected: Path) -> Outcome:
    """A finished run with the one process that it must equal."""
    steps, wanted = losses.read(folder), losses.read(expected)
    if case.layout.goes_on:
        wanted = {number: step for number, step in wanted.items() if number > SAVED}
    assert sorted(steps) == sorted(wanted) and max(steps) == STEPS, f"steps {sorted(steps)} of {sorted(wanted)}"
    bounds, measured, where = case.compared, {}, {}
    measured["loss"] = losses.relative_difference(steps, wanted)
    if "norm" in bounds:
        measured["norm"] = max(abs(steps[i].grad_norm / step.grad_norm - 1) for i, step in wanted.items())
    if case.gradients:
        mine, its = (gradients.assemble(at) for at in (folder, expected))
        if "gradients" in bounds:
            measured["gradients"], where["gradients"] = _largest(mine, its)
        if "all_gradients" in bounds:
            measured["all_gradients"] = _whole(mine, its)
    if "parameters" in bounds:
        mine, its = (_parameters(at, case.statistics) for at in (folder, expected))
        measured["parameters"], where["parameters"] = _largest(mine, its)
    over = [
        f"{name} {measured[name]:.1e} > {bound:.0e} {where.get(name, '')}".strip()
        for name, bound in bounds.items()
        if not measured[name] <= bound
    ]
    return Outcome(DIFFERENT if over else EQUAL, measured, bounds, "; ".join(over))


def _parameters(folder: Path, statistics: tuple[str, ...]) -> dict[str, Tensor]:
    whole = gradients.assemble(folder, "parameters")
    return {name: value for name, value in whole.items() if not name.endswith(statistics or ("\n",))}


def _largest(mine: dict[str, Tensor], its: dict[str, Tensor]) -> tuple[float, str]:
    return gradients.largest_difference(
        {name: value.float() for name, value in mine.items()}, {name: value.float() for name, value in its.items()}
    )


def _whole(mine: dict[str, Tensor], its: dict[str, Tensor]) -> float:
    assert mine.keys() == its.keys(), mine.keys() ^ its.keys()
    size = sum(value.double().square().sum() for value in its.values())
    return (sum((mine[name].double() - value).square().sum() for name, value in its.items()) / size).sqrt().item()


def sentence(run: Result) -> str:
    """What a run that ended with exit code 2 said: the message, and the list below it if it has one."""
    for log in run.logs:
        lines = iter(log.splitlines())
        for line in lines:
            if line.startswith(PREFIX):
                listed = itertools.takewhile(lambda following: following.startswith("  - "), lines)
                return " ".join([re.sub(r"^rank \d+: ", "", line.removeprefix(PREFIX)), *map(str.strip, listed)])
    return run.tail()
