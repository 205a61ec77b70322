"""Checks all patches, then applies all of them, keeps them applied, and can take them back.

The order of events::

    manager = PatchManager(patches, store, allow_drift)
    statuses = manager.check_all()     # resolves and compares; changes nothing
    manager.apply_all()                # REGISTER and REPLACE first, then WRAPs in feature order; all or nothing
    manager.recheck()                  # after later imports: binds what still holds an original, finds intruders
    manager.rollback()

A function that another module imported by name (``from m import f``) lives on under that module's own name, so
rebinding the defining module is not enough: every module in ``sys.modules`` and every class defined in one is
searched for the original object, by identity.
"""

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from k3_plugins.patching.errors import DoubleReplace, MissingTarget, Overwritten, PatchError
from k3_plugins.patching.fingerprint import FingerprintStore, diff, take
from k3_plugins.patching.patch import Patch, PatchKind
from k3_plugins.patching.status import PatchState, PatchStatus
from k3_plugins.patching.target import Target, behind, is_registry, like, resolve

_DESCRIPTORS = (staticmethod, classmethod)


@dataclass(frozen=True)
class Binding:
    """One name that was rebound: in the defining module, in an importing module, or in a class."""

    where: str
    owner: Any
    name: str
    before: Any
    after: Any


class PatchManager:
    """Owns all patches of one activation."""

    def __init__(self, patches: Iterable[Patch], store: FingerprintStore, allow_drift: Sequence[str] = ()) -> None:
        """Args:
        patches: in feature order; this is the order in which WRAPs of one target stack, the first one innermost.
        store: recorded fingerprints.
        allow_drift: ids of patches whose target may have another body than the recorded one.

        Raises:
            PatchError: for a repeated id, or an ``allow_drift`` id that names no patch.
            DoubleReplace: if two patches replace one target.
        """
        self.patches = tuple(patches)
        self.store = store
        self.allow_drift = frozenset(allow_drift)
        self.bindings: list[Binding] = []
        self.statuses: list[PatchStatus] = []
        self._targets: dict[str, Target] = {}
        self._replacements: dict[str, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self._reject_inconsistent()

    def _reject_inconsistent(self) -> None:
        seen: dict[str, Patch] = {}
        replaced: dict[str, Patch] = {}
        for patch in self.patches:
            if patch.id in seen:
                raise PatchError(f"patch id {patch.id!r} is used by {seen[patch.id].feature} and {patch.feature}")
            seen[patch.id] = patch
            if patch.kind is PatchKind.REPLACE:
                other = replaced.setdefault(patch.target, patch)
                if other is not patch:
                    raise DoubleReplace(
                        f"patches {other.id} (feature {other.feature}) and {patch.id} (feature {patch.feature}) both "
                        f"replace {patch.target}; leave one of the two features out of --k3-plugins"
                    )
        unknown = sorted(self.allow_drift - seen.keys())
        if unknown:
            raise PatchError(
                f"--k3-allow-drift names {', '.join(unknown)}, which is no patch of the active features; "
                f"the patches are {', '.join(sorted(seen)) or 'none'}"
            )

    # -- checking ------------------------------------------------------------------------------------------------

    def check_all(self) -> list[PatchStatus]:
        """Resolve every target and compare it with its fingerprint. Changes nothing but imports."""
        self.statuses = [self._check(patch) for patch in self.patches]
        return self.statuses

    def _check(self, patch: Patch) -> PatchStatus:
        try:
            target = self._resolve(patch)
            registry = is_registry(target.value)
        except MissingTarget as error:
            return PatchStatus(patch, PatchState.MISSING, str(error))
        if registry != (patch.kind is PatchKind.REGISTER):
            what = "data, not a function or class" if registry else "a function or class, not a registry"
            return PatchStatus(
                patch,
                PatchState.SIGNATURE_DRIFT,
                f"patch {patch.id}: {patch.kind.value} {patch.target}, which is {what}",
            )
        recorded = self.store.get(patch.target)
        if recorded is None:
            return PatchStatus(
                patch,
                PatchState.UNRECORDED,
                f"patch {patch.id}: no fingerprint is recorded for {patch.target}; record it with "
                f"python -m k3_plugins.patching.record",
            )
        try:
            found = take(target)
        except (OSError, TypeError) as error:
            return PatchStatus(
                patch, PatchState.SIGNATURE_DRIFT, f"patch {patch.id}: the source of {patch.target} is gone ({error})"
            )
        for what in ("kind", "module", "signature"):
            before, now = getattr(recorded, what), getattr(found, what)
            if before != now:
                label = "defining module" if what == "module" else what
                return PatchStatus(
                    patch,
                    PatchState.SIGNATURE_DRIFT,
                    f"patch {patch.id}: the {label} of {patch.target} is {now}, it was {before} when the patch was "
                    f"written for Megatron {self.store.version}; leave feature {patch.feature} out or use that version",
                    diff(recorded, target, self.store.version),
                )
        if found.body != recorded.body:
            allowed = patch.id in self.allow_drift
            return PatchStatus(
                patch,
                PatchState.DRIFT_ALLOWED if allowed else PatchState.BODY_DRIFT,
                f"patch {patch.id}: the body of {patch.target} is not the one of Megatron {self.store.version}"
                + ("" if allowed else self._to_allow(patch)),
                diff(recorded, target, self.store.version),
            )
        return PatchStatus(patch, PatchState.OK, f"as recorded with Megatron {self.store.version}")

    def _to_allow(self, patch: Patch) -> str:
        others = "".join(f",{name}" for name in sorted(self.allow_drift))
        return (
            f"; read the difference (python -m k3_plugins.doctor --k3-plugins {patch.feature}), then add "
            f"--k3-allow-drift {patch.id}{others}"
        )

    def _resolve(self, patch: Patch) -> Target:
        """Resolve once: after a patch is applied its target must still mean the original."""
        if patch.target not in self._targets:
            self._targets[patch.target] = resolve(patch.target, patch.id)
        return self._targets[patch.target]

    # -- applying ------------------------------------------------------------------------------------------------

    @property
    def applied(self) -> bool:
        """True between a successful :meth:`apply_all` and :meth:`rollback`."""
        return bool(self._undo)

    def apply_all(self) -> None:
        """Apply every patch, or none. A second call does nothing.

        Raises:
            PatchError: of the kind of the first fatal status (its text lists all of them), or the failure of an
                implementation, after everything was taken back.
        """
        if self.applied:
            return
        fatal = [status for status in self.statuses or self.check_all() if status.fatal]
        if fatal:
            raise type(fatal[0].error())("\n".join(status.message for status in fatal))
        self._undo.append(lambda: None)
        patch = None
        try:
            for patch in self._application_order():
                self._apply(patch)
            patch = None
            self._rebind_everywhere()
        except BaseException as error:
            self.rollback()
            if patch is None or isinstance(error, PatchError) or not isinstance(error, Exception):
                raise
            raise PatchError(
                f"patch {patch.id} (feature {patch.feature}) could not be applied: {type(error).__name__}: {error}; "
                "every patch was taken back"
            ) from error

    def _application_order(self) -> list[Patch]:
        """WRAPs go around REPLACEs whatever the feature order; otherwise feature order (sorted() is stable)."""
        return sorted(self.patches, key=lambda patch: patch.kind is PatchKind.WRAP)

    def _apply(self, patch: Patch) -> None:
        target = self._targets[patch.target]
        if patch.kind is PatchKind.REGISTER:
            self._undo.append(_register(patch, target.value))
            return
        if patch.kind is PatchKind.REPLACE:
            replacement = patch.implementation
        else:
            replacement = patch.implementation(self._replacements.get(patch.target, target.value))
            if not callable(replacement):
                raise PatchError(f"patch {patch.id}: the implementation returned {replacement!r} instead of a callable")
        self._replacements[patch.target] = replacement
        self._bind(target.owner, target.name, like(target.raw, replacement), patch.target.partition(":")[0])

    def _bind(self, owner: Any, name: str, value: Any, where: str) -> None:
        before = inspect.getattr_static(owner, name)
        self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)
        self.bindings.append(Binding(where, owner, name, before, value))

    def _rebind_everywhere(self) -> list[Binding]:
        """Point every module and class that still holds an original at its replacement."""
        known = {id(self._targets[spec].value): spec for spec in self._replacements}
        start = len(self.bindings)
        for where, owner, name, value in _holders(known.keys()):
            self._bind(owner, name, like(value, self._replacements[known[id(behind(value))]]), where)
        return self.bindings[start:]

    def recheck(self) -> list[Binding]:
        """Look again, after the model is built or modules were imported late.

        Returns:
            the names that still held an original and were rebound now.

        Raises:
            Overwritten: if somebody else rebound a patched target in the meantime.
        """
        for spec, replacement in self._replacements.items():
            target = self._targets[spec]
            current = behind(inspect.getattr_static(target.owner, target.name))
            if current is not replacement:
                ids = ", ".join(patch.id for patch in self.patches if patch.target == spec)
                raise Overwritten(
                    f"{spec} was rebound after the patches {ids} were applied, now it is {current!r} from module "
                    f"{getattr(current, '__module__', 'unknown')}; import that module before activation or leave it out"
                )
        return self._rebind_everywhere()

    def rollback(self) -> None:
        """Take everything back in reverse order."""
        while self._undo:
            self._undo.pop()()
        self.bindings.clear()
        self._replacements.clear()

    def bindings_of(self, patch: Patch) -> list[Binding]:
        """The names a patch is bound to now."""
        replacement = self._replacements.get(patch.target)
        return [binding for binding in self.bindings if behind(binding.after) is replacement]


def _holders(wanted: Set[int]) -> list[tuple[str, Any, str, Any]]:
    """(module name, owner, name, value) wherever an object with one of these ids is bound.

    Looks at every global of every module and every member of a class in the module that defines it. Some hundred
    thousand names pass here: type() instead of isinstance(), because isinstance() asks the object for its __class__,
    which is slow, and which some objects answer with a warning.
    """
    found = []
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in wanted:
                found.append((module_name, module, name, value))
            elif issubclass(type(value), type) and vars(value).get("__module__") == module_name:
                found += [
                    (module_name, value, member, inner)
                    for member, inner in vars(value).items()
                    if id(inner) in wanted or (type(inner) in _DESCRIPTORS and id(inner.__func__) in wanted)
                ]
    return found


def _register(patch: Patch, registry: Any) -> Callable[[], None]:
    """Run a REGISTER implementation and return what undoes it."""
    if isinstance(registry, (dict, list, set)):
        before = registry.copy()

        def restore() -> None:
            registry.clear()
            registry.extend(before) if isinstance(registry, list) else registry.update(before)

        try:
            patch.implementation(registry)
        except BaseException:
            restore()
            raise
        return restore
    undo = patch.implementation(registry)
    if not callable(undo):
        raise PatchError(
            f"patch {patch.id}: {patch.target} is a {type(registry).__name__}; its implementation must return a "
            "function that undoes the registration"
        )
    return undo
