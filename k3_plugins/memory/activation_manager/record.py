"""What a run's activations cost, as one JSON file for each rank in the folder of ``--activation-report``.

This module imports neither torch nor megatron.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3_plugins.atomic import replacing
from k3_plugins.feature import FeatureError

if TYPE_CHECKING:
    from k3_plugins.memory.activation_manager.manager import ActivationManager

FORMAT = 1


def check_folder(folder: str) -> None:
    """Whether ``--activation-report`` can be written; the folder is made with the first record.

    Raises:
        FeatureError: if it, or where it would be made, is no folder or cannot be written to.
    """
    place = Path(folder).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise FeatureError(f"--activation-report {folder}: {place} is no folder; name a folder that can be written")
    if not os.access(place, os.W_OK):
        raise FeatureError(f"--activation-report {folder}: {place} cannot be written to; name another folder")


def write_record(folder: str, manager: ActivationManager, args: Any, iteration: int) -> Path:
    """Write this rank's file, atomically; returns its path.

    Raises:
        FeatureError: if the folder cannot be written.
    """
    contents = {
        "format": FORMAT,
        "rank": args.rank,
        "iteration": iteration,
        "rules": [str(rule) for rule in manager.rules.rules],
        "min_bytes": manager.smallest,
        "peak_device_bytes": manager.ledger.peak,
        "peak_host_bytes": manager.pool.peak,
        "blocked_seconds": manager.blocked.seconds,
        "blocked_waits": manager.blocked.waits,
        "passes": manager.passes,
        "remote": _remote(manager),
        "chunks": [
            {"chunk": number, "rows": [asdict(row) for row in rows]} for number, rows in sorted(manager.rows.items())
        ],
    }
    path = Path(folder) / f"rank{args.rank:05d}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(contents, indent=1) + "\n")
    except OSError as error:
        raise FeatureError(f"--activation-report {folder}: {error}; name a folder that can be written") from error
    return path


def _remote(manager: ActivationManager) -> dict[str, Any] | None:
    carrier, plan = manager.remote, manager.plan
    if carrier is None or plan is None:
        return None
    return {
        "level": manager.level,
        "plan": {"unlevelled": plan.unlevelled, "levelled": plan.levelled},
        "sent_bytes": carrier.sent_bytes,
        "fetched_bytes": carrier.fetched_bytes,
        "blocked_seconds": carrier.blocked.seconds,
        "leases": [
            {"lender": lease.lender, "nbytes": lease.region.nbytes, "peak": lease.region.peak}
            for lease in carrier.leases
        ],
    }


def read_records(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every rank's file, by rank.

    Raises:
        FeatureError: if there is none, or one cannot be read.
    """
    paths = sorted(Path(folder).glob("rank*.json"))
    if not paths:
        raise FeatureError(f"{folder} holds no rank*.json: give the folder of a run with --activation-report")
    records = []
    for path in paths:
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise FeatureError(f"{path} cannot be read: {error}") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise FeatureError(f"{path} is not a record of this version (format {FORMAT})")
        records.append(record)
    return records
