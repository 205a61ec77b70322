"""The tables of docs/verification.md, from the record; everything outside the markers is left alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3_plugins.atomic import replacing
from tests.distributed.matrix.cases import FEATURES, subject, together_cases
from tests.distributed.matrix.cells import REFUSES, VERIFIED, Cell, cells, decide
from tests.distributed.matrix.record import PATH as RECORD
from tests.distributed.matrix.record import Record
from tests.distributed.matrix.table import ATTENTION, AXES, BF16, PAIRS, SAVED, STEPS, TOGETHER, Bounds, Layout

PATH = RECORD.with_suffix(".md")
BEGIN = "<!-- matrix: written by python -m tests.distributed.matrix page; edits between the marks are lost -->"
END = "<!-- end of the matrix -->"

WORDS = {
    "loss": "the loss of every step",
    "norm": "the gradient norm of every step",
    "gradients": "every gradient of the first step (over its tensor's largest entry)",
    "all_gradients": "all gradients of the first step as one vector",
    "parameters": "every parameter after the last step (over its tensor's largest entry)",
}


def write(record: Record, path: Path = PATH) -> None:
    """Put the tables between the markers."""
    text = with_tables(path.read_text(), record)
    with replacing(path) as temporary:
        temporary.write_text(text)


def with_tables(page: str, record: Record) -> str:
    """A page with what stands between its markers replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"the page has lost its markers {BEGIN!r} and {END!r}"
    return f"{before}{BEGIN}\n{tables(record)}\n{END}{after}"


def tables(record: Record) -> str:
    """Everything between the markers, as Markdown."""
    found, notes = cells(record), Notes()
    return "\n\n".join(
        [
            _introduction(record, found),
            _features_by_axis(found, record, notes),
            _pairs(found, record, notes),
            _how(found, record),
            _bounds(),
            notes.text(),
        ]
    )


class Notes:
    """Numbered sentences below the tables, each once."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def mark(self, sentence: str) -> str:
        """Its number, as a superscript."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)
        return f"<sup>{self.sentences.index(sentence) + 1}</sup>"

    def text(self) -> str:
        """The list."""
        return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(self.sentences, 1))


def _introduction(record: Record, found: dict[tuple[str, str], Cell]) -> str:
    states = [cell.state for cell in found.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states, reverse=True)))
    decided = [record.of(cell.case) for cell in found.values() if cell.state == VERIFIED]
    versions = sorted({", ".join(f"{k} {v}" for k, v in entry["versions"].items()) for entry in decided})
    dates = sorted({entry["date"] for entry in decided})
    when = f" Run {' to '.join(dict.fromkeys([dates[0], dates[-1]]))} with {'; '.join(versions)}." if dates else ""
    return (
        f"{len(found)} cells: {counts}.{when} A small K3 ({', '.join(ATTENTION)}; MoE layers where the row or column"
        f" is about them) trains {STEPS} steps through the product's door and is compared with one process that has"
        " neither the column nor, where a feature changes only how the same model is computed"
        f" ({', '.join(name for name in FEATURES if subject(name).same_model)}), the row, from one checkpoint in which"
        " every vector is random. A number is the cell's largest relative difference of losses, norms and gradients;"
        " **R** is refused, with the sentence below; **–** is not verified, and the sentence below says what happened."
        f" Every case with its measured values is in [{RECORD.name}]({RECORD.name})."
    )


def _field(cell: Cell, usual: Layout, record: Record, notes: Notes) -> str:
    if cell.state == REFUSES:
        return f"R{notes.mark(_words(cell))}"
    if cell.state != VERIFIED:
        return f"–{notes.mark(_words(cell))}"
    under = "" if cell.case.layout == usual else notes.mark(f"{cell.case.layout.name}.")
    return f"✓ {_number(_worst(record.of(cell.case)))}{under}"


def _words(cell: Cell) -> str:
    lines = [line.strip() for line in cell.text.replace("|", "\\|").splitlines() if line.strip()]
    return lines[-1] if cell.text.startswith("failed") and lines else " ".join(lines)


def _worst(entry: dict[str, Any]) -> float:
    return max(value for name, value in entry["measured"].items() if name != "parameters")


def _number(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _features_by_axis(found: dict[tuple[str, str], Cell], record: Record, notes: Notes) -> str:
    rows = [
        [f"`{feature}`", *(_field(found[feature, axis], AXES[axis][0], record, notes) for axis in AXES)]
        for feature in FEATURES
    ]
    return "### Features by axis\n\n" + _table(["", *AXES], rows)


def _pairs(found: dict[tuple[str, str], Cell], record: Record, notes: Notes) -> str:
    rows = []
    for place, feature in enumerate(FEATURES):
        others = [_field(found[feature, other], PAIRS[0], record, notes) for other in FEATURES[place + 1 :]]
        rows.append([f"{place + 1} `{feature}`", *[""] * place, "·", *others])
    text = f"Both features under {PAIRS[0].name}, on 4 processes, or as noted."
    table = _table(["", *map(str, range(1, len(FEATURES) + 1))], rows)
    many = [
        f"- {case.layout.name}, {len(case.features)} features: "
        f"{_field(decide([case], record), case.layout, record, notes)}"
        for case in together_cases()
    ]
    return "\n\n".join(["### Pairs of features", text, table, "Many at once:", "\n".join(many)])


def _how(found: dict[tuple[str, str], Cell], record: Record) -> str:
    """A line for every layout: its flags, what it was compared with, and the worst that was measured."""
    rows = []
    layouts = [*itertools.chain(*AXES.values()), *PAIRS, *(layout for layout, _ in TOGETHER)]
    decided = [cell.case for cell in found.values() if cell.state == VERIFIED]
    decided += [case for case in together_cases() if decide([case], record).state == VERIFIED]
    for layout in dict.fromkeys(layouts):
        verified = {case.id: record.of(case) for case in decided if case.layout == layout}
        if verified:
            rows.append(_line(layout, list(verified.values())))
    header = ["layout", "flags", "compared with", "cases", "largest differences"]
    return "### How\n\n" + _table(header, rows)


def _line(layout: Layout, entries: list[dict[str, Any]]) -> list[str]:
    names = [name for name in WORDS if any(name in entry["measured"] for entry in entries)]
    worst = {name: max(entry["measured"].get(name, 0) for entry in entries) for name in names}
    flags = f"`{layout.words}`" if layout.words else ""
    measured = ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in worst.items())
    return [layout.name, flags, layout.compared_with, str(len(entries)), measured]


def _bounds() -> str:
    def words(bounds: Bounds) -> str:
        return ", ".join(
            f"{name.replace('_', ' ')} {bound:.0e}" for name, bound in asdict(bounds).items() if bound is not None
        )

    own = [
        f"`{name}` {', '.join(_changed(subject(name).bounds))}"
        for name in FEATURES
        if subject(name).bounds != Bounds()
    ]
    unread = ", ".join(f"`{name}`" for name in FEATURES if not subject(name).gradients_in_buffers)
    compared = "; ".join(f"{name.replace('_', ' ')}: {text}" for name, text in WORDS.items())
    return (
        f"What is compared: {compared}. Bounds: {words(Bounds())}; bf16 {words(BF16)}; resume: the same bits. Wider"
        f" ones, with their reasons in `tests/distributed/matrix/table.py`: {'; '.join(own)}. With {unread} no"
        f" gradients are read, the parameters stand for them. `resume` and `re-layout` go on from step {SAVED} with its"
        " optimizer. Again: `python -m tests.distributed.matrix run --again --only 'attnres | PP 2'`; all of it:"
        " `bash tests/run.sh -m slow tests/distributed/test_matrix.py`."
    )


def _changed(bounds: Bounds) -> list[str]:
    usual = asdict(Bounds())
    return [f"{name} {bound:.0e}" for name, bound in asdict(bounds).items() if bound not in (None, usual[name])]


