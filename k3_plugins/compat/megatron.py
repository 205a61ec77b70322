"""Which Megatron is on the import path, without importing it, and which recorded fingerprints fit it.

The version string is only a hint: whether a patch may be applied is decided by comparing its target.
"""

import ast
import importlib.machinery
from dataclasses import dataclass
from pathlib import Path

VERIFIED_VERSION = "0.19.2"
"""The release whose loop, checkpoints and layouts the tests of this repository run against."""

_FINGERPRINTS = Path(__file__).resolve().parent.parent / "patching" / "fingerprints"


@dataclass(frozen=True)
class MegatronFound:
    """Where ``import megatron.core`` would find Megatron."""

    root: Path
    """The folder that holds ``megatron/``."""
    version: str
    """From ``megatron/core/package_info.py``; ``unknown`` if that file does not say."""
    kind: str
    """``wheel`` (installed by pip) or ``checkout`` (a source tree on the path)."""


def find_megatron() -> MegatronFound | None:
    """Locate Megatron-Core on ``sys.path``; None if there is none."""
    spec = importlib.machinery.PathFinder.find_spec("megatron")
    for location in spec.submodule_search_locations or () if spec else ():
        core = Path(location) / "core"
        if (core / "__init__.py").is_file():
            root = core.parent.parent
            kind = "wheel" if root.name in ("site-packages", "dist-packages") else "checkout"
            return MegatronFound(root=root, version=_version(core / "package_info.py"), kind=kind)
    return None


def has_training(found: MegatronFound) -> bool:
    """Whether ``megatron.training``, which this project drives, is there as well."""
    return (found.root / "megatron" / "training" / "training.py").is_file()


def _version(package_info: Path) -> str:
    if not package_info.is_file():
        return "unknown"
    values: dict[str, object] = {}
    for node in ast.parse(package_info.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values.update({target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)})
    parts = [values.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(isinstance(part, int) for part in parts):
        return "unknown"
    return ".".join(map(str, parts)) + str(values.get("PRE_RELEASE", ""))


def fingerprint_file(version: str) -> Path:
    """The recorded fingerprints for a Megatron: those of its version if there are any, else of the verified one."""
    exact = _FINGERPRINTS / f"core_v{version}.json"
    return exact if exact.is_file() else _FINGERPRINTS / f"core_v{VERIFIED_VERSION}.json"
