"""What is on in this process: the one object that features, model builders and reports ask.

activation = k3_plugins.activation.active()      # in a feature's code, which runs only when features are on
activation = k3_plugins.activation.current()     # elsewhere: None when no feature was named
activation.config("kda")                         # the typed config, after the arguments were parsed
activation.platform                              # "cpu" or "cuda"
activation.as_dict()                             # JSON: what is compared across ranks and saved in reports
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import k3_plugins
from k3_plugins.arguments import Control, plain_config
from k3_plugins.feature import Feature, FeatureError, Witness
from k3_plugins.patching import PatchManager

if TYPE_CHECKING:
    from k3_plugins.agreement import AbortChannel


@dataclass
class Activation:
    """The active features, in feature order, with everything the engine knows about them."""

    features: tuple[Feature, ...]
    platform: str
    platform_reason: str
    door: str
    control: Control
    manager: PatchManager
    megatron_version: str
    left_out: tuple[str, ...] = ()
    """Preset members that do not fit the parallel layout, with the reason."""
    configs: dict[str, Any] = field(default_factory=dict)
    """Typed config by feature name; filled when Megatron's arguments are parsed."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """What decides the parameters' shapes besides the features; filled at the same time."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """How the job is split over ranks and what a step holds; filled at the same time."""
    witnesses: Mapping[str, Witness] = field(default_factory=dict)
    """This rank's witness by feature name; filled after the first training step."""
    abort_channel: AbortChannel | None = None
    """How a rank that fails during set-up tells the others; None in a job of one process."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the active features, in feature order."""
        return tuple(feature.name for feature in self.features)

    def config(self, name: str) -> Any:
        """The typed config of an active feature (None if it has no flags).

        Raises:
            FeatureError: if the feature is not active, or the arguments were not parsed yet.
        """
        if name not in self.names:
            raise FeatureError(f"feature {name!r} is not active: add it to --k3-plugins {','.join(self.names)}")
        if name not in self.configs:
            raise FeatureError(f"the config of feature {name!r} is read before Megatron's arguments were validated")
        return self.configs[name]

    def as_dict(self) -> dict[str, Any]:
        """Everything that must be the same on every rank, as JSON values."""
        return {
            "features": list(self.names),
            "configs": {name: plain_config(config) for name, config in self.configs.items()},
            "model": dict(self.model),
            "layout": dict(self.layout),
            "patches": [
                f"{patch.id} {patch.kind.value} {patch.target} ({patch.feature})" for patch in self.manager.patches
            ],
            "platform": self.platform,
            "megatron": self.megatron_version,
            "k3_plugins": k3_plugins.__version__,
        }


def digest(contents: Mapping[str, Any]) -> str:
    """A short hash of JSON values, the same for equal values in any order of keys."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]


_current: Activation | None = None


def current() -> Activation | None:
    """The activation of this process, or None if no feature was named."""
    return _current


def active() -> Activation:
    """The activation of this process, for code that runs only when features are on.

    Raises:
        FeatureError: if no feature was named.
    """
    activation = current()
    if activation is None:
        raise FeatureError("no feature is active in this process: name features with --k3-plugins")
    return activation


def set_current(activation: Activation | None) -> None:
    """For :mod:`k3_plugins.bootstrap`."""
    global _current
    _current = activation
