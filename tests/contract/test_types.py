"""The whole package passes mypy, and its annotations reach the code of a user.

Settings: mypy.ini. The first run reads torch's annotations as well, about a minute; later ones use .mypy_cache.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FEATURE_WITH_A_WRONG_ANSWER = """
from k3_plugins.feature import Witness
from k3_plugins.patching import Patch, PatchKind


def witness() -> Witness:
    return Witness(3, ok=True)


reveal_type(Witness("ran", ok=True).ok)
Patch(
    id="mine.forward",
    target="module:function",
    kind="wrap",
    implementation=print,
    feature="mine",
    reason="none",
    remove_when="never",
)
"""


def mypy(*arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MYPY")}
    command = [sys.executable, "-m", "mypy", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


def test_the_package_passes_and_a_wrong_use_of_it_does_not(tmp_path):
    package = mypy()
    assert package.returncode == 0, package.stdout + package.stderr

    user = tmp_path / "my_feature.py"
    user.write_text(FEATURE_WITH_A_WRONG_ANSWER)
    wrong = mypy(str(user))
    errors = [line for line in wrong.stdout.splitlines() if ": error:" in line]
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert [("[arg-type]" in line, "my_feature.py" in line) for line in errors] == [(True, True)] * 2, errors
    assert 'Revealed type is "bool"' in wrong.stdout.replace("builtins.", "")
