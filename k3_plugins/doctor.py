"""``python -m k3_plugins.doctor``: what would be on, what would be patched, what is missing, and why.

    python -m k3_plugins.doctor                              # every feature by itself
    python -m k3_plugins.doctor --k3-plugins kda,gated-mla   # this set, as training would activate it
    python -m k3_plugins.doctor --k3-plugins kda [training flags]   # and parse and validate these flags
    python -m k3_plugins.doctor --k3-plugins kda --ranks 4096 [training flags]   # and let Megatron check them, too
    python -m k3_plugins.doctor --k3-plugins per-head-muon --optimizer [training flags]   # what updates what
    python -m k3_plugins.doctor --json

Needs no GPU and starts no torch.distributed. Exit code 0: all as verified. 1: activation would succeed, but something
differs from what was verified. 2: activation would fail.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout

from k3_plugins import platform
from k3_plugins.arguments import parse_control
from k3_plugins.diagnosis import Diagnosis, checkout_hint, diagnose
from k3_plugins.failure import fail
from k3_plugins.feature import FeatureError
from k3_plugins.platform import PlatformError

_MARKS = {
    0: "[green]all as verified[/green]",
    1: "[yellow]usable, with differences[/yellow]",
    2: "[red]not usable[/red]",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit code (see the module docstring)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(__doc__)
        return 0
    as_json, show_optimizer = "--json" in words, "--optimizer" in words
    try:
        ranks, words = _ranks(_without_switches(words))
        control, training_flags = parse_control(words)
    except FeatureError as error:
        fail(str(error))
    if show_optimizer or ranks:  # a model, and Megatron's checks, need the platform before anything imports Megatron
        try:
            platform.select(control.platform)
        except PlatformError as error:
            fail(str(error))
    warnings.simplefilter("ignore")  # what packages warn about on import is not what is wrong with this installation
    with redirect_stdout(sys.stderr):  # packages print on import; --json must stay parseable
        diagnosis = diagnose(control, training_flags, ranks)
        if show_optimizer and not diagnosis.problems:
            _add_optimizer(diagnosis, words)
    if as_json:
        print(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        render(diagnosis)
    return diagnosis.verdict


def _without_switches(words: Sequence[str]) -> list[str]:
    """The words without the doctor's own; ``--optimizer`` with a value is Megatron's flag as well, and stays."""
    kept = []
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        if word != "--json" and not (word == "--optimizer" and following.startswith("--")):
            kept.append(word)
    return kept


def _ranks(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """The value of ``--ranks``, and the other words.

    Raises:
        FeatureError: if it is no number of ranks.
    """
    words = list(words)
    if "--ranks" not in words:
        return None, words
    place = words.index("--ranks")
    value = words[place + 1] if place + 1 < len(words) else ""
    if not value.isdecimal() or int(value) < 1:
        raise FeatureError(f"--ranks {value or '(nothing)'} must be a whole number from 1")
    return int(value), words[:place] + words[place + 2 :]


def _add_optimizer(diagnosis: Diagnosis, words: Sequence[str]) -> None:
    """The table of ``--optimizer``. Activates the features, hence after everything that must see Megatron unpatched."""
    from k3_plugins.optimizer.per_head_muon.doctor import optimizer_rows

    try:
        diagnosis.optimizer = optimizer_rows(words)
    except FeatureError as error:
        diagnosis.problems.append(str(error))
    except SystemExit:
        diagnosis.problems.append("--optimizer: no model can be built with these flags; the reason is printed above")


def render(diagnosis: Diagnosis) -> None:
    """Print the report for people."""
    from rich.console import Console
    from rich.markup import escape

    from k3_plugins.activation_report import output_width

    console = Console(width=output_width(), highlight=False)
    megatron = diagnosis.megatron
    if megatron:
        console.print(
            f"[bold]Megatron[/bold] {megatron['version']} ({megatron['kind']}) in {escape(megatron['path'])}, compared "
            f"with the fingerprints {megatron['fingerprints']}"
        )
    if diagnosis.platform:
        console.print(f"[bold]Platform[/bold] {diagnosis.platform['chosen']}: {escape(diagnosis.platform['reason'])}")
    for door in diagnosis.doors:
        console.print(f"[bold]Door[/bold] {escape(door['door'])}: {escape(door['state'])}")
    for table in _tables(diagnosis):
        console.print(table)
    if diagnosis.layout:
        sizes = (f"{name} {value}" for name, value in diagnosis.layout.items() if value not in (None, False))
        console.print(f"[bold]Megatron accepts[/bold] {escape(', '.join(sizes))}", soft_wrap=True)
    for line in diagnosis.optional:
        if not line["available"]:  # not in the table: a command that is folded cannot be copied
            console.print(f"{line['module']}: {escape(line['install'])}", soft_wrap=True)
    for patch in diagnosis.patches:
        if patch["diff"]:
            console.print(f"\n[bold]{escape(patch['message'])}[/bold]")
            console.print(escape(patch["diff"]))
            hint = checkout_hint(diagnosis, patch["target"])
            if hint:
                console.print(f"With its history: {escape(hint)}")
    for warning in diagnosis.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}")
    for problem in diagnosis.problems:
        console.print(f"[red]problem:[/red] {escape(problem)}")
    console.print(f"[bold]Verdict[/bold] {_MARKS[diagnosis.verdict]} (exit code {diagnosis.verdict})")


def _tables(diagnosis: Diagnosis) -> list:
    return [
        _table(
            "Versions",
            ("package", "installed", "verified", ""),
            [
                (line["name"], line["installed"] or "missing", line["verified"], "ok" if line["same"] else "differs")
                for line in diagnosis.versions
            ],
        ),
        _table(
            "Features",
            ("name", "what", "backend", "needs", "from"),
            [
                (
                    line["name"],
                    line["error"] or line["summary"],
                    _backends(line),
                    ", ".join(line.get("requires", ())),
                    line["origin"],
                )
                for line in diagnosis.features
            ],
        ),
        _table(
            "Patches",
            ("id", "kind", "target", "state"),
            [(line["id"], line["kind"], line["target"], line["state"]) for line in diagnosis.patches],
        ),
        _table(
            "Optional packages",
            ("module", "state", "serves"),
            [
                (
                    line["module"],
                    "available" if line["available"] else line["error"],
                    line["serves"],
                )
                for line in diagnosis.optional
            ],
        ),
        *_optimizer_table(diagnosis),
    ]


def _optimizer_table(diagnosis: Diagnosis) -> list:
    rows = [
        (line["parameter"], " x ".join(map(str, line["shape"])), line["split"], line["owner_group"], line["optimizer"])
        for line in diagnosis.optimizer
    ]
    return [_table("Optimizer", ("parameter", "shape", "split", "owner group", "optimizer"), rows)] if rows else []


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> object:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _backends(line: dict) -> str:
    backends = line.get("backends", ())
    words = [f"{item['name']}: {item['why']}" for item in backends if item["chosen"]]
    words += [f"not {item['name']}: {item['why']}" for item in backends if not item["chosen"]]
    return "\n".join(words)


if __name__ == "__main__":
    sys.exit(main())
