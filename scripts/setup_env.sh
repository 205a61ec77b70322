#!/usr/bin/env bash
# The one environment script: makes (or re-checks) the virtual environment that every other script here uses.
#
#   source scripts/setup_env.sh      sets K3_PYTHON to the environment's python; returns 1 after a clear sentence
#   bash scripts/setup_env.sh        the same, as a command
#
#   K3_VENV=DIR    another folder for the environment (default: .venv in the repository)
#
# It finds Python 3.12 or 3.13 (PATH, then pyenv), makes the environment, installs requirements.txt and this package
# (editable). A stamp with a hash of what was installed makes the next call take under a second; a marker file stands in
# the folder while an installation is under way, so that an interrupted one is done again and never taken as good. No
# compiler is needed: every requirement comes as a wheel.

K3_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
K3_VENV="${K3_VENV:-$K3_ROOT/.venv}"
case "$K3_VENV" in /*) ;; *) K3_VENV="$PWD/$K3_VENV" ;; esac
K3_MIN_DISK_KB=$((8 * 1024 * 1024))

_k3_say() { printf '[setup] %s\n' "$*"; }
_k3_fail() { printf '[setup] ERROR: %s\n' "$*" >&2; return 1; }

# A pyenv shim exists for versions that are installed but not selected, and then refuses to run: a candidate counts only
# if it really starts, is 3.12 or 3.13, and can make environments.
_k3_python_works() {
    "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

_k3_find_python() {
    local candidate pyenv_root
    local seen=""
    for candidate in python3.12 python3.13 python3 python; do
        candidate="$(command -v "$candidate" 2>/dev/null)" || continue
        seen="$seen $candidate"
        if _k3_python_works "$candidate"; then printf '%s\n' "$candidate"; return 0; fi
    done
    pyenv_root="${PYENV_ROOT:-}"
    if [ -z "$pyenv_root" ] && command -v pyenv >/dev/null 2>&1; then pyenv_root="$(pyenv root 2>/dev/null)"; fi
    for candidate in "${pyenv_root:-$HOME/.pyenv}"/versions/3.12.*/bin/python "${pyenv_root:-$HOME/.pyenv}"/versions/3.13.*/bin/python; do
        [ -x "$candidate" ] || continue
        seen="$seen $candidate"
        if _k3_python_works "$candidate"; then printf '%s\n' "$candidate"; return 0; fi
    done
    _k3_fail "Python 3.12 or 3.13 is needed and none was found (tried:${seen:- nothing on PATH, no pyenv versions}).
         Install one (for example 'pyenv install 3.12' or your system's python3.12 and python3.12-venv packages) and run this again."
}

# What the environment must match: the requirements, this package's metadata, and where the package lies.
_k3_stamp() {
    { printf '%s\n' "$K3_ROOT"; cat "$K3_ROOT/requirements.txt" "$K3_ROOT/setup.py"; } | cksum
}

# Cheap re-check of a stamped environment: its Python starts, and every pinned package is there in the pinned version.
_k3_recheck() {
    "$K3_VENV/bin/python" - "$K3_ROOT/requirements.txt" <<'PY' 2>/dev/null
import sys
from importlib.metadata import version

lines = [line.partition("; ") for line in open(sys.argv[1]).read().splitlines() if line and not line.startswith("#")]
# the one marker in use is for Linux
pins = [line.split("==") for line, _, marker in lines if not marker or sys.platform == "linux"]
sys.exit(any(version(name) != pinned for name, pinned in pins) or not version("k3-plugins"))
PY
}

# Whether the environment's folder can be made. Comes before the question of free space, which means nothing where
# nothing can be written.
_k3_check_place() {
    local where="$K3_VENV" reason
    while [ ! -e "$where" ] && [ ! -L "$where" ]; do where="$(dirname "$where")"; done
    if [ ! -d "$where" ]; then
        _k3_fail "K3_VENV is $K3_VENV, and $where is a file: the environment is a folder of its own.
         Name another folder with K3_VENV=DIR, and run this again."
        return 1
    fi
    [ ! -d "$K3_VENV" ] || return 0
    if ! reason="$(mkdir -p "$K3_VENV" 2>&1)"; then
        _k3_cannot_write "${reason##*: }"
        return 1
    fi
    rmdir "$K3_VENV" # what is refused later must not leave an empty folder behind
}

_k3_cannot_write() {
    _k3_fail "K3_VENV is $K3_VENV, and that folder cannot be written to${1:+ ($1)}.
         Name a folder of yours with K3_VENV=DIR, and run this again."
}

_k3_check_disk() {
    local where="$1" free_kb
    while [ ! -d "$where" ]; do where="$(dirname "$where")"; done
    free_kb="$(df -Pk "$where" | awk 'NR == 2 { print $4 }')"
    if [ "${free_kb:-0}" -lt "$K3_MIN_DISK_KB" ]; then
        _k3_fail "about 8 GB of free disk space is needed for the environment, and $where has $((free_kb / 1024 / 1024)) GB.
         Free some space, or name a folder on another disk with K3_VENV=DIR, and run this again."
    fi
}

# pip without the lines that a reader has no use for; its errors and downloads stay visible. Keeps pip's exit code.
_k3_pip() {
    "$K3_VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@" 2>&1 |
        grep --line-buffered -v -e '^Looking in ' -e '^Requirement already satisfied'
    return "${PIPESTATUS[0]}"
}

_k3_install() {
    local python="$1" marker="$K3_VENV/.k3-installing" owner=ours reinstall=""
    # An environment that this script made is thrown away after an interruption; one that the user brought is not ours
    # to delete, so there every package is installed once more over the doubtful one.
    if [ "$(cat "$marker" 2>/dev/null)" = theirs ]; then
        _k3_say "an earlier installation into $K3_VENV was interrupted: installing every package again"
        owner=theirs reinstall=--force-reinstall
    elif [ -e "$marker" ]; then
        _k3_say "an earlier installation in $K3_VENV was interrupted: building it anew"
        # Renamed first: an interruption of the removal must not leave a folder without its marker.
        rm -rf "$K3_VENV.discarded" && mv "$K3_VENV" "$K3_VENV.discarded" && rm -rf "$K3_VENV.discarded"
    elif [ -x "$K3_VENV/bin/python" ] && [ ! -e "$K3_VENV/.k3-stamp" ]; then
        owner=theirs
    fi
    if [ -d "$K3_VENV" ] && [ -n "$(ls -A "$K3_VENV")" ] && ! _k3_python_works "$K3_VENV/bin/python"; then
        _k3_fail "$K3_VENV exists but holds no working Python 3.12 or 3.13 environment.
         Remove that folder, or name another one with K3_VENV=DIR, and run this again."
        return 1
    fi
    [ ! -d "$K3_VENV" ] || [ -w "$K3_VENV" ] || { _k3_cannot_write; return 1; }
    _k3_check_disk "$K3_VENV" || return 1
    mkdir -p "$K3_VENV" && printf '%s' "$owner" >"$marker" || { _k3_cannot_write; return 1; }
    rm -f "$K3_VENV/.k3-stamp"
    if ! _k3_python_works "$K3_VENV/bin/python"; then
        _k3_say "making the environment $K3_VENV with $("$python" --version 2>&1) ($python)"
        if ! "$python" -m venv "$K3_VENV"; then
            _k3_fail "'$python -m venv' failed (message above). On Debian and Ubuntu the package python3.12-venv (or python3.13-venv) is needed."
            return 1
        fi
    fi
    _k3_say "installing requirements.txt (about 5 GB unpacked; a few minutes)"
    if ! _k3_pip install $reinstall -r "$K3_ROOT/requirements.txt"; then
        _k3_fail "pip could not install requirements.txt (its message is above). If it names a connection, this machine has no network
         or pip's index or proxy is not configured; then run this again: a half-made environment is rebuilt, never used."
        return 1
    fi
    # setuptools came with torch and is the build backend: the editable install needs no second environment.
    if ! _k3_pip install --quiet --no-deps --no-build-isolation -e "$K3_ROOT"; then
        _k3_fail "pip could not install this package (its message is above)."
        return 1
    fi
    if ! _k3_pip check; then
        _k3_fail "the packages in $K3_VENV contradict each other (pip's message is above).
         Remove that folder, or name another one with K3_VENV=DIR, and run this again."
        return 1
    fi
    _k3_stamp >"$K3_VENV/.k3-stamp.tmp" && mv "$K3_VENV/.k3-stamp.tmp" "$K3_VENV/.k3-stamp" && rm -f "$marker"
}

_k3_setup_env() {
    local python
    if [ ! -e "$K3_VENV/.k3-installing" ] && [ "$(cat "$K3_VENV/.k3-stamp" 2>/dev/null)" = "$(_k3_stamp)" ] && _k3_recheck; then
        _k3_say "environment $K3_VENV is ready ($("$K3_VENV/bin/python" --version))"
    else
        python="$(_k3_find_python)" || return 1
        local started=$SECONDS
        _k3_install "$python" || return 1
        _k3_say "environment $K3_VENV is ready after $((SECONDS - started)) s"
    fi
    K3_PYTHON="$K3_VENV/bin/python"
    export K3_PYTHON K3_VENV K3_ROOT
}

# One installation at a time: a second caller waits for the first and then finds the environment ready. The lock is on the
# folder that holds the environment, so no lock file is left behind.
_k3_locked_setup_env() {
    local parent status
    _k3_check_place || return 1
    parent="$(dirname "$K3_VENV")"
    command -v flock >/dev/null 2>&1 || { _k3_setup_env; return; }
    exec 9<"$parent"
    if ! flock -n 9; then
        _k3_say "waiting for another set-up beside $K3_VENV"
        flock 9
    fi
    _k3_setup_env
    status=$?
    exec 9<&-
    return $status
}

_k3_locked_setup_env
