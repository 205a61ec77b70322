"""The doctor: right about a healthy installation, and about each thing that can be broken. Nothing is patched."""

import json

import pytest

from k3_plugins.compat import optional
from k3_plugins.compat.megatron import find_megatron, fingerprint_file
from k3_plugins.compat.versions import PYTHON, VERIFIED, installed_versions
from k3_plugins.feature import FeatureError
from tests.contract.toys import TINY_GPT, TOYS, run_ranks

ROOT = TOYS.parents[2]

BREAK = """
import json, sys
sys.path.insert(0, {toys!r})
from k3_plugins import diagnosis, doctor
from k3_plugins.compat import megatron, optional
from k3_plugins.patching import manager
from k3_plugins.patching.fingerprint import FingerprintStore
{how}
code = doctor.main({words!r})
from megatron.training.training import train_step
assert train_step.__module__ == "megatron.training.training" and not hasattr(train_step, "__wrapped__")
sys.exit(code)
"""


def doctor(tmp_path, *words, how=""):
    """Run the doctor in a process that was broken first; its exit code and report."""
    script = tmp_path / "doctor_script.py"
    script.write_text(BREAK.format(toys=str(TOYS), how=how, words=["--json", *map(str, words)]))
    ranks = run_ranks(str(script), [], tmp_path)
    log = ranks.logs[0]
    assert "{" in log, ranks
    return ranks.codes[0], json.JSONDecoder().raw_decode(log[log.index('{\n  "verdict"') :])[0], log


def changed(edit):
    """Code that lets every FingerprintStore.read return an edited store."""
    return f"""
read = FingerprintStore.read.__func__
def edited(cls, path):
    store = read(cls, path)
    target = "megatron.training.training:train_step"
    entry = store.targets[target].__dict__.copy() if target in store.targets else None
    if entry:
        {edit}
        store.targets[target] = type(store.targets[target])(**entry)
    return store
FingerprintStore.read = classmethod(edited)
"""


def test_a_healthy_installation(tmp_path):
    code, report, _ = doctor(tmp_path)
    assert report["problems"] == [] and code == report["verdict"] == (1 if report["warnings"] else 0)
    assert report["megatron"]["version"] == find_megatron().version and report["megatron"]["path"]
    assert {patch["state"] for patch in report["patches"]} == {"OK"}
    assert {"engine.arguments", "engine.first-step"} <= {patch["id"] for patch in report["patches"]}
    assert len(report["doors"]) == 3 and report["platform"]["chosen"] in ("cpu", "cuda")
    names = [feature["name"] for feature in report["features"]]
    assert "kda" in names and "toy" in names  # third parties are examined too
    toy = next(feature for feature in report["features"] if feature["name"] == "toy")
    assert [(b["name"], b["chosen"], b["why"]) for b in toy["backends"]] == [
        ("cpu", True, "the only one"),
        ("gpu", False, "no CUDA"),
    ]
    apex = next(line for line in report["optional"] if line["module"] == "apex")
    assert "pip install apex is another package" in apex["install"]


def test_body_drift_is_a_problem_with_a_diff_and_a_warning_once_allowed(tmp_path):
    how = changed('entry.update(body="0", lines=entry["lines"][:5] + ("00000000",) + entry["lines"][6:])')
    code, report, _ = doctor(tmp_path, "--k3-plugins", "toy", how=how)
    patch = next(p for p in report["patches"] if p["id"] == "engine.first-step")
    assert code == 2 and patch["state"] == "DRIFT (body)"
    assert "-<1 recorded line not in the installed source>" in patch["diff"] and "\n+" in patch["diff"]
    code, report, _ = doctor(tmp_path, "--k3-plugins", "toy", "--k3-allow-drift", "engine.first-step", how=how)
    patch = next(p for p in report["patches"] if p["id"] == "engine.first-step")
    assert code == 1 and patch["state"] == "DRIFT (allowed)" and report["problems"] == []


def test_every_other_fault_of_the_patches_and_the_set_is_a_problem(tmp_path):
    """One process per fault would cost more than the faults are worth: independent ones share a process."""
    how = changed('entry.update(signature="(everything, else)")')
    how += """
from k3_plugins.engine import ENGINE_PATCHES
object.__setattr__(ENGINE_PATCHES[0], "target", "megatron.training.arguments:gone")
optional.PACKAGES += (optional.OptionalPackage("k3_broken_package", "pip install it", "nothing"),)
diagnosis.PACKAGES = optional.PACKAGES
"""
    (tmp_path / "k3_broken_package.py").write_text("raise OSError('libcudart.so: cannot open')\n")
    code, report, _ = doctor(tmp_path, "--k3-plugins", "toy-probe", how=how)
    states = {patch["id"]: patch["state"] for patch in report["patches"]}
    assert code == 2
    assert states["engine.first-step"] == "DRIFT (signature)" and states["engine.arguments"] == "MISSING"
    text = "\n".join(report["problems"])
    assert "type --k3-plugins toy,toy-probe" in text and "has no 'gone'" in text and "signature" in text
    broken = next(line for line in report["optional"] if line["module"] == "k3_broken_package")
    assert "OSError: libcudart.so: cannot open" in broken["error"]
    assert any("k3_broken_package is installed but broken" in line for line in report["warnings"])


def test_training_flags_are_parsed_and_validated(tmp_path):
    code, report, _ = doctor(tmp_path, "--k3-plugins", "toy", *TINY_GPT, "--toy-width", "0")
    assert code == 2 and any("--toy-width 0 must be positive" in line for line in report["problems"])
    code, report, _ = doctor(tmp_path, "--k3-plugins", "toy", *TINY_GPT, "--toy-wdith", "1")
    assert code == 2 and any("Did you mean --toy-width?" in line for line in report["problems"])


def test_megatron_checks_the_flags_as_in_a_job_of_so_many_ranks(tmp_path):
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    words = ["--k3-plugins", "toy", "--ranks", "64", *TINY_GPT, *layout, "--global-batch-size", "32"]
    code, report, _ = doctor(tmp_path, *words)
    assert not report["problems"], report["problems"]  # the code is 1 on a machine without libibverbs
    assert report["layout"]["data_parallel_size"] == 16 and report["layout"]["num_microbatches"] == 2
    code, report, _ = doctor(tmp_path, "--k3-plugins", "toy", "--ranks", "6", *TINY_GPT, *layout)
    assert code == 2 and any("Megatron does not accept these arguments" in line for line in report["problems"])
    code, report, _ = doctor(tmp_path, "--k3-plugins", "toy", "--ranks", "4", *TINY_GPT, *layout, "--num-layers", "3")
    assert code == 2 and report["problems"]
    code, report, _ = doctor(tmp_path, "--k3-plugins", "toy", "--ranks", "4")
    assert code == 2 and "--num-layers is missing" in report["problems"][0]


def test_without_arguments(tmp_path):
    ranks = run_ranks("k3_plugins.doctor", [], tmp_path)
    assert ranks.codes[0] in (0, 1) and "Verdict" in ranks.logs[0] and "Traceback" not in ranks.logs[0], ranks


def test_the_report_for_people_holds_the_same_verdict(tmp_path):
    ranks = run_ranks("k3_plugins.doctor", ["--k3-plugins", "toy"], tmp_path)
    log = ranks.logs[0]
    for words in ("Verdict", "Optional packages", "train_step", "[core-cu13,pytorch]", f"(exit code {ranks.codes[0]})"):
        assert words in log, ranks
    assert ranks.codes[0] in (0, 1), ranks


# -- compat ------------------------------------------------------------------------------------------------------------


def test_the_verified_versions_are_those_of_requirements_txt():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = dict(line.partition(";")[0].split("==") for line in lines if "==" in line and not line.startswith("#"))
    assert {name: pins[name] for name in VERIFIED} == VERIFIED
    assert {version.name for version in installed_versions()} == {"python", *VERIFIED}
    assert PYTHON == ("3.12", "3.13")


def test_megatron_is_found_without_importing_it(tmp_path, monkeypatch):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = 'rc1'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_megatron()
    assert (found.root, found.version, found.kind) == (tmp_path, "0.20.1rc1", "checkout")
    assert fingerprint_file(found.version).name == "core_v0.19.2.json"


@pytest.mark.parametrize(
    "error", ["ImportError('a')", "RuntimeError('a')", "OSError('a')", "FileNotFoundError('a')", "AttributeError('a')"]
)
def test_a_broken_package_is_reported_whatever_it_raises(tmp_path, monkeypatch, error):
    (tmp_path / "k3_broken.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(optional, "PACKAGES", (optional.OptionalPackage("k3_broken", "pip install better", "x"),))
    optional.probe.cache_clear()
    with pytest.raises(FeatureError, match=rf"the toy needs k3_broken.*broken \({error[:-5]}: a\): pip install better"):
        optional.require("k3_broken", "the toy")
    optional.probe.cache_clear()


def test_an_absent_package_is_told_from_a_broken_one(monkeypatch):
    monkeypatch.setattr(optional, "PACKAGES", (optional.OptionalPackage("k3_absent.part", "pip install it", "x"),))
    optional.probe.cache_clear()
    with pytest.raises(FeatureError, match="needs k3_absent.part, which is not installed: pip install it"):
        optional.require("k3_absent.part", "the toy")
    optional.probe.cache_clear()
