"""The decision table of `platform.select`, detection of a GPU, and what a fresh process sees."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3_plugins import platform
from k3_plugins.platform import PlatformError, cpu, detect

ROOT = Path(__file__).resolve().parents[3]
NONE = detect.Gpu(False, False, "no NVIDIA GPU on this machine")
USABLE = detect.Gpu(True, True, "2 CUDA devices visible")
BROKEN = detect.Gpu(True, False, "PyTorch 2.13.0 is built without CUDA")


@pytest.fixture
def machine(monkeypatch):
    """A fresh process on a machine with the given GPU; returns the list of installations."""
    installed = []

    def on(gpu):
        monkeypatch.setattr(platform, "_selected", None)
        monkeypatch.setattr(detect, "gpu", lambda: gpu)
        monkeypatch.setattr(cpu, "install", lambda *, named: installed.append(named) or [])
        for name in [m for m in sys.modules if m in ("megatron.core", "megatron.training")]:
            monkeypatch.delitem(sys.modules, name)
        return installed

    return on


@pytest.mark.parametrize(
    ("gpu", "requested", "name", "installations"),
    [
        (USABLE, None, "cuda", []),
        (USABLE, "auto", "cuda", []),
        (USABLE, "cuda", "cuda", []),
        (USABLE, "cpu", "cpu", [True]),
        (BROKEN, "cpu", "cpu", [True]),
        (NONE, "cpu", "cpu", [True]),
        (NONE, None, "cpu", [False]),
        (NONE, "auto", "cpu", [False]),
    ],
)
def test_choice(machine, capsys, gpu, requested, name, installations):
    installed = machine(gpu)
    report = platform.select(requested)
    assert report.name == name
    assert gpu.reason in report.reason
    assert installed == installations
    printed = capsys.readouterr()
    assert printed.out == ""
    if name == "cpu":
        assert report.banner in printed.err
        assert "CPU PLATFORM" in report.banner
        assert "small runs" in report.banner
        assert gpu.reason in report.banner
    else:
        assert report.banner == ""
        assert printed.err == ""
    # The same choice again is the same report, without a second installation or banner.
    assert platform.select(requested) is report
    assert platform.select(None) is report
    assert installed == installations
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("gpu", "requested", "sentence"),
    [
        (NONE, "cuda", "no CUDA device can be used.*Use --k3-platform cpu"),
        (BROKEN, "cuda", "built without CUDA"),
        # A GPU that cannot be used is repaired or the CPU is named: no silent move to the CPU.
        (BROKEN, None, "built without CUDA.*--k3-platform cpu"),
        (BROKEN, "auto", "built without CUDA.*--k3-platform cpu"),
        (NONE, "tpu", "--k3-platform tpu: no such platform; choose one of cpu, cuda, auto"),
    ],
)
def test_refusal(machine, gpu, requested, sentence):
    installed = machine(gpu)
    with pytest.raises(PlatformError, match=sentence) as error:
        platform.select(requested)
    assert error.value.exit_code == 2
    assert installed == []


def test_a_process_has_one_platform(machine):
    machine(USABLE)
    platform.select("cpu")
    with pytest.raises(PlatformError, match="already runs on the cpu platform"):
        platform.select("cuda")


def test_only_rank_0_prints(machine, capsys, monkeypatch):
    machine(NONE)
    monkeypatch.setenv("RANK", "1")
    assert platform.select(None).banner
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("module", ["megatron.core", "megatron.training"])
def test_too_late(machine, monkeypatch, module):
    installed = machine(NONE)
    monkeypatch.setitem(sys.modules, module, object())
    with pytest.raises(PlatformError, match="before Megatron is imported"):
        platform.select("cpu")
    assert installed == []


def test_install_beside_a_gpu_needs_the_name(monkeypatch):
    monkeypatch.setattr(detect, "gpu", lambda: USABLE)
    monkeypatch.setattr(cpu, "_notes", None)
    with pytest.raises(PlatformError, match="unless named: --k3-platform cpu"):
        cpu.install(named=False)


@pytest.mark.parametrize(
    ("devices", "files", "visible", "build", "present", "usable", "reason"),
    [
        (2, ["/dev/nvidia0"], None, "13.0", True, True, "2 CUDA devices visible"),
        (1, ["/dev/nvidia0"], "0", "13.0", True, True, "1 CUDA device visible"),
        (0, [], None, "13.0", False, False, "no NVIDIA GPU on this machine"),
        (0, [], None, None, False, False, "no NVIDIA GPU on this machine"),
        (0, ["/dev/nvidia0"], "", "13.0", False, False, "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        (0, ["/dev/nvidia0"], "-1", "13.0", False, False, "CUDA_VISIBLE_DEVICES='-1' hides every GPU"),
        (0, ["/dev/nvidia0"], None, None, True, False, "is built without CUDA"),
        (0, ["/dev/nvidia0"], None, "13.0", True, False, "sees no device"),
    ],
)
def test_detection(monkeypatch, devices, files, visible, build, present, usable, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(detect, "_device_files", lambda: files)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = detect.gpu.__wrapped__()
    assert (gpu.present, gpu.usable) == (present, usable)
    assert reason in gpu.reason


def test_the_reason_quotes_torch(monkeypatch):
    def too_old():
        import warnings

        warnings.warn("The NVIDIA driver on your system is too old (Triggered internally at x.cpp:1)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    monkeypatch.setattr(detect, "_device_files", lambda: ["/dev/nvidia0"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert detect.gpu.__wrapped__().reason == "The NVIDIA driver on your system is too old"


FRESH = """
import sys
from k3_plugins import platform
heavy = {"torch", "megatron", "numpy"} & set(sys.modules)
assert not heavy, f"importing k3_plugins.platform imported {heavy}"
report = platform.select("cpu")
assert "megatron" not in sys.modules, "the platform must leave importing Megatron to its user"
import torch
assert report.name == "cpu" and torch.cuda.is_available() and torch.cuda.device_count() == 1
try:
    import transformer_engine
except ModuleNotFoundError:
    print("hidden")
"""


def test_fresh_process(tmp_path):
    # A Transformer Engine that, as on a GPU machine, imports; the CPU platform must keep Megatron from using it.
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    env.pop("RANK", None)
    done = subprocess.run([sys.executable, "-c", FRESH], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hidden\n"
    assert done.stderr.count("CPU PLATFORM") == 1
    assert "asked for by name" in done.stderr
    assert "not used, CUDA only: transformer_engine" in done.stderr
