"""Patches to Megatron, and the manager that checks all of them before it applies any.

    Patch(id, target="megatron.training.training:train_step", kind=PatchKind.WRAP | REPLACE | REGISTER,
          implementation, feature, reason, remove_when)
    PatchManager(patches, fingerprints, allow_drift=()).check_all() -> list[PatchStatus]; .apply_all(); .recheck()

This package imports neither torch nor megatron; targets are imported when they are resolved.
"""

from k3_plugins.patching.errors import (
    BodyDrift,
    DoubleReplace,
    MissingTarget,
    Overwritten,
    PatchError,
    SignatureDrift,
    UnrecordedTarget,
)
from k3_plugins.patching.manager import PatchManager
from k3_plugins.patching.patch import Patch, PatchKind
from k3_plugins.patching.status import PatchState, PatchStatus

__all__ = [
    "BodyDrift",
    "DoubleReplace",
    "MissingTarget",
    "Overwritten",
    "Patch",
    "PatchError",
    "PatchKind",
    "PatchManager",
    "PatchState",
    "PatchStatus",
    "SignatureDrift",
    "UnrecordedTarget",
]
