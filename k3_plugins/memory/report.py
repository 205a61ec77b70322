"""What saved activations cost in a run, by layer and policy, and what they would cost under other policies.

    python -m k3_plugins.memory.report FOLDER                                    the run's own numbers
    python -m k3_plugins.memory.report FOLDER --what-if "*=fp8+cpu"              the same tensors under other rules
    python -m k3_plugins.memory.report FOLDER --by tensor --rank 0 --json

FOLDER is that of ``--activation-report``. Bytes are those of one micro-batch's forward pass through every chunk of a
rank, the last one; a pipeline holds several. (A rank sends remote tensors away only while it is above its level; what
it sent in all is printed below the table.) The what-if applies the rules to the recorded names: FP8 only where values
may be rounded, recompute only where the code says how; a module that a rule would make a function of its own is not
known from a record. This module imports neither torch nor megatron.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from k3_plugins.feature import FeatureError
from k3_plugins.memory.activation_manager.record import read_records
from k3_plugins.memory.activation_manager.rules import RuleBook, parse_rules
from k3_plugins.memory.policy import Policy, coded_bytes

MIB = 1 << 20
PLACES = ("device", "cpu", "remote", "dropped")


def place_of(policy: str) -> str:
    """Where bytes under a policy are."""
    parsed = Policy(policy)
    return "dropped" if parsed is Policy.RECOMPUTE else parsed.place


def what_if(record: dict[str, Any], rules: RuleBook) -> list[dict[str, Any]]:
    """The rows of a record under other rules."""
    rows = []
    for row in rows_of(record):
        policy = rules.tensor(row["name"], row["number"], None, row["rebuildable"])
        if policy.coded and not row["codable"]:
            policy = policy.exact
        if row["nbytes"] < record["min_bytes"] and policy is not Policy.RECOMPUTE:
            policy = Policy.KEEP
        stored = 0 if policy is Policy.RECOMPUTE else coded_bytes(row["elements"]) if policy.coded else row["nbytes"]
        rows.append({**row, "policy": policy.value, "stored": stored})
    return rows


def rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of a rank."""
    return [row for chunk in record["chunks"] for row in chunk["rows"]]


def totals(rows: Iterable[dict[str, Any]], key: str) -> dict[tuple[str, str], dict[str, int]]:
    """Bytes by (layer or tensor name, policy): original, and stored by place."""
    sums: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: dict.fromkeys(("original", *PLACES), 0))
    for row in rows:
        entry = sums[row[key], row["policy"]]
        place = place_of(row["policy"])
        entry["original"] += row["nbytes"]
        entry[place] += row["nbytes"] if place == "dropped" else row["stored"]
    return dict(sums)


def _report(record: dict[str, Any], rows: list[dict[str, Any]], by: str) -> dict[str, Any]:
    table = totals(rows, {"layer": "layer", "tensor": "name"}[by])
    total = {column: sum(entry[column] for entry in table.values()) for column in ("original", *PLACES)}
    measured = (
        "iteration",
        "peak_device_bytes",
        "peak_host_bytes",
        "blocked_seconds",
        "blocked_waits",
        "passes",
        "remote",
    )
    return {
        "rank": record["rank"],
        "rows": [{by: name, "policy": policy, **entry} for (name, policy), entry in table.items()],
        "total": total,
        **{name: record[name] for name in measured},
        "remote": record["remote"],
    }


def _print(report: dict[str, Any], by: str, rules: Sequence[str], hypothetical: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    kind = "what if" if hypothetical else "measured"
    title = f"rank {report['rank']}, {kind}: {', '.join(rules)} (MiB of one micro-batch)"
    table = Table(title=title, title_justify="left")
    for column in (by, "policy", "saved", "on the device", "host", "remote", "dropped"):
        table.add_column(column, justify="left" if column in (by, "policy") else "right", overflow="fold")
    for row in [*report["rows"], {by: "total", "policy": "", **report["total"]}]:
        sizes = (f"{row[column] / MIB:.3f}" for column in ("original", *PLACES))
        table.add_row(row[by], row["policy"], *sizes)
    console = Console()
    console.print(table)
    if not hypothetical:
        console.print(
            f"peak of the run: {report['peak_device_bytes'] / MIB:.3f} MiB on the device, "
            f"{report['peak_host_bytes'] / MIB:.3f} MiB of host buffers; the backward pass waited "
            f"{report['blocked_seconds']:.3f} s in {report['blocked_waits']} fetches",
            highlight=False,
        )
        if (remote := report["remote"]) is not None:
            lenders = ", ".join(f"rank {lease['lender']} {lease['peak'] / MIB:.3f}" for lease in remote["leases"])
            console.print(
                f"remote, whole run: {remote['sent_bytes'] / MIB:.3f} MiB sent, most at a time (MiB): "
                f"{lenders or 'none'}; level {remote['level'] / MIB:.3f} MiB, waited {remote['blocked_seconds']:.3f} s",
                highlight=False,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or 2 with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m k3_plugins.memory.report", description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="of --activation-report")
    parser.add_argument("--what-if", metavar="RULES", help="rules as for --activation-policy")
    parser.add_argument("--by", choices=("layer", "tensor"), default="layer")
    parser.add_argument("--rank", type=int, help="one rank only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        records = read_records(options.folder)
        if options.rank is not None:
            records = [record for record in records if record["rank"] == options.rank]
            if not records:
                raise FeatureError(f"--rank {options.rank}: {options.folder} holds no record of that rank")
        book = None if options.what_if is None else RuleBook(parse_rules(options.what_if))
        reports = []
        for record in records:
            rows = rows_of(record) if book is None else what_if(record, book)
            reports.append(_report(record, rows, options.by))
        if book is not None:
            for rule, hits in zip(book.rules, book.hits, strict=True):
                if not hits:
                    raise FeatureError(f"--what-if: rule {str(rule)!r} matches no recorded tensor")
    except FeatureError as error:
        print(f"activation report: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(reports, indent=1))
        return 0
    rules = records[0]["rules"] if book is None else [str(rule) for rule in book.rules]
    for report in reports:
        _print(report, options.by, rules, hypothetical=book is not None)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
