"""Read and compare what `tests.harness.recorded` wrote, and Megatron's log lines."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

_LOG_LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?lm loss: ([0-9.E+-]+)")


@dataclass(frozen=True)
class Step:
    """One training step of the whole job: bit-exact loss and gradient norm, parameter hashes by rank (or None)."""

    iteration: int
    losses: dict[str, float]
    grad_norm: float | None
    parameters: tuple[str | None, ...]

    @property
    def loss(self) -> float:
        return self.losses["lm loss"]


def read(records: str | os.PathLike) -> dict[int, Step]:
    """Steps by iteration. Asserts that all ranks which report a loss report the same bits.

    A resumed run appends to the files of its folder: the later record of an iteration counts.
    """
    files = sorted(Path(records).glob("rank*.jsonl"), key=lambda p: int(p.stem[4:]))
    assert files, f"no records in {records}: did training start?"
    per_rank = []
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        per_rank.append({line["iteration"]: line for line in lines})
    steps = {}
    for iteration in sorted(per_rank[0]):
        lines = [rank[iteration] for rank in per_rank]
        reported = [line["losses"] for line in lines if line["losses"]]
        assert reported, f"iteration {iteration}: no rank reported a loss"
        assert all(r == reported[0] for r in reported), f"iteration {iteration}: ranks report different losses"
        norm = lines[0]["grad_norm"]
        steps[iteration] = Step(
            iteration,
            {key: float.fromhex(value) for key, value in reported[0].items()},
            None if norm is None else float.fromhex(norm),
            tuple(line.get("parameters") for line in lines),
        )
    return steps


def relative_difference(a: dict[int, Step], b: dict[int, Step]) -> float:
    """Largest |a - b| / |b| of the loss over the iterations of b, all of which a must have."""
    assert a.keys() >= b.keys(), f"iterations {sorted(b.keys() - a.keys())} are missing"
    return max(abs(a[i].loss - b[i].loss) / abs(b[i].loss) for i in b)


def first_difference(a: dict[int, Step], b: dict[int, Step]) -> str | None:
    """None if every step of b has the same bits in a (loss, gradient norm, parameters); else where they part."""
    for i in sorted(b):
        if i not in a:
            return f"iteration {i} is missing"
        for field in ("losses", "grad_norm", "parameters"):
            left, right = getattr(a[i], field), getattr(b[i], field)
            if left != right:
                return f"iteration {i}: {field} {left} != {right}"
    return None


def logged_losses(log: str) -> dict[int, float]:
    """The losses of Megatron's own log lines (7 digits), by iteration."""
    return {int(i): float(loss) for i, loss in _LOG_LINE.findall(log)}
