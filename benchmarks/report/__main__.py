"""Run the benchmarks and write docs/benchmarks.md.

    python -m benchmarks.report [--quick] [--only NAME ...]     # run, then write the page
    python -m benchmarks.report --render                        # the page from docs/benchmarks.json, nothing is run

Every script runs in a process of its own, one after the other, under a time limit. Results go into docs/benchmarks.json
one by one, so that a run that is broken off loses nothing, and --only leaves the others as they are. The exit code is 1
if a line of the page says "not run" because a script failed, took too long, or was never run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.report.claims import BENCHMARKS
from benchmarks.report.page import lines, render
from benchmarks.report.run import ROOT, keep, load, run
from k3_plugins.atomic import replacing


def main(argv: list[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--quick", action="store_true", help="measure less, in minutes instead of hours")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=f"of {', '.join(names)}")
    what.add_argument("--render", action="store_true", help="write the page from the results that are there")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", metavar="DIR", help="folder of both files")
    options = parser.parse_args(argv)
    if options.quick and options.render:
        parser.error("--quick says how to run benchmarks, and --render runs none: leave one out")
    if not options.output.is_dir():
        parser.error(f"--output {options.output}: no such folder")
    if options.render and not (options.output / "benchmarks.json").is_file():
        parser.error(f"--output {options.output}: no benchmarks.json there to make the page from")
    results_file, form = options.output / "benchmarks.json", "quick" if options.quick else "full"
    for benchmark in BENCHMARKS:
        if not options.render and (options.only is None or benchmark.name in options.only):
            print(f"{benchmark.name}: {form} form, at most {benchmark.forms[form].limit:g} s", flush=True)
            result = run(benchmark, form)
            keep(results_file, benchmark.name, result)
            print(f"  {result.get('failure', 'done')} after {result['load']['seconds']:.0f} s", flush=True)
    results = load(results_file)
    with replacing(options.output / "benchmarks.md") as temporary:
        temporary.write_text(render(BENCHMARKS, results))
    missing = [line for line in lines(BENCHMARKS, results) if line.verdict == "not run"]
    for reason in dict.fromkeys(line.not_run for line in missing):
        named = ", ".join(line.claim.id for line in missing if line.not_run == reason)
        print(f"not run, {reason}: {named}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    raise SystemExit(main())
