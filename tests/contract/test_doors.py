"""The doors: a module of ours, an unpatched script, and a script with the source patch. All activate alike."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.toys import TINY_GPT, run_ranks

ROOT = Path(__file__).resolve().parents[2]
PATCH = ROOT / "patches" / "core_v0.19.2" / "0001-pretrain_gpt.patch"
APPLY = ROOT / "patches" / "apply.sh"

AFTER = """
import json
json.dump(["k3_plugins" in sys.modules, sys.argv[1:]], open("seen.json", "w"))
"""


def apply_sh(*words):
    command = ["bash", str(APPLY), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path):
    """A folder whose pretrain_gpt.py holds nothing but the lines that the patch expects around its own."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    hunk = PATCH.read_text().partition("@@\n")[2].splitlines()
    context = [line[1:] for line in hunk if line.startswith(" ")]
    start = int(re.search(r"^@@ -(\d+)", PATCH.read_text(), re.MULTILINE).group(1))
    filler = ["import warnings", "if __name__:"]  # the first context lines are the body of an if
    lines = [*["#"] * (start - 1 - len(filler)), *filler, *context]
    (folder / "pretrain_gpt.py").write_text("\n".join(lines) + "\n" + AFTER)
    return folder


def start(folder, *words, door=()):
    done = subprocess.run(
        [sys.executable, *door, "pretrain_gpt.py", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    seen = folder / "seen.json"
    return done.returncode, done.stderr, seen.read_text() if seen.exists() else None


# -- the source patch --------------------------------------------------------------------------------------------------


def test_the_patches_stay_small():
    lines = sum(len(path.read_text().splitlines()) for path in PATCH.parent.glob("*.patch"))
    assert 0 < lines < 50


def test_the_patch_is_applied_once_and_taken_out_again(checkout):
    script = checkout / "pretrain_gpt.py"
    before = script.read_text()
    done = apply_sh(checkout)
    assert (done.returncode, done.stdout) == (0, "0001-pretrain_gpt.patch: applied\n"), done.stderr
    patched = script.read_text()
    assert patched != before and "k3_plugins.bootstrap" in patched
    assert apply_sh(checkout).stdout == "0001-pretrain_gpt.patch: already applied\n"
    assert script.read_text() == patched
    assert apply_sh(checkout, "--reverse").stdout == "0001-pretrain_gpt.patch: taken out\n"
    assert script.read_text() == before
    assert "nothing to take out" in apply_sh(checkout, "--reverse").stdout


def test_a_checkout_inside_another_repository_is_patched_too(checkout):
    subprocess.run(["git", "init", "-q", str(checkout.parent)], check=True)
    assert apply_sh(checkout).returncode == 0
    assert "k3_plugins.bootstrap" in (checkout / "pretrain_gpt.py").read_text()


def test_a_patch_that_does_not_fit_changes_nothing_and_says_so(checkout):
    script = checkout / "pretrain_gpt.py"
    script.write_text(script.read_text().replace("FutureWarning", "PendingDeprecationWarning"))
    before = script.read_text()
    done = apply_sh(checkout)
    assert done.returncode == 2 and "does not fit" in done.stderr and "nothing was changed" in done.stderr
    assert script.read_text() == before


@pytest.mark.parametrize("words", [(), ("nowhere",), (".", "--revert"), ("a", "b")])
def test_wrong_arguments_of_the_patch_script_are_explained(words):
    done = apply_sh(*words)
    assert done.returncode == 2 and done.stderr.startswith("apply.sh: error: ")


def test_the_patched_script_without_a_control_flag_does_not_even_import_the_plug_in(checkout):
    apply_sh(checkout)
    assert start(checkout, "--lr", "1")[::2] == (0, '[false, ["--lr", "1"]]')


def test_the_patched_script_activates_before_anything_else(checkout):
    apply_sh(checkout)
    code, error, seen = start(checkout, "--k3-plugins", "no-such-feature")
    assert code == 2 and "k3_plugins: error: --k3-plugins: there is no feature 'no-such-feature'" in error
    assert seen is None


@pytest.mark.skipif("K3_MEGATRON_CHECKOUT" not in os.environ, reason="K3_MEGATRON_CHECKOUT names no checkout")
def test_the_patch_fits_a_real_checkout(tmp_path):
    shutil.copy(Path(os.environ["K3_MEGATRON_CHECKOUT"]) / "pretrain_gpt.py", tmp_path)
    assert apply_sh(tmp_path).returncode == 0
    compile((tmp_path / "pretrain_gpt.py").read_text(), "pretrain_gpt.py", "exec")


# -- launch ------------------------------------------------------------------------------------------------------------

LAUNCH = ("-m", "k3_plugins.launch")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["gone.py"], "there is no script gone.py"), (["--k3-plugins", "kda"], "the script comes first")],
)
def test_launch_without_a_script_is_explained(tmp_path, words, sentence):
    done = subprocess.run(
        [sys.executable, *LAUNCH, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


def test_launch_runs_a_script_as_python_would(tmp_path):
    """Same sys.argv, sys.path[0], __name__, __file__ and exit code as `python /absolute/path/of/SCRIPT`."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("WORD = 'beside'\n")
    (folder / "train.py").write_text(
        "import sys, beside\nprint([beside.WORD, sys.argv, sys.path[0], __name__, __file__])\nsys.exit(7)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    outputs = []
    # The platform would import torch; whether it is selected is tested with the real jobs.
    stub = "import sys, k3_plugins.bootstrap as b; b.select = lambda n: None; from k3_plugins.launch import main; "
    for command in (
        [sys.executable, str(folder / "train.py"), "--lr", "1"],
        [sys.executable, "-c", stub + "sys.exit(main(['scripts/train.py', '--lr', '1']))"],
    ):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 7, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


# -- all doors ---------------------------------------------------------------------------------------------------------


def activation_report(log):
    """The table at the start and the witnesses."""
    return [line.rstrip() for line in log.splitlines() if line[:1] in tuple("┏┃┡│└") or line.startswith("k3_plugins ")]


def test_all_doors_give_the_same_activation_report(tmp_path):
    stock = (ROOT / "tests" / "harness" / "stock_gpt.py").read_text()
    (tmp_path / "unpatched.py").write_text(stock)
    added = [line[1:] for line in PATCH.read_text().splitlines() if line.startswith("+") and not line.startswith("+++")]
    future = "from __future__ import annotations\n"
    assert future in stock
    (tmp_path / "patched.py").write_text(stock.replace(future, future + "\n".join(added) + "\n", 1))
    flags = [*TINY_GPT, "--train-iters", "1", "--k3-plugins", "toy"]
    reports = {}
    for name, target, words in (
        ("module", "k3_plugins.pretrain_gpt", []),
        ("launch", "k3_plugins.launch", [tmp_path / "unpatched.py"]),
        ("patched", str(tmp_path / "patched.py"), []),
        ("both", "k3_plugins.launch", [tmp_path / "patched.py"]),
    ):
        ranks = run_ranks(target, [*words, *flags], tmp_path)
        assert ranks.codes == [0], f"{name}: {ranks}"
        reports[name] = activation_report(ranks.logs[0])
    assert len(reports["module"]) > 10 and reports["module"][-1].startswith("└")
    assert reports["launch"] == reports["module"]
    assert reports["patched"] == reports["module"]
    assert reports["both"] == reports["module"]
