"""What the planner's command lines refuse and print: flags to paste, whole numbers, sentences that name the flag."""

import io
import os
import re
import shlex
import sys
from contextlib import redirect_stdout

import pytest

from k3_plugins.models.kimi_k3.config import KIMI_LINEAR, PRESETS
from k3_plugins.plan import dry_run, report
from k3_plugins.plan.__main__ import main
from k3_plugins.plan.cost import Hardware
from k3_plugins.plan.layout import Job, Obstacle, impossible
from k3_plugins.plan.memory import KINDS, Memory, Options
from k3_plugins.plan.search import search

HARDWARE = Hardware(989e12, 0.5, 450e9, 50e9, 8)


def said(capsys, *words, model="kimi_linear"):
    """The last line of the error that a command line ends with."""
    with pytest.raises(SystemExit) as end:
        main(["--model", model, *words])
    assert end.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_the_printed_flags_survive_a_shell(capsys):
    assert main("--model kimi_linear --gpus 64 --policies full --pipeline-parallel 2 --top 1".split()) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("flags: ")]
    pasted = shlex.shlex(line.removeprefix("flags: "), posix=True, punctuation_chars=True)
    pasted.whitespace_split = True
    words = list(pasted)  # as a shell reads them, where an unquoted | is a word of its own
    assert "|" not in words and "|" in words[words.index("--pipeline-model-parallel-layout") + 1]


def test_a_layout_obeys_megatrons_rule_for_context_parallelism():
    def found(context, tp, cp, **changes):
        return impossible(Job(KIMI_LINEAR, 64, context, 1024), tp, cp, 1, 1, 8, 1)

    assert found(8200, 1, 8) == Obstacle.ZIGZAG and found(8208, 1, 8) == ""
    assert found(8200, 1, 1) == "" and found(8208, 4, 8) == Obstacle.SEQUENCE and found(8224, 4, 8) == ""
    wide = KIMI_LINEAR.scaled(dense_ffn_hidden_size=9218)
    assert impossible(Job(wide, 64, 8192, 1024), 4, 1, 1, 1, 8, 1) == Obstacle.WIDTHS


@pytest.mark.parametrize("flag", ["--json", "--png"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(flag, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("k3_plugins.plan.__main__.search", lambda *_: pytest.fail("it searched"))
    folder = tmp_path / "folder.png"
    folder.mkdir()
    base = ("--gpus", "8", flag)
    assert f"{flag} {folder} is a folder; name a file in it" in said(capsys, *base, str(folder))
    assert f"{flag} /nonexistent/x.png: its folder does not exist" in said(capsys, *base, "/nonexistent/x.png")
    assert f"{flag} {os.devnull} is no regular file" in said(capsys, *base, os.devnull)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"{flag} {folder}/x.png: its folder cannot be written to" in said(capsys, *base, f"{folder}/x.png")


def test_the_dry_run_refuses_such_a_file_as_well(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        dry_run.main(["--ranks", "4", "--json", str(tmp_path), "--", "--k3-plugins", "k3"])
    assert end.value.code == 2 and f"--json {tmp_path} is a folder" in capsys.readouterr().err


def test_too_little_host_memory_is_said_with_the_policy_that_needs_least(capsys):
    words = "--gpus 64 --pipeline-parallel 2 --virtual-stages 4 --expert-parallel 8 --tensor-parallel 1 --micro-batch 1"
    full = ["--model", "kimi_linear", *words.split(), "--policies", "full,full+cpu"]
    assert main([*full, "--host-memory", "1"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "does not fit under any policy; too little host memory" in text
    needs = re.search(r"activations full, needs ([\d.]+) GB of host memory, --host-memory is 1(?![\d.])", text)
    assert needs and "of GPU memory" not in text
    # so much is enough, under the policy that was named
    assert main([*full, "--host-memory", str(float(needs[1]) + 0.1)]) == 0
    assert re.search(r"│ full +│", capsys.readouterr().out)
    assert main([*full, "--gpu-memory", "16"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"needs [\d.]+ GB of GPU memory \(weights .*\), --gpu-memory is 16", text)


def test_the_nearest_layout_is_that_which_lacks_least():
    job = Job(KIMI_LINEAR, 64, 8192, 8192)
    fixed = {"pp": 2, "vpp": 4, "tp": 1, "micro_batch": 1}
    result = search(job, HARDWARE, 40e9, 1e9, Options(), ["full", "full+cpu"], fixed)
    lacks = [max(0, one.fullest.total - 40e9) + max(0, one.host - 1e9) for one in result.nearest]
    assert not result.found and lacks == sorted(lacks) == [one.excess for one in result.nearest]


@pytest.mark.parametrize(
    ("model", "words", "parts"),
    [
        (
            "kimi_linear",
            "--gpus 64 --expert-parallel 7",
            ["EP must divide the 256 experts of kimi_linear", "--expert-parallel 1, 2, 4, 8, 16, 32 or 64 in place"],
        ),
        (
            "kimi_k3",
            "--gpus 4096 --expert-parallel 7",
            ["EP must divide TP x CP x DP, which is --gpus 4096 over PP", "64 or 128 in place of 7"],
        ),
        (
            "kimi_linear",
            "--gpus 64 --tensor-parallel 3",
            ["TP must divide the 32 heads of kimi_linear", "--tensor-parallel 1, 2, 4 or 8 in place of 3"],
        ),
        (
            "kimi_k3",
            "--gpus 4096 --pipeline-parallel 200",
            ["PP x virtual stages must not exceed the 93 layers of kimi_k3", "32 or 64 in place of 200"],
        ),
        (
            "kimi_k3",
            "--gpus 1000",
            ["must divide the 8192 sequences of a step", "--gpus 1000 over TP x CP x PP", "a multiple of 1024000 for"],
        ),
        (
            "kimi_k3_tiny",
            "--gpus 8 --expert-parallel 2",
            ["kimi_k3_tiny has no experts for EP", "--expert-parallel 1 in place of 2"],
        ),
        (
            "kimi_linear",
            "--gpus 64 --tensor-parallel 3 --expert-parallel 7",
            ["there are layouts without --tensor-parallel 3, --expert-parallel 7"],
        ),
        (
            "kimi_linear",
            "--gpus 64 --context 8200 --global-batch-tokens 8396800 --context-parallel 8",
            ["2 x CP must divide --context 8200", "--context-parallel 1 in place of 8"],
        ),
    ],
)
def test_sizes_without_a_layout_are_named_with_what_they_must_divide(model, words, parts, capsys):
    line = said(capsys, *words.split(), model=model)
    assert all(part in line for part in parts), line


def test_every_obstacle_has_its_sentence():
    from k3_plugins.plan.advice import requirement

    for config in PRESETS.values():
        assert all(requirement(Job(config, 8, 64, 32), obstacle, "it") for obstacle in Obstacle)


def printed(width, table_of):
    from rich.console import Console

    with redirect_stdout(io.StringIO()) as out:
        console = Console(width=width, highlight=False, file=out)
        table_of(console)
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80])
def test_numbers_are_whole_in_a_narrow_terminal(width, monkeypatch, capsys):
    monkeypatch.setattr("k3_plugins.activation_report.output_width", lambda: width)
    words = "--gpus 4096 --virtual-stages 4 --tensor-parallel 2 --policies full --gpu-memory 160"
    assert main(["--model", "kimi_k3", *words.split()]) == 0
    text = capsys.readouterr().out
    tables = text.partition("Left out")[0]
    assert "…" not in tables and re.search(r"\d +\d+ x \d+ +full .*\d\.\d% +\d+\.\d\d\b", tables.replace("│", " "))
    if width >= 80:
        lines = [line for line in tables.splitlines() if not line.startswith("flags: ")]
        assert max(map(len, lines)) <= width


def test_the_memory_of_a_long_pipeline_fits_into_80_columns():
    memories = [Memory(rank, dict.fromkeys(KINDS, 123.4e9), 1234.5e9) for rank in range(64)]
    text = printed(80, lambda console: report.print_numbers(console, report.memory_table(memories, "Memory")))
    assert text.count("123.4") == 8 * len(KINDS) and text.count("1234.5") == 8 and "…" not in text
    assert max(map(len, text.splitlines())) <= 80 and " 60 " in text and " 4 " not in text
    title = "Memory of the fastest one, GB per GPU by pipeline rank"
    text = printed(80, lambda console: report.print_numbers(console, report.memory_table(memories[:1], title)))
    assert text.splitlines()[0].strip() == title  # in one line above a table that is narrower


def test_help_names_defaults_and_choices(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default keep,selective,full,full+cpu" in text
    assert re.search(r"--reserve-memory GB .*?\(default 6\.4\)", text)
    assert re.search(r"--gpus-per-node N .*?\(default 8\)", text)


@pytest.mark.parametrize("module", ["benchmarks.report", "tests.distributed.matrix"])
def test_a_package_calls_itself_as_it_is_started(module, capsys, monkeypatch):
    tool = __import__(f"{module}.__main__", fromlist=["main"])
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--help"])
    with pytest.raises(SystemExit):
        tool.main()
    assert capsys.readouterr().out.startswith(f"usage: python -m {module} ")
