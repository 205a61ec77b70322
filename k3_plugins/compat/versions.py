"""The versions that the tests of this repository run with, and how the installed ones compare.

``requirements.txt`` holds the same numbers for pip; a test keeps the two equal.
"""

import importlib.metadata
import sys
from dataclasses import dataclass

PYTHON = ("3.12", "3.13")
"""Megatron-Core 0.19.2 has wheels for these."""

VERIFIED = {
    "torch": "2.13.0",
    "megatron-core": "0.19.2",
    "numpy": "2.5.5",
    "nvidia-modelopt": "0.47.0",
    "emerging-optimizers": "0.3.0",
    "einops": "0.8.2",
}
"""Distribution -> verified version."""


@dataclass(frozen=True)
class Version:
    """One line of the doctor's version table."""

    name: str
    installed: str | None
    """None if it is not installed."""
    verified: str

    @property
    def same(self) -> bool:
        """Whether the installed version is a verified one; a local label such as ``+cu130`` does not count."""
        return self.installed is not None and self.installed.partition("+")[0] in self.verified.split(" or ")


def installed_versions() -> list[Version]:
    """Python and the packages that decide whether the verified behaviour can be expected."""
    python = ".".join(map(str, sys.version_info[:2]))
    versions = [Version("python", python, " or ".join(PYTHON))]
    for name, verified in VERIFIED.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = None
        versions.append(Version(name, installed, verified))
    return versions
