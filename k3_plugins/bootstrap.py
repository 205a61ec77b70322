"""The one entrance: every door calls :func:`activate` with the command line before it imports Megatron.

    activate(sys.argv[1:], door="k3_plugins.pretrain_gpt") -> Activation | None

Order of events: read the control flags; look the names up (nothing imported yet); select the platform; import and
verify the features; check all patches; apply all patches. Whatever is wrong ends the process with exit code 2 and a
sentence that says what to type; as every rank reads the same command line, so does every rank.

Without ``--k3-plugins`` nothing is imported or patched and the result is None; the control flags, if there are any,
are taken out of ``sys.argv``, because the stock parser does not know them.

This module imports neither torch nor megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from k3_plugins import activation as activation_module
from k3_plugins import features as feature_list
from k3_plugins import manifest
from k3_plugins.activation import Activation
from k3_plugins.arguments import (
    Control,
    command_line,
    described_model,
    flag_value,
    hint,
    parse_control,
)
from k3_plugins.compat.megatron import find_megatron, fingerprint_file
from k3_plugins.failure import EXIT_BAD_ARGUMENTS, PREFIX, fail, place_of
from k3_plugins.feature import Feature, FeatureError
from k3_plugins.patching import PatchError, PatchManager
from k3_plugins.patching.fingerprint import FingerprintStore
from k3_plugins.platform import PlatformError, select

OWN_DOOR = "k3_plugins.pretrain_gpt"

_opened: Control | None = None
"""What the first door of this process was opened with."""


def activate(argv: Sequence[str], door: str) -> Activation | None:
    """Turn on the features that the command line names.

    Args:
        argv: the command line without the program's name.
        door: who calls, for the doctor and for messages.

    Returns:
        the activation, or None if no feature is named. A second call with the same control flags returns the same.

    Raises:
        SystemExit: with code 2, after a sentence on stderr, if anything about the set is wrong.
    """
    try:
        return _activate(argv, door)
    except (FeatureError, PatchError, PlatformError) as error:
        fail(str(error))


def opened() -> Control:
    """The control flags that the first door of this process was opened with."""
    assert _opened is not None, "no door was opened"
    return _opened


@contextmanager
def explained_exit(argv: Sequence[str]) -> Iterator[None]:
    """For doors: when Megatron's stock parser refuses the command line, say which feature an unknown flag belongs to.

    With a feature on, the parser itself says so.
    """
    try:
        yield
    except SystemExit as stop:
        if stop.code == EXIT_BAD_ARGUMENTS and activation_module.current() is None:
            text = hint(argv, active=(), known_flags=[])
            if text:
                print(f"{PREFIX.rstrip()}{text}", file=sys.stderr, flush=True)
        raise


def _activate(argv: Sequence[str], door: str) -> Activation | None:
    global _opened
    control, _ = parse_control(argv)
    if _opened is not None:
        return _again(control, door)
    selection = feature_list.select(control.plugins, command_line(argv, control.model, door))
    if not selection.entries:
        _without_features(control, selection, argv, door)
        _opened = control
        return None
    if flag_value(argv, "--yaml-cfg") is not None:
        raise FeatureError("--yaml-cfg bypasses Megatron's flags, and with them those of the features: give flags")
    platform = select(control.platform)
    active = [feature_list.load(entry) for entry in selection.entries]
    feature_list.check_relations(active)
    active = feature_list.in_dependency_order(active)
    if control.model is not None:
        described_model(control.model, [feature.name for feature in active])
    manager, version = patch_manager(active, control.allow_drift)
    manager.apply_all()
    activation = Activation(
        features=tuple(active),
        platform=platform.name,
        platform_reason=platform.reason,
        door=door,
        control=control,
        manager=manager,
        megatron_version=version,
        left_out=selection.left_out,
    )
    activation_module.set_current(activation)
    _opened = control
    return activation


def _again(control: Control, door: str) -> Activation | None:
    assert _opened is not None
    without_plugins = Control(platform=control.platform)
    if control == _opened or (not _opened.plugins and control in (Control(), without_plugins)):
        return activation_module.current()
    raise FeatureError(
        f"{door} asks for --k3-plugins {','.join(control.plugins) or '(none)'}, but this process was started with "
        f"--k3-plugins {','.join(_opened.plugins) or '(none)'}; the features of a process cannot change: "
        "start a new process"
    )


def _without_features(control: Control, selection: feature_list.Selection, argv: Sequence[str], door: str) -> None:
    if selection.left_out:
        raise FeatureError(f"--k3-plugins leaves no feature: {'; '.join(selection.left_out)}")
    meaningless = {
        "--k3-allow-drift": control.allow_drift,
        "--k3-allow-empty-load": control.allow_empty_load and door != OWN_DOOR,  # its checks need no feature
        "--k3-model": control.model,
    }
    for flag in (flag for flag, given in meaningless.items() if given):
        raise FeatureError(f"{flag} means nothing without --k3-plugins: name the features, or remove the flag")
    load = flag_value(argv, "--load")
    if load is not None:
        optimizer = not {"--no-load-optim", "--finetune"} & set(argv)
        manifest.refuse_without_features(load, flag_value(argv, "--ckpt-step"), optimizer)
    select(control.platform)
    sys.argv[1:] = parse_control(sys.argv[1:])[1]


def patch_manager(features: Sequence[Feature], allow_drift: Sequence[str]) -> tuple[PatchManager, str]:
    """The manager for the engine's patches and those of the features, and the version of the Megatron found.

    Raises:
        FeatureError: if there is no Megatron, or a feature cannot list its patches.
        PatchError: if the patches contradict each other.
    """
    from k3_plugins.engine import ENGINE_PATCHES, FIRST_STEP

    found = find_megatron()
    if found is None:
        raise FeatureError(
            "Megatron-Core is not on the import path: pip install megatron-core==0.19.2, or put a Megatron-LM checkout "
            "on PYTHONPATH"
        )
    store = FingerprintStore.read(fingerprint_file(found.version))
    patches = [patch for patch in ENGINE_PATCHES if patch is not FIRST_STEP]
    for feature in features:
        try:
            own = list(feature.patches())
        except Exception as error:  # a third party's code; whatever it raises, its feature cannot be had
            raise FeatureError(
                f"feature {feature.name!r} cannot list its patches: {type(error).__name__}: {error} ({place_of(error)})"
            ) from error
        for patch in own:
            if not patch.id.startswith(f"{feature.name}."):
                raise FeatureError(
                    f"feature {feature.name!r}: the id of patch {patch.id!r} must begin with '{feature.name}.'"
                )
        patches += own
        if hasattr(feature, "fingerprints"):
            store = store.merged(_own_fingerprints(feature.name, feature.fingerprints))
    # The outermost hand on train_step: witnesses are asked after everything that features do around a step.
    patches.append(FIRST_STEP)
    return PatchManager(patches, store, allow_drift), found.version


def _own_fingerprints(name: str, file: Callable[[], Any]) -> FingerprintStore:
    """What a feature from another distribution recorded of its patches' targets."""
    try:
        return FingerprintStore.read(file())
    except FileNotFoundError as error:
        raise FeatureError(
            f"feature {name!r} has no file of fingerprints {error.filename}: ship it with the package, or "
            f"record it with python -m k3_plugins.patching.record --feature {name} --out {error.filename}"
        ) from error
    except Exception as error:  # a third party's code and file
        raise FeatureError(
            f"feature {name!r}: its fingerprints cannot be read: {type(error).__name__}: {error} "
            f"({place_of(error)})"
        ) from error
