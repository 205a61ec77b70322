#!/usr/bin/env bash
# Sets up the environment (scripts/setup_env.sh; K3_VENV names another folder for it) and runs the tests.
#
#   bash tests/run.sh                    style check, then every test that needs no GPU
#   bash tests/run.sh tests/unit -k kda  arguments go to pytest
#   bash tests/run.sh -m slow            the longer sweeps
set -uo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/scripts/setup_env.sh" || exit 1
cd "$ROOT" || exit 1

# Results must not depend on how many cores share a sum, nor the tests fight over the cores they have.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONHASHSEED=0
# User-wide plug-ins and options of pytest would make this machine's result its own.
unset PYTEST_ADDOPTS
export PYTHONDONTWRITEBYTECODE=1

echo "[tests] ruff check"
"$K3_PYTHON" -m ruff check . || { echo "[tests] FAILED: ruff found style errors (above); no test was run"; exit 1; }
echo "[tests] pytest $*"
"$K3_PYTHON" -m pytest "$@"
status=$?
# Options with which pytest lists or explains and runs nothing end with 0 as well.
ran=yes
for word in "$@"; do
    case $word in
        --collect-only | --co | --setup-plan | --setup-only | --fixtures | --funcargs | --fixtures-per-test | --markers | --cache-show*) ran="" ;;
        -h | --help | -V | -VV | --version) ran="" ;;
    esac
done
case $status in
    0) if [ -n "$ran" ]; then
           echo "[tests] PASSED: ruff is clean and no selected test failed"
       else
           echo "[tests] ruff is clean; NO TEST WAS RUN: pytest was only asked to show something"
       fi ;;
    5) echo "[tests] FAILED: no test was selected" ;;
    *) echo "[tests] FAILED: see above (pytest exit code $status)" ;;
esac
exit $status
