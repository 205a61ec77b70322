"""`docs/verification.json`: what came of the cases, kept with the code.

    {"refusals": {case id: sentence}, "cases": {case id: {digest, result, measured, bounds, ...}}}
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from k3_plugins.atomic import replacing
from k3_plugins.compat.versions import installed_versions
from tests.distributed.matrix.cases import Case
from tests.distributed.matrix.runs import EQUAL, Outcome

PATH = Path(__file__).resolve().parents[3] / "docs" / "verification.json"
NAMED = ("torch", "megatron-core", "nvidia-modelopt")


@dataclass
class Record:
    """The contents of the file."""

    refusals: dict[str, str] = field(default_factory=dict)
    """What is refused before anything runs, by case id."""
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = PATH) -> Record:
        """Empty if there is no file yet."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path = PATH) -> None:
        """Sorted, so that a change shows as one."""
        ordered = {key: dict(sorted(value.items())) for key, value in asdict(self).items()}
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(ordered, indent=1) + "\n")

    def of(self, case: Case) -> dict[str, Any] | None:
        """What is known of a case; None if nothing, or if it was another command line or is held to another bound now.

        A tighter bound that the measured value stays below makes no difference.
        """
        entry, bounds = self.cases.get(case.id), case.compared
        if entry is None or entry["digest"] != case.digest:
            return None
        if entry["result"] == EQUAL:
            measured = entry["measured"]
            good = measured.keys() == bounds.keys() and all(measured[name] <= bounds[name] for name in bounds)
        else:
            good = not entry["bounds"] or entry["bounds"] == bounds
        return entry if good else None

    def add(self, case: Case, outcome: Outcome) -> None:
        """In place of what was known."""
        versions = {v.name: v.installed for v in installed_versions() if v.name in NAMED}
        measured = {name: float(f"{value:.1e}") for name, value in outcome.measured.items()}
        entry = {"digest": case.digest, **asdict(outcome), "measured": measured}
        self.cases[case.id] = entry | {"date": date.today().isoformat(), "versions": versions}

    def drop_others(self, cases: list[Case]) -> None:
        """Forget cases that no cell needs any more, or that were other command lines."""
        self.cases = {case.id: self.cases[case.id] for case in cases if self.of(case) is not None}
