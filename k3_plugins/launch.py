"""``python -m k3_plugins.launch SCRIPT.py ARGUMENTS...``: run an unpatched training script with the plug-ins.

The script runs as ``python SCRIPT.py ARGUMENTS...`` would run it: as ``__main__``, with its own folder first on the
import path (so a Megatron-LM checkout beside it is found) and its own ``sys.argv``. The features that ``--k3-plugins``
names are activated first.
"""

import os
import runpy
import sys
from collections.abc import Sequence

from k3_plugins.bootstrap import activate, explained_exit
from k3_plugins.failure import fail

_USAGE = "usage: python -m k3_plugins.launch SCRIPT.py [--k3-plugins NAMES] [arguments of the script]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script; returns 0 when it ends by itself.

    Args:
        argv: the script and its arguments; ``sys.argv[1:]`` when None.

    Raises:
        SystemExit: with code 2 if there is no such script, and whatever the script exits with.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if words else 2
    script, *arguments = words
    if script.startswith("-"):
        fail(f"the script comes first, before {script}; {_USAGE}")
    if not os.path.isfile(script):
        fail(f"there is no script {script}; {_USAGE}")
    sys.argv[:] = [script, *arguments]
    if not sys.flags.safe_path:
        # Python put the current folder (or that of the console script) there; `python SCRIPT.py` puts the script's.
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    activate(arguments, door="k3_plugins.launch")
    with explained_exit(arguments):
        # The absolute path, because that is a script's __file__ under python; its sys.argv[0] becomes absolute too.
        runpy.run_path(os.path.abspath(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
