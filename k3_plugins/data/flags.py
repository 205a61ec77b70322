"""Prints the Megatron flags of a prepared data set, one a line, for use in a script.

In bash: ``mapfile -t DATA_ARGS < <(python -m k3_plugins.data.flags DATASET_FOLDER)``
"""

import argparse
import sys
from collections.abc import Sequence

from k3_plugins.data import sidecar
from k3_plugins.data.sources import InputError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m k3_plugins.data.flags", description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a folder made by python -m k3_plugins.data.prepare")
    args = parser.parse_args(argv)
    try:
        flags = sidecar.read(args.folder).megatron_flags(args.folder)
    except InputError as error:
        print(f"flags: {error}", file=sys.stderr)
        return 2
    print("\n".join(flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())
