"""What is known of a cell: the first of its cases that is not refused decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.distributed.matrix.cases import FEATURES, Case, axis_cases, pair_cases, pairs
from tests.distributed.matrix.record import Record
from tests.distributed.matrix.runs import EQUAL, REFUSED
from tests.distributed.matrix.table import AXES, CITED

VERIFIED, REFUSES, NOT_VERIFIED = "verified", "refused", "not verified"


@dataclass(frozen=True)
class Cell:
    """One field of a table."""

    state: str
    case: Case | None = None
    """The case that decided; None where a test outside the matrix did."""
    text: str = ""
    """Why it is refused or not verified, or the test outside the matrix."""


def decide(cases: Sequence[Case], record: Record) -> Cell:
    """Of the cases of a cell, in the order in which they are tried."""
    first = None
    for case in cases:
        entry = record.of(case)
        refusal = record.refusals.get(case.id) or (entry["text"] if entry and entry["result"] == REFUSED else None)
        if refusal:
            first = first or Cell(REFUSES, case, refusal)
        elif entry is None:
            return Cell(NOT_VERIFIED, case, "not run")
        elif entry["result"] == EQUAL:
            return Cell(VERIFIED, case)
        else:
            return Cell(NOT_VERIFIED, case, f"{entry['result']}: {entry['text']}")
    return first


def axis_cell(feature: str, axis: str, record: Record) -> Cell:
    """A cell of the first table."""
    cell = decide(axis_cases(feature, axis), record)
    cited = CITED.get((feature, axis))
    if cell.state == NOT_VERIFIED and cell.text == "not run" and cited:
        return Cell(VERIFIED, None, f"{cited.what} (`{cited.test}`)")
    return cell


def cells(record: Record) -> dict[tuple[str, str], Cell]:
    """All cells, by (feature, axis) and by (feature, feature)."""
    found = {(feature, axis): axis_cell(feature, axis, record) for feature in FEATURES for axis in AXES}
    return found | {pair: decide(pair_cases(*pair), record) for pair in pairs()}
