"""docs/benchmarks.md from the results: one line per claim, with the anchor that other pages link to.

text = render(BENCHMARKS, results)
lines(BENCHMARKS, results)              # the same as objects; `not_run` says why a line has no numbers
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report.claims import EQUAL, Benchmark, Claim
from benchmarks.report.readers import Reading
from benchmarks.report.run import Result

QUIET = 0.1
"""Cores that other processes may keep busy while times are taken."""

INTRODUCTION = """\
# Benchmarks

Written by `python -m benchmarks.report` from [benchmarks.json](benchmarks.json), which holds everything that the
scripts reported; `--only NAME` reruns one, `--render` writes this page without running any. Do not edit it.

Every line compares ours with what its sentence names: another implementation, a bound, or the same model without the
feature. **Less is better in every line**, and "ours / peer" below 1 is in our favour. Kinds of numbers:

* *count*: bytes, rows, elements, or an exact computation. The machine and its load do not change them.
* *memory*: largest resident size of the process, as the kernel recorded it; "equal" up to {memory:.0%}.
* *loss*: of small models, trained for a few minutes; "equal" up to {loss:.0%}.
* *CPU time*: of the process, or of the slowest one; "equal" up to {cpu:.0%}.
* *time*: by the clock; "equal" up to {time:.0%}.

Where other processes kept more than {quiet:g} of a core busy meanwhile, a line of the last two kinds says *busy*:
shared caches and cores distort processor time too, though less than the clock. Such a line is an indication only.

All runs are on CPUs with gloo: they say nothing about GPUs or networks. A quick form measures less of the same than a
full one (`--quick`); each section shows its command.
"""


@dataclass(frozen=True)
class Line:
    """A claim with its numbers, or with the reason why there are none."""

    claim: Claim
    reading: Reading | None
    not_run: str
    """Empty where there is a reading."""
    left_out: bool
    """Not run because the quick form does not measure it: no failure."""
    busy: bool

    @property
    def ratio(self) -> float:
        """Ours over the peer's; 1 where both are 0."""
        ours, peer = self.reading.ours, self.reading.peer
        return ours / peer if peer else (1.0 if ours == 0 else math.inf)

    @property
    def verdict(self) -> str:
        """better, equal, worse or not run."""
        if self.reading is None:
            return "left out" if self.left_out else "not run"
        if abs(self.ratio - 1) <= EQUAL[self.claim.kind]:
            return "equal"
        return "better" if self.ratio < 1 else "worse"


def lines(benchmarks: Sequence[Benchmark], results: dict[str, Result]) -> list[Line]:
    """Of every claim, in the order of the list."""
    return [_line(claim, results.get(b.name)) for b in benchmarks for claim in b.claims]


def _line(claim: Claim, result: Result | None) -> Line:
    if result is None:
        return Line(claim, None, "no result yet", False, False)
    if "failure" in result:
        return Line(claim, None, result["failure"], False, False)
    if claim.full_only and result["form"] == "quick":
        return Line(claim, None, "part of the full form only", True, False)
    try:
        reading = claim.read(result["output"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return Line(claim, None, f"the report lacks its numbers ({type(error).__name__}: {error})", False, False)
    return Line(
        claim, reading, "", False, claim.kind in ("CPU time", "time") and result["load"]["cores_of_others"] > QUIET
    )


def render(benchmarks: Sequence[Benchmark], results: dict[str, Result]) -> str:
    """The page."""
    found = lines(benchmarks, results)
    parts = [
        INTRODUCTION.format(
            memory=EQUAL["memory"], loss=EQUAL["loss"], cpu=EQUAL["CPU time"], time=EQUAL["time"], quiet=QUIET
        ),
        _summary(found),
        _machines(results),
    ]
    rest = iter(found)
    for benchmark in benchmarks:
        parts.append(_section(benchmark, results.get(benchmark.name), [next(rest) for _ in benchmark.claims]))
    return "\n".join(parts)


def _summary(found: list[Line]) -> str:
    counts = Counter(line.verdict for line in found)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("better", "equal", "worse"))
    text = f"## Summary\n\n{len(found)} lines: {said}, {counts['left out']} left out, {counts['not run']} not run.\n"
    for verdict, head in (("worse", "Where ours is worse"), ("not run", "Not run")):
        named = ", ".join(f"[{line.claim.id}](#{line.claim.id})" for line in found if line.verdict == verdict)
        text += f"\n{head}: {named}.\n" if named else ""
    return text


def _machines(results: dict[str, Result]) -> str:
    """Every different machine and set of versions, with the benchmarks that ran there."""
    groups: dict[str, list[str]] = {}
    for name, result in results.items():
        groups.setdefault(json.dumps([result["machine"], result["versions"]]), []).append(name)
    text = "## Machine and versions\n"
    for key, names in groups.items():
        machine, versions = json.loads(key)
        whose = "" if len(groups) == 1 else f" ({', '.join(names)})"
        memory = machine["memory_bytes"] / 2**30
        text += f"\n* {machine['cpu']}, {machine['cores']} cores, {memory:.1f} GiB of memory{whose}\n"
        text += "* " + ", ".join(f"{package} {version}" for package, version in versions.items()) + "\n"
    return text


def _section(benchmark: Benchmark, result: Result | None, found: list[Line]) -> str:
    text = f'## <a id="{benchmark.name}"></a>{benchmark.title}\n\n'
    if result is None:
        text += f"`python benchmarks/{benchmark.script}` has not been run.\n"
    else:
        load, cores = result["load"], result["machine"]["cores"]
        text += (
            f"`{result['command']}`  \n{result['form']} form, {result['date']}, {load['seconds']:.0f} s; meanwhile"
            f" others kept {load['cores_of_others']:.2f} of {cores} cores busy (load average at the start"
            f" {load['load_average_before']:.1f}).\n"
        )
    text += "\n| claim | kind | ours | peer | ours / peer | |\n|---|---|--:|--:|--:|---|\n"
    return text + "".join(map(_table_row, found))


def _table_row(line: Line) -> str:
    claim, anchor = line.claim, f'<a id="{line.claim.id}"></a>'
    if line.reading is None:
        what = re.sub(r"\{\w+\}", "…", claim.what.replace("{note}", ""))
        return f"| {anchor}{what} | {claim.kind} | | | | not run: {_cell(line.not_run)} |\n"
    reading = line.reading
    ours, peer = (quantity(value, claim.unit) for value in (reading.ours, reading.peer))
    verdict = f"{line.verdict}, busy" if line.busy else line.verdict
    what = _cell(claim.what.format(**reading.words))
    return f"| {anchor}{what} | {claim.kind} | {ours} | {peer} | {line.ratio:.3g} | {verdict} |\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def quantity(value: float, unit: str) -> str:
    """With a unit that leaves one to four digits before the point.

    >>> quantity(3 * 2**20, "bytes"), quantity(0.0213, "s"), quantity(7168.0, "rows")
    ('3.00 MiB', '21.3 ms', '7,168 rows')
    """
    if unit == "bytes":
        return _scaled(value, ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")), "bytes")
    if unit == "s":
        return _scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")), "s")
    if unit == "x":
        return f"{value:.3f}"
    whole = math.isclose(value, round(value), rel_tol=1e-6)
    return f"{value:,.0f} {unit}" if whole or value >= 1e4 else f"{value:.4g} {unit}"


def _scaled(value: float, scales: tuple[tuple[float, str], ...], smallest: str) -> str:
    for scale, name in scales:
        if value >= scale:
            digits: Any = max(0, 2 - int(math.log10(value / scale)))
            return f"{value / scale:.{digits}f} {name}"
    return f"{value:.3g} {smallest}"
