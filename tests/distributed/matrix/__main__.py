"""The matrix from the command line.

    python -m tests.distributed.matrix page                # ask for refusals anew; write docs/verification.{json,md}
    python -m tests.distributed.matrix run                 # train every case that has no result; write both files
        --only TEXT     cases whose name contains TEXT (may be given several times)
        --without TEXT  no case whose name contains TEXT (the same)
        --again         those that have a result, too
        --limit SECONDS start no case after so long
        --folder DIR    keep the runs here, for the next call; their weights and drawings are used again
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.distributed.matrix import page
from tests.distributed.matrix.cases import Case, all_cases, pair_cases, pairs, together_cases
from tests.distributed.matrix.cells import cells, decide
from tests.distributed.matrix.record import Record
from tests.distributed.matrix.refusals import ask
from tests.distributed.matrix.runs import EQUAL, REFUSED, Runs


def main() -> int:
    """Returns 1 if a case that was run neither equals one process nor is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.distributed.matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("page", "run"))
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path)
    own = parser.parse_args()
    given = [f"--{name}" for name, value in vars(own).items() if value != parser.get_default(name) and name != "what"]
    if own.what == "page" and given:
        parser.error(f"{', '.join(given)}: page trains nothing; drop what belongs to run")
    started = time.monotonic()

    record, good = Record.read(), True
    if own.what == "page" or not record.refusals:
        record.refusals = ask(all_cases())
    record.drop_others(all_cases())
    for text in own.only:
        if not any(text in case.id for case in all_cases()):
            parser.error(f"--only {text!r}: no case has that in its name; tests/distributed/matrix/table.py lists them")
    if own.what == "run":
        with tempfile.TemporaryDirectory(prefix="k3-matrix-") as temporary:
            good = _run(own, record, Runs(own.folder or Path(temporary)), started)
    record.write()
    page.write(record)
    return 0 if good else 1


def _run(own: argparse.Namespace, record: Record, runs: Runs, started: float) -> bool:
    good, done = True, set()
    while time.monotonic() - started < own.limit:
        case = next((case for case in _wanted(record, own) if case.id not in done), None)
        if case is None:
            break
        done.add(case.id)
        outcome = runs.outcome(case)
        record.add(case, outcome)
        record.write()
        good = good and outcome.result in (EQUAL, REFUSED)
        worst = " ".join(f"{name} {value:.0e}" for name, value in outcome.measured.items())
        print(f"{case.id}: {outcome.result}, {outcome.seconds} s, {worst} {outcome.text[-1500:]}", flush=True)
    return good


def _wanted(record: Record, own: argparse.Namespace) -> list[Case]:
    """The cases that decide their cells now; a refusal found in a run makes the next one of the cell decide."""
    deciding = {case.id: case for case in together_cases()}
    deciding |= {cell.case.id: cell.case for cell in cells(record).values()}
    alone = (decide(pair_cases(*pair), record) for pair in pairs())  # those seen among others come last
    deciding |= {cell.case.id: cell.case for cell in alone}
    return [
        case
        for name, case in deciding.items()
        if (own.again or record.of(case) is None)
        and name not in record.refusals
        and (not own.only or any(text in name for text in own.only))
        and not any(text in name for text in own.without)
    ]


if __name__ == "__main__":
    sys.exit(main())
