"""Record the fingerprints of all patch targets from the Megatron that is on the import path.

    python -m k3_plugins.patching.record                       # the engine's and the built-in features'
    python -m k3_plugins.patching.record --check               # exit 1 if the recorded file is out of date
    python -m k3_plugins.patching.record --feature NAME --out FILE   # a third party's, for Feature.fingerprints()

Run it after adding a patch, read the difference in the JSON file, and commit both together.
"""

import argparse
from pathlib import Path

from k3_plugins import features
from k3_plugins.compat.megatron import find_megatron, fingerprint_file
from k3_plugins.engine import ENGINE_PATCHES
from k3_plugins.failure import fail
from k3_plugins.feature import FeatureError
from k3_plugins.patching.errors import PatchError
from k3_plugins.patching.fingerprint import FingerprintStore, take
from k3_plugins.patching.patch import Patch
from k3_plugins.patching.target import resolve


def record(patches: list[Patch], version: str) -> FingerprintStore:
    """Fingerprints of the targets of all patches.

    Raises:
        PatchError: if a target is missing.
    """
    return FingerprintStore({patch.target: take(resolve(patch.target, patch.id)) for patch in patches}, version)


def built_in_patches() -> list[Patch]:
    """The engine's patches and those of every built-in feature."""
    patches = list(ENGINE_PATCHES)
    for entry in features.BUILT_IN:
        patches += features.load(entry).patches()
    return patches


def main(argv: list[str] | None = None) -> int:
    """See the module docstring. Exit code 0; 1 if --check finds a difference; 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m k3_plugins.patching.record", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    parser.add_argument("--feature", help="a third party's feature instead of the engine and the built-in ones")
    parser.add_argument("--out", type=Path, help="the JSON file (by default the one inside this package)")
    options = parser.parse_args(argv)
    if (options.feature is None) != (options.out is None):
        fail("--feature and --out go together")
    found = find_megatron()
    if found is None:
        fail("Megatron-Core is not on the import path")
    try:
        if options.feature:
            (entry,) = features.select([options.feature]).entries
            patches = list(features.load(entry).patches())
        else:
            patches = built_in_patches()
        store = record(patches, found.version)
    except (FeatureError, PatchError) as error:
        fail(str(error))
    out = options.out or fingerprint_file(found.version)
    if options.check:
        same = out.is_file() and FingerprintStore.read(out).targets == store.targets
        print(f"{out.name} is {'up to date' if same else 'out of date'} for Megatron {found.version}")
        return 0 if same else 1
    store.write(out)
    print(f"{len(store.targets)} targets of Megatron {found.version} written to {out.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
