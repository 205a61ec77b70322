"""The page of benchmarks: it is what the results say, links to it resolve, and a script that fails is seen."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report import __main__ as report
from benchmarks.report.claims import BENCHMARKS, Benchmark, Claim, Form
from benchmarks.report.page import Line, lines, quantity, render
from benchmarks.report.readers import Reading, moonep_slots, row
from benchmarks.report.run import FILE, last_line, load, run
from tests.harness.processes import ended, waits

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "benchmarks.md"
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')

TOY = """
import json, subprocess, sys, time
kind = sys.argv[1]
if kind == "fails":
    sys.exit("Traceback\\n/some/folder/of/mine/toy.py: no such number")
if kind == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(sys.argv[2], "w").write(str(child.pid))
    time.sleep(600)
if kind == "babbles":
    print("no JSON")
elif kind == "file":
    print("a table for people")
    json.dump({"ours": 1, "peer": 2}, open(sys.argv[2], "w"))
else:
    print(json.dumps({"ours": float(kind), "peer": 2.0, "n": 7}))
"""


def numbers(output):
    return Reading(output["ours"], output["peer"], {"n": output.get("n")})


def toy(tmp_path, arguments, name="toy", limit=60.0):
    script = tmp_path / "toy.py"
    script.write_text(TOY)
    claims = (
        Claim(f"{name}-rows", "rows of {n} | ours against a peer", "count", "rows", numbers),
        Claim(f"{name}-more", "what only the full form measures", "time", "s", numbers, full_only=True),
    )
    form = Form(arguments, limit)
    return Benchmark(name, str(script), f"Title of {name}", form, form, claims)


def test_the_page_is_what_the_results_say():
    results = load(ROOT / "docs" / "benchmarks.json")
    assert PAGE.read_text() == render(BENCHMARKS, results), "python -m benchmarks.report --render"
    assert set(results) <= {benchmark.name for benchmark in BENCHMARKS}


def test_every_link_to_a_line_resolves():
    anchors = ANCHOR.findall(PAGE.read_text())
    assert len(anchors) == len(set(anchors))
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "k3_plugins").rglob("README.md")]
    links = {
        (page.relative_to(ROOT), anchor)
        for page in pages
        for anchor in re.findall(r"benchmarks\.md#([\w-]+)", page.read_text())
    }
    assert {anchor for page, anchor in links if page.name == "README.md"}, "README.md points to no line"
    assert not {link for link in links if link[1] not in anchors}
    # a claim may not rest on a line that was never measured
    unread = {line.claim.id for line in lines(BENCHMARKS, load(ROOT / "docs" / "benchmarks.json")) if not line.reading}
    assert not {link for link in links if link[1] in unread}


def test_every_script_is_in_the_list_with_flags_that_it_has():
    listed = [name for b in BENCHMARKS for name in (b.script, *b.parts)]
    assert sorted(listed) == sorted(f.name for f in (ROOT / "benchmarks").glob("*.py") if f.name != "__init__.py")
    for benchmark in BENCHMARKS:
        source = (ROOT / "benchmarks" / benchmark.script).read_text()
        for form in benchmark.forms.values():
            flags = re.findall(r"--[a-z-]+", form.arguments)
            assert "--json" in flags and not [flag for flag in flags if f'"{flag}"' not in source], benchmark.name
        assert benchmark.claims


def test_a_result_has_what_the_numbers_belong_to_and_no_path(tmp_path):
    result = run(toy(tmp_path, "1"), "quick")
    assert result["output"] == {"ours": 1.0, "peer": 2.0, "n": 7} and "failure" not in result
    assert result["machine"]["cores"] >= 1 and result["machine"]["memory_bytes"] > 2**28
    assert result["versions"]["python"] == sys.version.split()[0] and result["versions"]["megatron-core"]
    assert result["load"]["seconds"] >= 0  # a toy may be done before the clock moves
    assert run(toy(tmp_path, f"file {FILE}"), "full")["output"] == {"ours": 1, "peer": 2}
    assert run(toy(tmp_path, f"file {FILE}"), "full")["command"].endswith("toy.py file FILE")
    failure = run(toy(tmp_path, "fails"), "full")["failure"]
    assert failure == "exit code 1: toy.py: no such number"
    assert "not JSON" in run(toy(tmp_path, "babbles"), "full")["failure"]
    assert last_line("") == "no message"


def test_a_script_that_takes_too_long_is_ended_with_its_processes(tmp_path):
    pid = tmp_path / "pid"
    for limit in (2, 8, 32):  # on a busy machine its process may start late
        failure = run(toy(tmp_path, f"hangs {pid}", limit=limit), "full")["failure"]
        assert failure == f"longer than the limit of {limit} s"
        if pid.exists():
            break
    waits(lambda: ended(int(pid.read_text())))


def test_a_report_that_is_terminated_ends_the_script(tmp_path):
    pid, source = tmp_path / "pid", tmp_path / "toy_report.py"
    toy(tmp_path, "")
    source.write_text(
        "import runpy, sys\nfrom benchmarks.report import claims\n"
        f"form = claims.Form('hangs {pid}', 60)\n"
        f"claims.BENCHMARKS = (claims.Benchmark('toy', {str(tmp_path / 'toy.py')!r}, 'Toy', form, form, ()),)\n"
        f"sys.argv = ['report', '--output', {str(tmp_path)!r}]\n"
        "runpy.run_module('benchmarks.report', run_name='__main__', alter_sys=True)\n"
    )
    process = subprocess.Popen([sys.executable, source], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    waits(lambda: pid.exists() and pid.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    waits(lambda: ended(int(pid.read_text())))
    assert not (tmp_path / "benchmarks.json").exists()


def test_runs_keeps_renders_and_tells_failures(tmp_path, monkeypatch, capsys):
    good, bad = toy(tmp_path, "1", "good"), toy(tmp_path, "fails", "bad")
    monkeypatch.setattr(report, "BENCHMARKS", (good, bad))
    output, page = ["--output", str(tmp_path)], tmp_path / "benchmarks.md"
    assert report.main(["--quick", *output]) == 1
    assert "no such number" in capsys.readouterr().err
    text = page.read_text()
    assert "| count | 1 rows | 2 rows | 0.5 | better |" in text and "rows of 7 \\| ours" in text
    assert "not run: exit code 1: toy.py: no such number" in text and "not run: part of the full form only" in text
    assert "1 better, 0 equal, 0 worse, 1 left out, 2 not run" in text
    before = load(tmp_path / "benchmarks.json")["good"]
    # one again, in another form; the other result stays
    monkeypatch.setattr(report, "BENCHMARKS", (good, toy(tmp_path, "2", "bad")))
    assert report.main(["--only", "bad", *output]) == 0
    results = load(tmp_path / "benchmarks.json")
    assert results["good"] == before and results["bad"]["form"] == "full"
    # the page alone, without any script
    text = page.read_text()
    (tmp_path / "toy.py").unlink()
    page.unlink()
    assert report.main(["--render", *output]) == 0 and page.read_text() == text
    assert {file.name for file in tmp_path.iterdir()} == {"benchmarks.json", "benchmarks.md"}
    (tmp_path / "benchmarks.json").unlink()
    for wrong in (["--only", "nothing"], ["--render", "--quick"], ["--render", "--only", "good"], ["--render"]):
        with pytest.raises(SystemExit, match="2"):
            report.main([*wrong, *output])


def test_lines_say_better_equal_worse_and_busy(tmp_path):
    benchmark = toy(tmp_path, "1")
    claim = benchmark.claims[0]

    def verdict(ours, peer, kind):
        return Line(replace(claim, kind=kind), Reading(ours, peer), "", False, False).verdict

    assert [verdict(ours, 100, "count") for ours in (99, 100, 101)] == ["better", "equal", "worse"]
    assert verdict(1584.0000000001, 1584, "count") == "equal", "sums in another order"
    assert [verdict(ours, 100, "loss") for ours in (97, 101, 103)] == ["better", "equal", "worse"]
    assert [verdict(ours, 100, "CPU time") for ours in (94, 104, 106)] == ["better", "equal", "worse"]
    assert [verdict(ours, 100, "time") for ours in (89, 109, 111)] == ["better", "equal", "worse"]
    assert (verdict(0, 0, "count"), verdict(1, 0, "count")) == ("equal", "worse")
    result = {"form": "full", "output": {"ours": 1, "peer": 2}, "load": {"cores_of_others": 0.5}}
    assert [line.busy for line in lines((benchmark,), {"toy": result})] == [False, True], "counts are never busy"
    timed = replace(benchmark, claims=(replace(claim, kind="CPU time"), replace(claim, kind="memory")))
    assert [line.busy for line in lines((timed,), {"toy": result})] == [True, False]
    result["load"]["cores_of_others"] = 0.0
    assert not any(line.busy for line in lines((benchmark,), {"toy": result}))
    result["output"] = {"ours": 1}
    assert all("KeyError" in line.not_run for line in lines((benchmark,), {"toy": result}))
    assert [line.not_run for line in lines((benchmark,), {})] == ["no result yet"] * 2


def test_without_a_proven_optimum_there_is_nothing_to_compare_with():
    cases = [{"ours": [3, 9], "alias": [4, 10], "optimum": optimum} for optimum in (None, {"proven": False})]
    proven = {"ours": [2, 7], "alias": [4, 10], "optimum": {"proven": True, "redundant": [2, 6]}}
    with pytest.raises(ValueError, match="--ilp-seconds"):
        moonep_slots("optimum", 0)({"rows": cases})
    assert moonep_slots("optimum", 1)({"rows": [*cases, proven]}) == Reading(7, 6, {"cases": 1})
    assert moonep_slots("alias", 0)({"rows": cases}) == Reading(6, 8, {"cases": 2})


def test_quantities_and_rows():
    shown = [
        quantity(*pair) for pair in ((3 * 2**20, "bytes"), (5, "bytes"), (0.0213, "s"), (95.5, "s"), (7168.0, "rows"))
    ]
    assert shown == ["3.00 MiB", "5 bytes", "21.3 ms", "95.5 s", "7,168 rows"]
    rows = json.loads('[{"a": 1, "b": 1}, {"a": 1, "b": 2}]')
    assert row(rows, a=1, b=2) is rows[1]
    for values in ({"a": 1}, {"a": 3}):
        with pytest.raises(KeyError, match="rows with"):
            row(rows, **values)
