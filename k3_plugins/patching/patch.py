"""One patch: what it changes in Megatron, and why no extension seam was enough."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class PatchKind(Enum):
    """How a patch reaches its target, from the gentlest to the strongest."""

    REGISTER = "register"
    """``implementation(registry) -> None`` adds entries to a registry (dict, list or set). For another type it
    returns a function that undoes the change."""
    WRAP = "wrap"
    """``implementation(original) -> replacement``; several stack in feature order, the first one innermost."""
    REPLACE = "replace"
    """``implementation`` is the replacement; at most one for a target."""


@dataclass(frozen=True)
class Patch:
    """A change to one Megatron object.

    Raises:
        ValueError: from the constructor, if a field is empty or malformed.
    """

    id: str
    """Unique name, ``feature.what``; the word for --k3-allow-drift."""
    target: str
    """``package.module:attribute`` or ``package.module:Class.method``, where the object is DEFINED."""
    kind: PatchKind
    implementation: Callable[..., Any]
    feature: str
    """The feature it belongs to, or ``engine``."""
    reason: str
    """Why no seam and no registry was enough."""
    remove_when: str
    """What upstream would have to offer for this patch to go away."""

    def __post_init__(self) -> None:
        for name in ("id", "target", "feature", "reason", "remove_when"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"patch {self.id!r}: field {name!r} must be a non-empty string, it is {value!r}")
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f"patch {self.id!r}: target {self.target!r} is not of the form package.module:attribute")
        if not isinstance(self.kind, PatchKind):
            raise ValueError(f"patch {self.id!r}: kind must be a PatchKind, it is {self.kind!r}")
        if not callable(self.implementation):
            raise ValueError(f"patch {self.id!r}: implementation must be callable, it is {self.implementation!r}")
