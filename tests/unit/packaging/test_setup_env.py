"""The environment script with a stub in place of Python: what it does when something is missing, old or interrupted.

The stub answers the version check like a real interpreter, "makes" environments by copying itself, and logs what pip
would have been asked to do; so nothing is downloaded.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = (
    "bash",
    "dirname",
    "cat",
    "cksum",
    "df",
    "awk",
    "mkdir",
    "mv",
    "rm",
    "rmdir",
    "ls",
    "grep",
    "cp",
    "kill",
    "flock",
    "env",
)

STUB = """#!/usr/bin/env bash
case "$1 ${2:-}" in
    "-c "*) exit "${STUB_WRONG_VERSION:-0}" ;;
    "--version "*) echo "Python 3.12.99" ;;
    "- "*) cat >/dev/null; exit "${STUB_RECHECK:-0}" ;;
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit "${STUB_VENV_EXIT:-0}" ;;
    "-m pip")
        echo "pip ${*:3}" >>"$STUB_LOG"
        case "$*" in
            *requirements.txt*) [ -z "${STUB_KILL:-}" ] || kill -9 "$(cat "$STUB_LOG.shell")"
                exit "${STUB_PIP_EXIT:-0}" ;;
        esac ;;
esac
"""


@pytest.fixture
def sandbox(tmp_path):
    """A repository with the script and nothing else, and a PATH with the tools it needs and no Python."""
    for name in ("scripts/setup_env.sh", "requirements.txt", "setup.py"):
        (tmp_path / "repo" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "repo" / name)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in TOOLS:
        (bin_folder / tool).symlink_to(shutil.which(tool) or f"/usr/bin/{tool}")
    return Sandbox(tmp_path)


class Sandbox:
    def __init__(self, folder):
        self.folder, self.repo, self.venv = folder, folder / "repo", folder / "venv"
        self.log = folder / "pip.log"

    def install(self, path, text=STUB):
        path = self.folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, **stub):
        """Runs the script; returns (exit code, everything printed, what pip was asked)."""
        self.log.write_text("")
        env = {"PATH": str(self.folder / "bin"), "HOME": str(self.folder), "K3_VENV": str(self.venv)}
        env |= {"STUB_LOG": str(self.log), **{name: str(value) for name, value in stub.items()}}
        command = f'echo $$ >"{self.log}.shell"; source scripts/setup_env.sh && echo "using $K3_PYTHON"'
        ended = subprocess.run(
            [shutil.which("bash"), "-c", command], env=env, cwd=self.repo, capture_output=True, text=True, timeout=60
        )
        return ended.returncode, ended.stdout + ended.stderr, self.log.read_text()


def test_first_time_then_ready_then_changed(sandbox):
    sandbox.install("bin/python3.12")
    code, said, asked = sandbox.run()
    assert code == 0 and f"using {sandbox.venv}/bin/python" in said, said
    assert "install -r" in asked and "-e " in asked and " check\n" in asked
    code, said, asked = sandbox.run()
    assert code == 0 and "is ready" in said and asked == ""
    # A package that went missing is noticed although the stamp is right.
    assert "install -r" in sandbox.run(STUB_RECHECK=1)[2]
    with open(sandbox.repo / "requirements.txt", "a") as stream:
        stream.write("another==1.0\n")
    assert "install -r" in sandbox.run()[2]
    assert sandbox.run()[2] == ""


def test_a_shim_that_does_not_run_is_passed_over(sandbox):
    sandbox.install("bin/python3.12", "#!/usr/bin/env bash\necho 'pyenv: version not installed' >&2; exit 127\n")
    sandbox.install(".pyenv/versions/3.13.9/bin/python")
    code, said, _ = sandbox.run()
    assert code == 0 and "3.13.9" in said


def test_no_python_is_one_clear_sentence(sandbox):
    code, said, _ = sandbox.run()
    assert code == 1 and "Python 3.12 or 3.13 is needed" in said and "nothing on PATH" in said
    sandbox.install("bin/python3")
    code, said, _ = sandbox.run(STUB_WRONG_VERSION=1)
    assert code == 1 and "Python 3.12 or 3.13 is needed" in said and "bin/python3" in said
    assert not sandbox.venv.exists()


def test_failures_are_named_and_nothing_half_made_is_used(sandbox):
    sandbox.install("bin/python3.13")
    code, said, _ = sandbox.run(STUB_VENV_EXIT=1)
    assert code == 1 and "python3.12-venv" in said
    code, said, asked = sandbox.run(STUB_PIP_EXIT=1)
    assert code == 1 and "no network" in said and "using" not in said
    assert "building it anew" in said and " check\n" not in asked
    code, said, asked = sandbox.run()
    assert code == 0 and "building it anew" in said and "install -r" in asked


def test_a_killed_installation_is_rebuilt(sandbox):
    sandbox.install("bin/python3.12")
    code, said, _ = sandbox.run(STUB_KILL=1)
    assert code == -9
    (sandbox.venv / "half-made").touch()
    code, said, _ = sandbox.run()
    assert code == 0 and "building it anew" in said
    assert not (sandbox.venv / "half-made").exists()
    assert sorted(path.name for path in sandbox.folder.glob("venv*")) == ["venv"]


def test_a_users_own_environment_is_never_deleted(sandbox):
    sandbox.install("bin/python3.12")
    sandbox.install("venv/bin/python")
    (sandbox.venv / "mine").touch()
    assert sandbox.run(STUB_KILL=1)[0] == -9
    code, said, asked = sandbox.run()
    assert code == 0 and (sandbox.venv / "mine").exists()
    assert "--force-reinstall" in asked, "the interrupted packages must not be trusted"


def test_a_folder_with_something_else_is_refused(sandbox):
    sandbox.install("bin/python3.12")
    sandbox.venv.mkdir()
    (sandbox.venv / "thesis.tex").touch()
    code, said, _ = sandbox.run()
    assert code == 1 and "K3_VENV=DIR" in said
    assert [path.name for path in sandbox.venv.iterdir()] == ["thesis.tex"]


def test_too_little_disk_space_is_said_before_work(sandbox):
    sandbox.install("bin/python3.12")
    os.remove(sandbox.folder / "bin" / "df")
    sandbox.install("bin/df", "#!/usr/bin/env bash\nprintf 'head\\nfs 9 9 2097152 9%% /\\n'\n")
    code, said, asked = sandbox.run()
    assert code == 1 and "8 GB" in said and "2 GB" in said and asked == ""


def test_a_place_where_no_folder_can_be_made_is_said_before_the_disk_is_asked(sandbox):
    sandbox.install("bin/python3.12")
    os.remove(sandbox.folder / "bin" / "df")
    sandbox.install("bin/df", "#!/usr/bin/env bash\nprintf 'head\\nfs 9 9 0 9%% /\\n'\n")
    file = sandbox.folder / "notes.txt"
    file.write_text("mine")
    for venv in (file, file / "below"):
        sandbox.venv = venv
        code, said, asked = sandbox.run()
        assert code == 1 and f"{file} is a file" in said and "K3_VENV=DIR" in said and "GB" not in said, said
        assert file.read_text() == "mine" and asked == ""
    # Not even root makes folders there.
    sandbox.venv = Path("/proc/k3-environment")
    code, said, asked = sandbox.run()
    assert code == 1 and "cannot be written to" in said and "K3_VENV=DIR" in said and "GB" not in said and asked == ""
    sandbox.venv = sandbox.folder / "venv"
    code, said, _ = sandbox.run()
    assert code == 1 and "0 GB" in said and not sandbox.venv.exists(), "a refusal leaves no empty folder"


@pytest.mark.parametrize("word", ["--collect-only", "--co", "--markers", "--help"])
def test_nothing_passed_when_no_test_was_run(sandbox, word):
    sandbox.install("bin/python3.12")
    sandbox.install("repo/tests/run.sh", (ROOT / "tests" / "run.sh").read_text())

    def last_line(*words):
        env = {"PATH": str(sandbox.folder / "bin"), "K3_VENV": str(sandbox.venv), "STUB_LOG": str(sandbox.log)}
        command = [shutil.which("bash"), sandbox.repo / "tests" / "run.sh", *words]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()[-1]

    assert "PASSED" in last_line("tests/unit", "-k", "kda")
    line = last_line("tests/unit", word)
    assert "NO TEST WAS RUN" in line and "PASSED" not in line
