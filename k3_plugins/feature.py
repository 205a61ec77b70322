"""The Feature protocol: what a feature folder must offer so that the engine can turn it on by name.

A feature folder holds ``feature.py`` with ``FEATURE``, an instance that satisfies :class:`Feature`::

    class Kda:
        name = "kda"                       # the word after --k3-plugins
        requires = ()                      # features that must be named too
        conflicts = ()                     # features that must not be named
        config = KdaConfig                 # dataclass whose fields become --kebab-case flags, or None
        changes_parameters = True          # without it, or with other flags, a checkpoint is another model

        def patches(self) -> Sequence[Patch]: ...
        def validate(self, args, config) -> None: ...          # raise FeatureError -> exit code 2
        def witness(self, model_chunks, args) -> Witness: ...  # called once, after the first train step

    FEATURE = Kda()

Optional members, used when present: ``backends(config) -> Sequence[Backend]`` (what the start table and the doctor
show), ``argument_defaults() -> Mapping`` (what Megatron's own flags default to while the feature is on, by argparse
destination), ``fingerprints() -> path`` (a third party's recorded fingerprints, written by
``python -m k3_plugins.patching.record``), ``changes_optimizer = True`` (the optimizer state in a checkpoint is of no
use without the feature) and ``may_join = True`` (with ``changes_parameters``: a checkpoint that was saved without the
feature may be loaded with it, but not the reverse).

Every field of the config of a feature with ``changes_parameters = True`` counts when a checkpoint is loaded, unless
its metadata says otherwise: ``field(default="auto", metadata={"changes_parameters": False})``.

This module imports neither torch nor megatron.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from argparse import Namespace

    from k3_plugins.patching import Patch

FEATURE_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class FeatureError(Exception):
    """The user's arguments or environment do not suit a feature. The text says what to type; the job exits with 2."""


@dataclass(frozen=True)
class Witness:
    """Proof, after the first training step, that a feature really ran on this rank."""

    summary: str
    """One line for the start table, such as ``3 KDA layers, backend torch``."""
    ok: bool
    """False ends the job on every rank: a feature that was asked for did not run."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Numbers behind the summary (JSON types)."""


@dataclass(frozen=True)
class Backend:
    """One implementation a feature could run on, for the start table and the doctor."""

    name: str
    chosen: bool
    why: str
    """Why it was chosen, or why it was not (the probe's own error text where there is one)."""


class Feature(Protocol):
    """What the engine needs to know about a feature (see the module docstring)."""

    name: str
    requires: Sequence[str]
    conflicts: Sequence[str]
    config: type | None
    changes_parameters: bool

    def patches(self) -> Sequence[Patch]:
        """Patches to Megatron, each with the reason why no seam was enough. Called only when the feature is on."""

    def validate(self, args: Namespace, config: Any) -> None:
        """Check the parsed arguments before Megatron's own validation; may set ``args``. Raises FeatureError."""

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Called on every rank after the first training step with Megatron's list of model chunks."""


_METHODS = {"patches": 0, "validate": 2, "witness": 2}
_PARAMETERS = {"patches": "()", "validate": "(args, config)", "witness": "(model_chunks, args)"}
_OPTIONAL_METHODS = {"backends": (1, "(config)"), "fingerprints": (0, "()"), "argument_defaults": (0, "()")}


def verify(feature: Any, *, registered_as: str, origin: str) -> None:
    """Compare an implementation with the protocol, as pluggy does with hook specifications.

    Args:
        feature: the object found under ``FEATURE`` (or the entry point).
        registered_as: the name it is listed under.
        origin: where it came from, for the message.

    Raises:
        FeatureError: naming every deviation at once.
    """
    faults = list(_attribute_faults(feature, registered_as))
    for method, arity in _METHODS.items():
        faults += _method_faults(feature, method, arity, _PARAMETERS[method])
    for method, (arity, parameters) in _OPTIONAL_METHODS.items():
        if hasattr(feature, method):
            faults += _method_faults(feature, method, arity, parameters)
    if faults:
        listing = "\n".join(f"  - {fault}" for fault in faults)
        raise FeatureError(f"feature {registered_as!r} from {origin} does not satisfy the Feature protocol:\n{listing}")


def _attribute_faults(feature: Any, registered_as: str) -> list[str]:
    faults = []
    name = getattr(feature, "name", None)
    if name is None:
        faults.append("attribute 'name' is missing (a string)")
    elif not isinstance(name, str) or not FEATURE_NAME.fullmatch(name):
        faults.append(f"attribute 'name' must be lower-case words joined by hyphens, it is {name!r}")
    elif name != registered_as:
        faults.append(f"attribute 'name' is {name!r} but the feature is registered as {registered_as!r}")
    for attribute in ("requires", "conflicts"):
        value = getattr(feature, attribute, None)
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
            faults.append(f"attribute {attribute!r} must be a sequence of feature names, it is {value!r}")
    if not hasattr(feature, "config"):
        faults.append("attribute 'config' is missing (a dataclass type, or None when there are no flags)")
    elif feature.config is not None and not (
        isinstance(feature.config, type) and dataclasses.is_dataclass(feature.config)
    ):
        faults.append(f"attribute 'config' must be a dataclass type or None, it is {feature.config!r}")
    if not isinstance(getattr(feature, "changes_parameters", None), bool):
        faults.append(
            "attribute 'changes_parameters' must be True or False, "
            f"it is {getattr(feature, 'changes_parameters', 'missing')!r}"
        )
    return faults


def _method_faults(feature: Any, method: str, arity: int, parameters: str) -> list[str]:
    function = getattr(feature, method, None)
    if not callable(function):
        return [f"method {method}{parameters} is missing"]
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * arity)
    except TypeError:
        return [f"method {method} must be callable as {method}{parameters}, its signature is {method}{signature}"]
    return []
