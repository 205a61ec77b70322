"""What is known of a cell: the first of its cases that is not refused decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.distributed.matrix.cases import FEATURES, Case, axis_cases, pair_cases, pairs, together_cases
from tests.distributed.matrix.record import Record
from tests.distributed.matrix.runs import EQUAL, REFUSED
from tests.distributed.matrix.table import AXES

VERIFIED, REFUSES, NOT_VERIFIED = "verified", "refused", "not verified"


@dataclass(frozen=True)
class Cell:
    """One field of a table."""

    state: str
    case: Case
    """The case that decided."""
    text: str = ""
    """Why it is refused or not verified."""


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
    if first is None:
        raise ValueError("a cell has no case: give table.py a layout for it that has few enough ranks")
    return first


def pair_cell(first: str, second: str, record: Record) -> Cell:
    """Two features by themselves; where they were not run so, among many others at once."""
    alone = decide(pair_cases(first, second), record)
    if alone.state == NOT_VERIFIED and record.of(alone.case) is None:
        for case in together_cases():
            among = decide([case], record)
            if {first, second} <= set(case.features) and among.state == VERIFIED:
                return among
    return alone


def cells(record: Record) -> dict[tuple[str, str], Cell]:
    """All cells, by (feature, axis) and by (feature, feature)."""
    found = {(feature, axis): decide(axis_cases(feature, axis), record) for feature in FEATURES for axis in AXES}
    return found | {pair: pair_cell(*pair, record) for pair in pairs()}
