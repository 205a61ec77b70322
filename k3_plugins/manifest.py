"""Which features a checkpoint was saved with, and whether it may be loaded with those that are active now.

``k3_manifest.json`` lies in the iteration folder. It is written after the data and before Megatron moves the tracker
file on, so no checkpoint that the tracker names is ever without it. Features that change the parameters, and their
config fields (unless a field's metadata says ``changes_parameters: False``), must be the same on loading; one that
``may_join`` may also be new. Anything else may be toggled.

This module imports neither torch nor megatron.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import k3_plugins
from k3_plugins.activation import Activation
from k3_plugins.arguments import config_fields, flag_line, flag_words, option_strings, plain, plain_config
from k3_plugins.feature import Feature, FeatureError

FILE_NAME = "k3_manifest.json"
_FORMAT = 1
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file that names the last complete checkpoint of a folder."""


# -- writing -----------------------------------------------------------------------------------------------------------


def contents(activation: Activation, iteration: int) -> dict[str, Any]:
    """The manifest as JSON values."""
    return {
        "format": _FORMAT,
        "k3_plugins": k3_plugins.__version__,
        "megatron": activation.megatron_version,
        "iteration": iteration,
        "model": dict(activation.model),
        "layout": dict(activation.layout),
        "features": {
            feature.name: {
                "changes_parameters": feature.changes_parameters,
                "changes_optimizer": changes_optimizer(feature),
                "config": plain_config(activation.configs.get(feature.name)),
                "parameter_fields": parameter_fields(feature),
                "flags": flag_line(activation.configs[feature.name], parameter_fields(feature))
                if feature.config is not None
                else [],
            }
            for feature in activation.features
        },
    }


_MODEL_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "num_query_groups",
    "linear_attention_freq",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "mtp_num_layers",
    "swiglu",
    "add_bias_linear",
    "untie_embeddings_and_output_weights",
)
"""Megatron's arguments that decide which parameters a model has and their shapes."""


def model_sizes(args: Any) -> dict[str, Any]:
    """The sizes of the model, of arguments that Megatron has validated; sizes of absent parts are left out."""
    absent = set()
    if not args.multi_latent_attention:
        absent |= {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}
    if args.multi_latent_attention or not args.group_query_attention:
        absent.add("num_query_groups")
    if args.num_experts is None:
        absent |= {name for name in _MODEL_FIELDS if name.startswith("moe_")}
    return {name: plain(getattr(args, name)) for name in _MODEL_FIELDS if name not in absent}


def changes_optimizer(feature: Feature) -> bool:
    """Whether the optimizer state in a checkpoint of this feature is of no use without it."""
    return bool(getattr(feature, "changes_optimizer", False))  # an optional member of the protocol


def parameter_fields(feature: Feature) -> list[str]:
    """The config fields that must not change between saving and loading."""
    if feature.config is None or not feature.changes_parameters:
        return []
    return [item.name for item in config_fields(feature.config) if item.metadata.get("changes_parameters", True)]


def write(folder: str | os.PathLike[str], activation: Activation, iteration: int) -> None:
    """Write the manifest into an iteration folder, atomically. One rank calls this."""
    text = json.dumps(contents(activation, iteration), indent=2) + "\n"
    if _is_remote(folder):
        # An object store publishes a file when it is closed, so there is nothing to rename.
        with _remote().open(os.path.join(str(folder), FILE_NAME), "w") as file:
            file.write(text)
        return
    path = Path(folder) / FILE_NAME
    temporary = path.with_name(f".{FILE_NAME}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A checkpoint that Megatron would load."""

    folder: str
    manifest: Mapping[str, Any] | None
    """None if it was saved without k3_plugins."""
    weights_only: bool = False
    """Megatron takes nothing but the parameters from it."""


def find(load: str, step: str | int | None = None) -> Found | None:
    """The checkpoint a ``--load`` folder leads to, by Megatron's rules; None if there is none.

    Raises:
        FeatureError: if the tracker file or the manifest cannot be understood, or the tracker names a missing folder.
    """
    name = f"iter_{int(step):07d}" if step else _tracked(load)
    if name is None:
        return None
    folder = os.path.join(load, name)
    if not _exists(folder):
        raise FeatureError(
            f"--load {load}: {'--ckpt-step' if step else TRACKER} names {name}, but there is no such folder; "
            "name an iteration that exists with --ckpt-step"
        )
    return Found(folder, _read(folder))


def _tracked(load: str) -> str | None:
    tracker = os.path.join(load, TRACKER)
    if not _exists(tracker):
        return None
    word = _text(tracker).strip()
    if word == "release":
        return "release"
    if not word.isdigit():
        raise FeatureError(f"--load {load}: {TRACKER} holds {word!r} instead of an iteration; write the number there")
    return f"iter_{int(word):07d}"


def _read(folder: str) -> Mapping[str, Any] | None:
    path = os.path.join(folder, FILE_NAME)
    if not _exists(path):
        return None
    try:
        manifest = json.loads(_text(path))
        known = manifest["format"] == _FORMAT
        manifest["features"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FeatureError(f"{path} is damaged ({type(error).__name__}: {error}); restore it from a copy") from error
    if not known:
        raise FeatureError(
            f"{path} has format {manifest['format']}, this k3_plugins {k3_plugins.__version__} reads format {_FORMAT}: "
            "load it with the version that saved it"
        )
    return manifest


def _is_remote(path: str | os.PathLike[str]) -> bool:
    return "://" in str(path)


def _remote() -> Any:
    from megatron.core.msc_utils import MultiStorageClientFeature

    return MultiStorageClientFeature.import_package()


def _exists(path: str) -> bool:
    return _remote().os.path.exists(path) if _is_remote(path) else os.path.exists(path)


def _text(path: str) -> str:
    with _remote().open(path, "r") if _is_remote(path) else open(path) as file:
        return file.read()


# -- comparing ---------------------------------------------------------------------------------------------------------


def check_load(args: Any, activation: Activation) -> list[str]:
    """Check ``--load`` (and ``--pretrained-checkpoint``) before anything is built.

    Returns:
        notes for rank 0: toggles that do not change parameters.

    Raises:
        FeatureError: if there is no checkpoint, or it was saved with features that do not fit, with the flags to use.
    """
    found = _to_be_loaded(args)
    if found is None:
        if args.load is None:
            return []
        if activation.control.allow_empty_load:
            return [f"--load {args.load} holds no checkpoint: starting from scratch (--k3-allow-empty-load)"]
        raise _no_checkpoint(args)
    notes = compare(found, activation)
    if not (args.no_load_optim or args.finetune or found.weights_only):
        _check_optimizer(found, activation.names)
    return notes


def require_checkpoint(args: Any) -> None:
    """A ``--load`` must lead to a checkpoint; Megatron would start from scratch.

    Raises:
        FeatureError: if it does not.
    """
    if args.load is not None and _to_be_loaded(args) is None:
        raise _no_checkpoint(args)


def _no_checkpoint(args: Any) -> FeatureError:
    return FeatureError(
        f"--load {args.load} holds no checkpoint (no {TRACKER} there). Correct the path; or remove --load to "
        "start from scratch; or add --k3-allow-empty-load if this folder is filled by --save later"
    )


def _to_be_loaded(args: Any) -> Found | None:
    found = None
    if args.load is not None:
        found = find(args.load, args.ckpt_step)
        if args.non_persistent_ckpt_type == "global":
            local = args.non_persistent_global_ckpt_dir or os.path.join(args.load, "non_persistent")
            temporary = find(local)
            # Megatron takes the newer of the two, and the non-persistent one if they are equally old.
            if temporary is not None and (found is None or _iteration(temporary) >= _iteration(found)):
                found = temporary
        elif args.non_persistent_ckpt_type == "local":
            # Node-local checkpoints are found by their own manager, and only ones of the same job layout load.
            return found
    if found is None and args.pretrained_checkpoint is not None:
        found = find(args.pretrained_checkpoint)
        if found is None:
            raise FeatureError(f"--pretrained-checkpoint {args.pretrained_checkpoint} holds no checkpoint")
        found = replace(found, weights_only=True)
    return found


def _iteration(found: Found) -> int:
    name = os.path.basename(found.folder)
    return int(name.removeprefix("iter_")) if name.startswith("iter_") else 0


def compare(found: Found, activation: Activation) -> list[str]:
    """Compare a checkpoint's features with the active ones; see :func:`check_load`."""
    changing = {feature.name: feature for feature in activation.features if feature.changes_parameters}
    if found.manifest is None:
        joining = [name for name, feature in changing.items() if may_join(feature)]
        changing = {name: feature for name, feature in changing.items() if name not in joining}
        if changing:
            raise FeatureError(
                f"checkpoint {found.folder} was saved without k3_plugins (it has no {FILE_NAME}), and "
                f"{', '.join(changing)} change{'s' if len(changing) == 1 else ''} the parameters. Load it without "
                "--k3-plugins, or train a new model without --load"
            )
        if joining:
            return [_joined(found, joining)]
        return [f"checkpoint {found.folder} was saved without k3_plugins; the active features do not change parameters"]
    saved = found.manifest["features"]
    saved_changing = {name: entry for name, entry in saved.items() if entry["changes_parameters"]}
    faults = _faults(saved_changing, changing, activation)
    if faults:
        listing = "\n".join(f"  - {fault}" for fault in faults)
        flags = " ".join(_flags_to_use(saved_changing, activation))
        raise FeatureError(
            f"checkpoint {found.folder} does not fit the active features:\n{listing}\nTo load it, use:\n  {flags}"
        )
    joining = [name for name in changing if name not in saved]
    toggled = sorted((set(saved) ^ set(activation.names)) - set(joining))
    notes = [f"checkpoint {found.folder}: {name} was toggled since; parameters are unaffected" for name in toggled]
    return notes + ([_joined(found, joining)] if joining else [])


def may_join(feature: Feature) -> bool:
    """Whether a checkpoint that was saved without the feature may be loaded with it."""
    return getattr(feature, "may_join", False)


def _joined(found: Found, names: Sequence[str]) -> str:
    return f"checkpoint {found.folder} was saved without {', '.join(names)}, which begins with this run"


def _check_optimizer(found: Found, active: Sequence[str]) -> None:
    saved = found.manifest["features"] if found.manifest is not None else {}
    missing = [name for name, entry in saved.items() if entry.get("changes_optimizer") and name not in active]
    if missing:
        names = ",".join(missing)
        raise FeatureError(
            f"checkpoint {found.folder} holds the optimizer state of {names}, which is off, and no other optimizer can "
            f"continue it: add {names} to --k3-plugins, or start a new optimizer state with --no-load-optim"
        )


def _check_expert_optimizer(found: Found, args: Any, activation: Activation) -> None:
    """Experts that are reduced over ranks of their own have an optimizer of their own, which Megatron does not add."""
    saved, now = (found.manifest or {}).get("layout"), activation.layout
    if not saved or not now or args.num_experts is None:
        return
    before, after = _experts_apart(saved), _experts_apart(now)
    if before != after:
        sizes = [(name, saved[name], now[name]) for name in _EXPERT_SIZES if saved[name] != now[name]]
        flags = ", ".join(f"--{name.replace('_', '-')} {new} (saved with {old})" for name, old, new in sizes)
        raise FeatureError(
            f"{flags}: checkpoint {found.folder} holds {'an' if before else 'no'} optimizer of the experts' own, and "
            f"Megatron {'needs one' if after else 'has none'} with these sizes. Keep the sizes, or load the weights "
            "alone with --no-load-optim"
        )


_EXPERT_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_model_parallel_size")


def _experts_apart(layout: Mapping[str, Any]) -> bool:
    """Whether gradients of experts are reduced over other ranks than those of dense weights."""
    expert, expert_tensor, tensor = (layout[name] for name in _EXPERT_SIZES)
    return expert > 1 or expert_tensor != tensor


def check_model(args: Any, activation: Activation) -> None:
    """Compare the model's sizes with those of the checkpoint that is to be loaded.

    Raises:
        FeatureError: with the flags that have another value.
    """
    found = _to_be_loaded(args)
    if found is None or found.manifest is None or args.moe_use_upcycling:
        return  # upcycling turns a dense checkpoint into experts
    if not (args.no_load_optim or args.finetune or found.weights_only):
        _check_expert_optimizer(found, args, activation)
    saved = found.manifest.get("model") or activation.model
    changed = [name for name in _MODEL_FIELDS if saved.get(name) != activation.model.get(name)]
    if changed:
        listing = "\n".join(
            f"  - {name}: {saved.get(name)!r} when it was saved, now {activation.model.get(name)!r}" for name in changed
        )
        flags = " ".join(_model_flag(name, saved.get(name)) for name in changed)
        raise FeatureError(f"checkpoint {found.folder} holds another model:\n{listing}\nTo load it, use:\n  {flags}")


def _model_flag(name: str, value: Any) -> str:
    """How to give one of Megatron's arguments a value, or what to leave out for it."""
    flag = f"--{name.replace('_', '-')}"
    if name == "add_bias_linear":
        flag, value = "--disable-bias-linear", not value
    if value is None or value is False:
        return f"(without {flag})"
    return flag if value is True else shlex.join([flag, json.dumps(value, separators=(",", ":"))])


def _faults(saved: Mapping[str, Any], active: Mapping[str, Feature], activation: Activation) -> list[str]:
    faults = [f"it was saved with feature {name!r}, which is off" for name in saved if name not in active]
    faults += [
        f"it was saved without feature {name!r}, which is on"
        for name, feature in active.items()
        if name not in saved and not may_join(feature)
    ]
    for name in sorted(saved.keys() & active.keys()):
        config = activation.configs.get(name)
        now = {field: plain(getattr(config, field)) for field in parameter_fields(active[name])}
        before = saved[name]["config"]
        flags = option_strings(type(config)) if config is not None else {}
        faults += [
            f"{name}: {flags.get(field, [field])[0]} was {before.get(field, 'unknown')!r} when it was saved, now it is "
            f"{now.get(field)!r}"
            for field in sorted(now.keys() | set(saved[name]["parameter_fields"]))
            if field not in before or before[field] != now.get(field)
        ]
    return faults


def _flags_to_use(saved_changing: Mapping[str, Any], activation: Activation) -> list[str]:
    """The checkpoint's features that matter, plus the active ones that do not or that may join, in feature order."""
    harmless = [f.name for f in activation.features if not f.changes_parameters or may_join(f)]
    names = [*saved_changing, *(name for name in harmless if name not in saved_changing)]
    flags = ["--k3-plugins", ",".join(names)] if names else ["(no --k3-plugins)"]
    for name, entry in saved_changing.items():
        flags += entry["flags"]
        flags += _defaults_to_restore(entry, activation.configs.get(name))
    return flags


def _defaults_to_restore(entry: Mapping[str, Any], config: Any) -> list[str]:
    """A checkpoint's flags are those that were not at their default: what is another value now must be said too."""
    words: list[str] = []
    for name, flags in option_strings(type(config)).items() if config is not None else ():
        before = entry["config"].get(name)
        said = name not in entry["parameter_fields"] or flags[0] in entry["flags"]
        if said or before == plain(getattr(config, name)):
            continue
        if before is None or isinstance(before, bool):
            words.append(f"(without {flags[0]})")
        else:
            words += flag_words(flags[0], before)
    return words


def refuse_without_features(load: str, step: str | None, optimizer: bool = True) -> None:
    """For a start without ``--k3-plugins``: stock Megatron cannot load parameters that a feature changed.

    Args:
        load: the ``--load`` folder.
        step: of ``--ckpt-step``.
        optimizer: whether the optimizer's state is to be loaded too.

    Raises:
        FeatureError: with the flags to use.
    """
    if _is_remote(load):
        return  # the storage client is set up by Megatron's own parser, later; Megatron then reports missing keys
    try:
        found = find(load, step)
    except FeatureError:
        return  # without features a folder that cannot be read is Megatron's business
    if found is None or found.manifest is None:
        return
    changing = {name: entry for name, entry in found.manifest["features"].items() if entry["changes_parameters"]}
    if changing:
        flags = ["--k3-plugins", ",".join(changing), *_all_flags(changing.values())]
        raise FeatureError(
            f"checkpoint {found.folder} was saved with {', '.join(changing)}, and no feature is on. To load it, use:\n"
            f"  {' '.join(flags)}"
        )
    if optimizer:
        _check_optimizer(found, ())


def _all_flags(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    return [word for entry in entries for word in entry["flags"]]
