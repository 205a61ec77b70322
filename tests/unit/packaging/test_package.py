"""What an installed k3_plugins is: its metadata, its pins, its scripts, and what importing it costs."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def metadata():
    return importlib.metadata.metadata("k3-plugins")


def test_every_requirement_is_pinned_and_installed_as_pinned(requirements):
    for requirement in requirements:
        (pin,) = requirement.specifier
        assert pin.operator == "==" and importlib.metadata.version(requirement.name) == pin.version


def test_neither_torch_nor_megatron_is_forced_on_users(metadata):
    forced = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    forced = {requirement.name for requirement in forced if requirement.marker is None}
    assert forced and not forced & {"torch", "megatron-core", "triton", "transformer-engine", "nvidia-modelopt"}
    assert set(metadata["Requires-Python"].split(",")) == {">=3.12", "<3.14"}


def test_extras_exist_and_agree_with_the_pins(metadata, requirements):
    extras = {"kda", "moonep", "muon", "qat", "data", "vision", "offload", "transfer", "gpu", "docs", "test"}
    assert set(metadata.get_all("Provides-Extra")) == extras
    pins = {requirement.name: str(requirement.specifier) for requirement in requirements}
    for line in metadata.get_all("Requires-Dist"):
        requirement = Requirement(line)
        if requirement.marker is not None and requirement.name in pins:
            assert str(requirement.specifier) == pins[requirement.name], line
        # Names that install something else, or break Megatron.
        assert requirement.name not in ("apex", "transformer_engine", "nvidia-resiliency-ext")


@pytest.mark.parametrize("script", ["k3-pretrain", "k3-launch", "k3-doctor"])
def test_console_scripts_lead_to_functions(script):
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=script)
    assert callable(entry.load())


def test_wheel_holds_the_package_with_its_data_and_nothing_else(tmp_path):
    # From a copy: a build leaves folders beside setup.py that a later build would take files from.
    source = tmp_path / "source"
    shutil.copytree(ROOT / "k3_plugins", source / "k3_plugins", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, source / name)
    options = ("-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", str(tmp_path))
    ended = run(sys.executable, "-m", "pip", "wheel", *options, str(source))
    assert ended.returncode == 0, ended.stderr
    (wheel,) = tmp_path.glob("k3_plugins-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if ".dist-info/" not in name}
    tracked = run("git", "ls-files", "k3_plugins").stdout.split()
    expected = {name for name in tracked if name.endswith((".py", "py.typed")) or "/fingerprints/" in name}
    assert expected, "this test reads the list of files from git"
    assert expected <= packaged and all(name.startswith("k3_plugins/") for name in packaged)


def test_importing_costs_neither_torch_nor_megatron():
    code = (
        "import json, sys, k3_plugins, k3_plugins.data.prepare, k3_plugins.data.bigram, k3_plugins.data.flags\n"
        "import k3_plugins.report.compare\n"
        "print(json.dumps([name for name in ('torch', 'megatron', 'transformers') if name in sys.modules]))"
    )
    ended = run(sys.executable, "-c", code)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == []


def test_shell_scripts_parse():
    scripts = [name for name in run("git", "ls-files").stdout.split() if name.endswith(".sh") or name == ".ci/run"]
    assert len(scripts) >= 4
    for script in scripts:
        ended = run("bash", "-n", script)
        assert ended.returncode == 0, f"{script}: {ended.stderr}"


def test_files_speak_of_no_machine_and_no_index():
    here = Path(__file__).relative_to(ROOT).as_posix()
    # Assembled here, so that this file is not its own finding.
    words = ["/" + "work/", "/" + "root/", "/" + "tmp/", "py" + "pi.org", "python" + "hosted"]
    found = run("git", "grep", "-n", "-I", *(part for word in words for part in ("-e", word)), "--", f":!{here}")
    assert found.stdout == ""
