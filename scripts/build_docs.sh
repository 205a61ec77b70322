#!/usr/bin/env bash
# Builds the documentation site from the Markdown files of the repository, strictly: a broken link or anchor is an error.
#
#   bash scripts/build_docs.sh                    into build/site
#   bash scripts/build_docs.sh OUTPUT             into another folder
#   bash scripts/build_docs.sh --serve [OUTPUT]   and shows it on http://127.0.0.1:8000
#
# The site needs no network: open OUTPUT/index.html. Only its search needs a server, which --serve is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
exec "$K3_PYTHON" "$K3_ROOT/scripts/build_docs.py" "$@"
