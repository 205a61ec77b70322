"""One benchmark in processes of its own, under a time limit, and the file that keeps what came of it.

    result = run(benchmark, "quick")
    keep(path, benchmark.name, result)      # re-reads the file: other results in it stay

A result has the form ("quick" or "full"), command, date, machine, versions, load, and either `output`, the object that
the script printed with --json, or `failure`, a sentence.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report.claims import Benchmark
from benchmarks.report.machine import Load, machine, versions
from k3_plugins import child_process
from k3_plugins.atomic import replacing

ROOT = Path(__file__).resolve().parents[2]
FILE = "{json}"
"""Stands in a benchmark's arguments for a file that the script writes instead of printing."""

Result = dict[str, Any]


class Failure(Exception):
    """A script that failed, with the sentence that the page shows."""


def run(benchmark: Benchmark, form: str) -> Result:
    """Run the script; a script that fails or takes too long gives a result with the reason."""
    arguments, limit = benchmark.forms[form].arguments.split(), benchmark.forms[form].limit
    shown = " ".join(["python", f"benchmarks/{benchmark.script}", *arguments]).replace(FILE, "FILE")
    result: Result = {
        "form": form,
        "command": shown,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": machine(),
        "versions": versions(),
    }
    before = Load.now()
    try:
        result["output"] = _output(benchmark.script, arguments, limit)
    except Failure as failure:
        result["failure"] = str(failure)
    return {**result, "load": Load.now().since(before)}


def _output(script: str, arguments: list[str], limit: float) -> Any:
    """What the script reports as JSON.

    Raises:
        Failure: it ended with an error, ran longer than `limit` seconds, or reported no JSON.
    """
    with tempfile.TemporaryDirectory(prefix="k3-benchmark-") as folder:
        file = Path(folder) / "report.json"
        words = [str(file) if word == FILE else word for word in arguments]
        search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        try:
            process = child_process.run(
                [sys.executable, str(ROOT / "benchmarks" / script), *words],
                timeout=limit,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": search},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except subprocess.TimeoutExpired:
            raise Failure(f"longer than the limit of {limit:g} s") from None
        if process.returncode:
            raise Failure(f"exit code {process.returncode}: {last_line(process.stderr)}")
        text = file.read_text() if FILE in arguments and file.exists() else process.stdout
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise Failure(f"its report is not JSON: {error}") from None


def last_line(text: str) -> str:
    """The last line of an error output, without folders of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"(?:/[\w.+@-]+)+/", "", lines[-1]) if lines else "no message"


def load(path: Path) -> dict[str, Result]:
    """All results by benchmark; none if the file is not there yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, name: str, result: Result) -> dict[str, Result]:
    """Put one result into the file, whole or not at all; returns all that are there now."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # another run may keep its own results at the same time
        results = {**load(path), name: result}
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    finally:
        os.close(folder)
    return results
