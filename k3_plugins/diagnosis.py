"""What the doctor finds out, as plain data: everything that activation would do, without changing anything.

No GPU and no torch.distributed are needed. Megatron is imported, because its functions are compared with the recorded
fingerprints. The verdict is

    0   activation would succeed, and everything is as verified
    1   activation would succeed, but something differs from what was verified (``warnings``)
    2   activation would fail (``problems``)
"""

from __future__ import annotations

import argparse
import io
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k3_plugins import features as feature_list
from k3_plugins.agreement import layout
from k3_plugins.arguments import Control, command_line, config_from_args, described_model, extend_parser
from k3_plugins.bootstrap import patch_manager
from k3_plugins.compat.megatron import VERIFIED_VERSION, MegatronFound, find_megatron, fingerprint_file, has_training
from k3_plugins.compat.optional import PACKAGES, probe
from k3_plugins.compat.versions import installed_versions
from k3_plugins.failure import PREFIX, place_of
from k3_plugins.feature import Feature, FeatureError
from k3_plugins.patching import PatchError, PatchState
from k3_plugins.platform import detect
from k3_plugins.training.inputs import check_derived_sizes, check_evaluation, check_layout, check_sizes

PATCH_MARKER = "k3_plugins.bootstrap"
"""What a ``pretrain_gpt.py`` with the source patch contains."""


@dataclass
class Diagnosis:
    """The doctor's report; every field holds JSON values."""

    megatron: dict[str, Any] | None = None
    platform: dict[str, Any] = field(default_factory=dict)
    doors: list[dict[str, Any]] = field(default_factory=list)
    versions: list[dict[str, Any]] = field(default_factory=list)
    features: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What a preset leaves out, and what it would need."""
    patches: list[dict[str, Any]] = field(default_factory=list)
    optional: list[dict[str, Any]] = field(default_factory=list)
    optimizer: list[dict[str, Any]] = field(default_factory=list)
    """How each parameter is updated, if that was asked for."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Parallel sizes and batch as Megatron derives them, if its checks were asked for (``--ranks``)."""
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    arguments: argparse.Namespace | None = field(default=None, repr=False)
    """The arguments as training would see them, where Megatron's checks were asked for and passed."""
    defaults: argparse.Namespace | None = field(default=None, repr=False)
    """What Megatron's own parser gives an empty command line."""

    @property
    def verdict(self) -> int:
        """The exit code; see the module docstring."""
        return 2 if self.problems else 1 if self.warnings else 0

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        values = {"verdict": self.verdict, **asdict(self)}
        del values["arguments"], values["defaults"]
        return values


def diagnose(
    control: Control, training_flags: Sequence[str], ranks: int | None = None, door: str | None = None
) -> Diagnosis:
    """Examine this environment.

    Args:
        control: the ``--k3-*`` flags; without ``--k3-plugins`` every feature that could be named is examined by itself.
        training_flags: Megatron and feature flags; they are parsed and validated by the features if there are any.
        ranks: let Megatron check the flags as well, as in a job of so many ranks.
        door: the program that would be started, for presets of features that depend on it.
    """
    found = Diagnosis()
    megatron = _megatron(found)
    _versions(found)
    _platform(found, control)
    _doors(found, megatron)
    features = _features(found, control, training_flags, door)
    if megatron is not None:
        _patches(found, features, control)
        _flags(found, features, control, training_flags, ranks)
    _optional(found)
    return found


def _megatron(found: Diagnosis) -> MegatronFound | None:
    megatron = find_megatron()
    if megatron is None:
        found.problems.append(
            f"Megatron-Core is not on the import path: pip install megatron-core=={VERIFIED_VERSION}, or put a "
            "Megatron-LM checkout on PYTHONPATH"
        )
        return None
    found.megatron = {
        "path": str(megatron.root),
        "version": megatron.version,
        "kind": megatron.kind,
        "fingerprints": fingerprint_file(megatron.version).stem,
    }
    if not has_training(megatron):
        found.problems.append(
            f"{megatron.root} holds megatron.core without megatron.training: pip install "
            f"megatron-core=={VERIFIED_VERSION}"
        )
    if megatron.version != VERIFIED_VERSION:
        found.warnings.append(
            f"Megatron {megatron.version} is not the verified {VERIFIED_VERSION}; the patch targets are compared below"
        )
    return megatron


def _versions(found: Diagnosis) -> None:
    for version in installed_versions():
        if version.name == "megatron-core" and version.installed is None:
            continue  # a checkout has no distribution; its version was compared above
        found.versions.append({**asdict(version), "same": version.same})
        if version.name != "megatron-core" and not version.same:
            found.warnings.append(f"{version.name} is {version.installed or 'missing'}, verified is {version.verified}")


def _platform(found: Diagnosis, control: Control) -> None:
    try:
        gpu = detect.gpu()
    except Exception as error:  # torch is missing or broken, in one of the ways a package can break
        found.problems.append(f"torch cannot be used ({type(error).__name__}: {error}): pip install torch==2.13.0")
        return
    asked = control.platform or "auto"
    chosen = asked if asked != "auto" else "cuda" if gpu.usable else "cpu"
    found.platform = {"chosen": chosen, "asked": asked, "gpu_present": gpu.present, "reason": gpu.reason}
    if asked == "cuda" and not gpu.usable:
        found.problems.append(f"--k3-platform cuda: no CUDA device can be used ({gpu.reason})")
    if asked == "auto" and gpu.present and not gpu.usable:
        found.problems.append(f"the GPU of this machine cannot be used ({gpu.reason}); name --k3-platform cpu to go on")


def _doors(found: Diagnosis, megatron: MegatronFound | None) -> None:
    found.doors = [
        {"door": "python -m k3_plugins.pretrain_gpt ...", "state": "ready"},
        {"door": "python -m k3_plugins.launch SCRIPT ...", "state": "ready"},
    ]
    script = megatron.root / "pretrain_gpt.py" if megatron else None
    if script is None or not script.is_file():
        state = "no Megatron-LM checkout on the import path"
    elif PATCH_MARKER in script.read_text(errors="replace"):
        state = f"applied to {script}"
    else:
        state = f"not applied; bash patches/apply.sh {script.parent}"
    found.doors.append({"door": "pretrain_gpt.py with the source patch", "state": state})
    if megatron is not None and script is not None and script.is_file():
        _helpers(found, megatron.root / "megatron" / "core" / "datasets")


def _helpers(found: Diagnosis, folder: Path) -> None:
    """A checkout compiles its data-set helpers when training starts."""
    built = any(folder.glob("helpers_cpp*.so"))
    if not built and not probe("pybind11").available:
        found.warnings.append(
            f"the data-set helpers of this checkout are not built ({folder}), and building them needs pybind11 for the "
            "python3 on PATH: pip install pybind11"
        )


def _features(
    found: Diagnosis, control: Control, training_flags: Sequence[str], door: str | None
) -> list[Feature]:
    """Load the selected features (all of them if none is named) and report each."""
    try:
        selection = feature_list.select(control.plugins, command_line(training_flags, control.model, door))
        entries = selection.entries if control.plugins else tuple(feature_list.available())
        found.left_out += selection.left_out
    except FeatureError as error:
        found.problems.append(str(error))
        return []
    features = []
    for entry in entries:
        line: dict[str, Any] = {"name": entry.name, "origin": entry.origin, "summary": entry.summary, "error": ""}
        try:
            feature = feature_list.load(entry)
        except FeatureError as error:
            line["error"] = str(error)
            found.problems.append(str(error))
        else:
            features.append(feature)
            line |= {
                "requires": list(feature.requires),
                "conflicts": list(feature.conflicts),
                "changes_parameters": feature.changes_parameters,
            }
        found.features.append(line)
    if control.plugins:
        try:
            feature_list.check_relations(features)
        except FeatureError as error:
            found.problems.append(str(error))
    return features


def _patches(found: Diagnosis, features: Sequence[Feature], control: Control) -> None:
    """Compare every target. Without --k3-plugins features that exclude each other are examined one by one."""
    groups = [list(features)] if control.plugins else [[], *([feature] for feature in features)]
    seen: set[str] = set()
    for group in groups:
        try:
            manager, _ = patch_manager(group, control.allow_drift)
        except (FeatureError, PatchError, OSError) as error:
            found.problems.append(str(error))
            continue
        for status in manager.check_all():
            patch = status.patch
            if patch.id in seen:
                continue
            seen.add(patch.id)
            found.patches.append(
                {
                    "id": patch.id,
                    "feature": patch.feature,
                    "kind": patch.kind.value,
                    "target": patch.target,
                    "state": status.state.value,
                    "message": status.message,
                    "diff": status.diff,
                    "reason": patch.reason,
                    "remove_when": patch.remove_when,
                }
            )
            if status.fatal:
                found.problems.append(status.message)
            elif status.state is not PatchState.OK:
                found.warnings.append(status.message)


def _flags(
    found: Diagnosis,
    features: Sequence[Feature],
    control: Control,
    training_flags: Sequence[str],
    ranks: int | None,
) -> None:
    """Add all flags to Megatron's own parser, which finds conflicts; then parse and validate what was given."""
    try:
        from megatron.training.arguments import add_megatron_arguments
    except Exception as error:
        found.problems.append(f"megatron.training cannot be imported ({type(error).__name__}: {error})")
        return
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="k3_plugins")
    add_megatron_arguments(parser)
    args = None
    try:
        extend_parser(parser, features, control.model)
        if training_flags or (ranks is not None and control.plugins):
            args = _parse(parser, training_flags)
            args.rank, args.world_size = 0, ranks or 1
            if control.model is not None:
                described_model(control.model, [feature.name for feature in features]).derive_patterns(args)
    except FeatureError as error:
        found.problems.append(str(error))
        return
    for feature, line in [(f, entry) for f in features for entry in found.features if entry["name"] == f.name]:
        try:
            config = config_from_args(feature, args if args is not None else parser.parse_args([]))
            if args is not None and control.plugins:
                feature.validate(args, config)
            line["backends"] = (
                [asdict(item) for item in feature.backends(config)] if hasattr(feature, "backends") else []
            )
        except (FeatureError, ValueError, AssertionError) as error:
            found.problems.append(f"{feature.name}: {error}")
    if ranks is not None and args is not None and not found.problems:
        _megatron_accepts(found, args)
        if not found.problems:
            stock = argparse.ArgumentParser(allow_abbrev=False)
            add_megatron_arguments(stock)
            found.arguments, found.defaults = args, stock.parse_args([])


def _parse(parser: argparse.ArgumentParser, flags: Sequence[str]) -> argparse.Namespace:
    heard = io.StringIO()
    try:
        with redirect_stderr(heard):
            args = parser.parse_args(list(flags))
    except SystemExit as stop:
        raise FeatureError(heard.getvalue().strip().removeprefix(PREFIX) or "the flags cannot be parsed") from stop
    return args


def _megatron_accepts(found: Diagnosis, args: argparse.Namespace) -> None:
    """Megatron's own checks of the arguments and of the model's configuration, in the order of a real start."""
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import validate_args

    try:
        check_sizes(args)
        check_evaluation(args)
        check_layout(args)
        validate_args(args, {})
        check_derived_sizes(args)
        core_transformer_config_from_args(args)
    except FeatureError as error:
        found.problems.append(str(error))
        return
    except Exception as error:  # Megatron asserts, and its configurations raise errors of many kinds
        text = str(error) or f"{type(error).__name__} at `{traceback.extract_tb(error.__traceback__)[-1].line}`"
        found.problems.append(f"Megatron does not accept these arguments: {text} ({place_of(error)})")
        return
    found.layout = layout(args) | {
        "data_parallel_size": args.data_parallel_size,
        "num_microbatches": args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
    }


def _optional(found: Diagnosis) -> None:
    for package in PACKAGES:
        result = probe(package.module)
        found.optional.append(
            {
                "module": package.module,
                "available": result.available,
                "error": result.error,
                "serves": package.serves,
                "install": package.install,
            }
        )
        if result.installed and not result.available:
            found.warnings.append(f"{package.module} is installed but broken ({result.error}): {package.install}")


def checkout_hint(diagnosis: Diagnosis, target: str) -> str:
    """For a drifted target in a git checkout: the command that shows the difference with its history."""
    if not diagnosis.megatron or diagnosis.megatron["kind"] != "checkout":
        return ""
    path = Path(*target.partition(":")[0].split(".")).with_suffix(".py")
    return f"git -C {diagnosis.megatron['path']} diff core_v0.19.0 -- {path}"
