"""Without --k3-plugins nothing is imported and nothing is patched; with it, nothing before a door is opened."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ENGINE = (
    "feature features bootstrap arguments activation activation_report agreement engine failure manifest launch "
    "doctor diagnosis patching patching.record patching.docs compat.megatron compat.optional compat.versions"
).split()


def python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_engine_imports_neither_torch_nor_megatron():
    modules = ", ".join(f"k3_plugins.{name}" for name in ENGINE)
    heavy = "[m for m in sys.modules if m.partition('.')[0] in ('torch', 'megatron', 'transformers', 'rich', 'numpy')]"
    assert python(f"import sys, k3_plugins, {modules}\nprint({heavy})") == "[]\n"


def test_listing_features_and_their_patches_imports_neither():
    code = """
import sys
from k3_plugins import features
for entry in features.BUILT_IN:
    before = set(sys.modules)
    features.load(entry).patches()
    for name in ("torch", "megatron"):
        if name in sys.modules.keys() - before:
            print(entry.name, name)
"""
    assert python(code) == ""


def test_a_start_without_features_imports_no_feature_and_not_megatron():
    code = """
import sys
from k3_plugins import bootstrap
bootstrap.select = lambda name: None
sys.argv = ["train.py", "--lr", "1", "--k3-platform", "cpu"]
assert bootstrap.activate(sys.argv[1:], "test") is None
assert sys.argv == ["train.py", "--lr", "1"]
from k3_plugins import activation, features
assert activation.current() is None
loaded = {entry.module for entry in features.BUILT_IN} & set(sys.modules)
print(loaded, "k3_plugins.engine" in sys.modules, "megatron" in sys.modules, "torch" in sys.modules)
"""
    assert python(code) == "set() False False False\n"
