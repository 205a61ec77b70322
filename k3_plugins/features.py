"""The one ordered list of features, the presets, and how third parties add theirs.

Nothing is imported until a feature is asked for by name. The order is the order in which patches of one target stack.
Third parties use the entry-point group ``k3_plugins.features``, name = feature name, value = ``module:FEATURE``; they
come after the built-in ones. A third party's plug-in that is named and cannot be loaded ends the job: it is never
skipped.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from k3_plugins.failure import place_of
from k3_plugins.feature import Feature, FeatureError, verify

ENTRY_POINT_GROUP = "k3_plugins.features"


@dataclass(frozen=True)
class FeatureEntry:
    """One feature that can be named, not yet imported."""

    name: str
    module: str
    """The module that holds ``FEATURE`` (for a third party: the entry point's value)."""
    summary: str
    """One line for ``--help`` and the doctor."""
    folder: str
    """The folder with the README, relative to the repository (for a third party: its distribution)."""
    entry_point: importlib.metadata.EntryPoint | None = None

    @property
    def origin(self) -> str:
        """Where it comes from, for messages."""
        if self.entry_point is None:
            return self.module
        return f"distribution {self.folder} (entry point {self.entry_point.value})"


BUILT_IN: tuple[FeatureEntry, ...] = (
    FeatureEntry(
        "kda",
        "k3_plugins.transformer.kda.feature",
        "Kimi Delta Attention layers",
        "k3_plugins/transformer/kda",
    ),
    FeatureEntry(
        "gated-mla",
        "k3_plugins.transformer.gated_mla.feature",
        "multi-head latent attention with an output gate and without position encoding",
        "k3_plugins/transformer/gated_mla",
    ),
    FeatureEntry(
        "attnres",
        "k3_plugins.transformer.attention_residuals.feature",
        "Block Attention Residuals, with a pipeline that ships each block once",
        "k3_plugins/transformer/attention_residuals",
    ),
    FeatureEntry(
        "latent-moe",
        "k3_plugins.transformer.moe.latent_moe.feature",
        "routed experts in latent space, SiTU-GLU in every feed-forward network",
        "k3_plugins/transformer/moe/latent_moe",
    ),
    FeatureEntry(
        "quantile-balancing",
        "k3_plugins.transformer.moe.quantile_balancing.feature",
        "router biases from quantiles over the whole global batch",
        "k3_plugins/transformer/moe/quantile_balancing",
    ),
    FeatureEntry(
        "moonep",
        "k3_plugins.transformer.moe.moonep.feature",
        "expert parallelism in which every rank computes the same number of tokens",
        "k3_plugins/transformer/moe/moonep",
    ),
    FeatureEntry(
        "per-head-muon",
        "k3_plugins.optimizer.per_head_muon.feature",
        "Muon head by head, orthogonalised peer to peer on sharded states; AdamW for everything else",
        "k3_plugins/optimizer/per_head_muon",
    ),
    FeatureEntry(
        "qk-clip",
        "k3_plugins.optimizer.qk_clip.feature",
        "attention heads whose logits exceed a threshold are scaled back to it",
        "k3_plugins/optimizer/qk_clip",
    ),
    FeatureEntry(
        "pipeline-zero2",
        "k3_plugins.distributed.pipeline_zero2.feature",
        "gradients of two model chunks on the device, sharded gradients of all chunks in host memory",
        "k3_plugins/distributed/pipeline_zero2",
    ),
    FeatureEntry(
        "mxfp4-qat",
        "k3_plugins.post_training.mxfp4_qat.feature",
        "quantization-aware training of routed experts: MXFP4 weights, MXFP8 inputs",
        "k3_plugins/post_training/mxfp4_qat",
    ),
    FeatureEntry(
        "activation-manager",
        "k3_plugins.memory.activation_manager.feature",
        "a storage policy for every saved activation: recompute, FP8, host memory",
        "k3_plugins/memory/activation_manager",
    ),
    FeatureEntry(
        "moonvit",
        "k3_plugins.vision.moonvit.feature",
        "a vision encoder for images of native resolution, trained with the text from the first step",
        "k3_plugins/vision/moonvit",
    ),
    FeatureEntry(
        "vision-bubble",
        "k3_plugins.pipeline_parallel.vision_bubble.feature",
        "the vision encoder's work in the bubbles of the text pipeline, on all of its ranks",
        "k3_plugins/pipeline_parallel/vision_bubble",
    ),
    FeatureEntry(
        "dynamic-cp",
        "k3_plugins.vision.dynamic_cp.feature",
        "the vision encoder's work divided over context-parallel ranks, large images and videos split",
        "k3_plugins/vision/dynamic_cp",
    ),
)


@dataclass(frozen=True)
class CommandLine:
    """What presets look at."""

    integers: Mapping[str, int] = MappingProxyType({})
    """Flags with whole numbers, those of ``--k3-model`` among them."""
    given: frozenset[str] = frozenset()
    """Every flag that was typed."""
    door: str | None = None
    """The program that was started, as after ``python -m``; None if it is not known."""


@dataclass(frozen=True)
class PresetMember:
    """A feature of a preset, and the conditions without which it is left out."""

    feature: str
    flag: str | None = None
    """A Megatron flag such as ``--pipeline-model-parallel-size`` ..."""
    at_least: int = 1
    """... that must be at least this (1 if the flag is not given)."""
    given: str | None = None
    """A flag that must be on the command line."""
    door: str | None = None
    """The only program that runs it."""

    def missing(self, line: CommandLine) -> str | None:
        """What is not as it must be, or None."""
        if self.door not in (None, line.door):
            return f"python -m {self.door}"
        if self.flag and line.integers.get(self.flag, 1) < self.at_least:
            return f"{self.flag} >= {self.at_least}"
        return self.given if self.given and self.given not in line.given else None


VISION_DOOR = "k3_plugins.pretrain_vlm"

PRESETS: dict[str, tuple[PresetMember, ...]] = {
    "k3": (
        PresetMember("kda"),
        PresetMember("gated-mla"),
        PresetMember("attnres"),
        PresetMember("latent-moe", "--num-experts", 2),
        PresetMember("quantile-balancing", "--num-experts", 2),
        PresetMember("moonep", "--num-experts", 2),
        PresetMember("per-head-muon"),
        PresetMember("pipeline-zero2", "--pipeline-model-parallel-size", 2, given="--use-distributed-optimizer"),
        PresetMember("activation-manager", given="--activation-policy"),
        PresetMember("mxfp4-qat", "--num-experts", 2, door="k3_plugins.finetune_gpt"),
        PresetMember("moonvit", door=VISION_DOOR),
        PresetMember("dynamic-cp", "--context-parallel-size", 2, door=VISION_DOOR),
        PresetMember("vision-bubble", "--pipeline-model-parallel-size", 2, door=VISION_DOOR),
    ),
}


@dataclass(frozen=True)
class Selection:
    """The result of reading ``--k3-plugins``."""

    entries: tuple[FeatureEntry, ...]
    """In feature order."""
    left_out: tuple[str, ...] = ()
    """Members of a preset that do not fit the layout, with the reason."""


def third_party() -> list[FeatureEntry]:
    """The installed entry points, read from package metadata without importing anything.

    A name that two distributions claim, or that a built-in feature has, yields several entries; :func:`select` refuses
    it when it is asked for.
    """
    entries = []
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value)):
        distribution = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
        entries.append(FeatureEntry(point.name, point.module, "third party", distribution, point))
    return entries


def available() -> list[FeatureEntry]:
    """Everything that can be named, in feature order."""
    return [*BUILT_IN, *third_party()]


def select(names: Sequence[str], line: CommandLine = CommandLine()) -> Selection:
    """Turn the words after ``--k3-plugins`` into entries in feature order.

    Args:
        names: feature and preset names, repetitions allowed.
        line: for the presets' conditions.

    Raises:
        FeatureError: for an unknown name (with the nearest known ones) or a name with two owners.
    """
    entries = available()
    known = {entry.name for entry in entries}
    wanted: list[str] = []
    left_out: list[str] = []
    for name in names:
        if name in PRESETS:
            for member in PRESETS[name]:
                missing = member.missing(line)
                if missing is None:
                    wanted.append(member.feature)
                else:
                    left_out.append(f"{member.feature} (preset {name}: needs {missing})")
        elif name in known:
            wanted.append(name)
        else:
            raise FeatureError(_unknown(name, known))
    for name in dict.fromkeys(wanted):
        owners = [entry for entry in entries if entry.name == name]
        if len(owners) > 1:
            raise FeatureError(
                f"feature {name!r} is offered by {' and by '.join(owner.origin for owner in owners)}; "
                "uninstall all but one of them"
            )
    return Selection(tuple(entry for entry in entries if entry.name in wanted), tuple(left_out))


def _unknown(name: str, known: set[str]) -> str:
    choices = sorted(known | PRESETS.keys())
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"--k3-plugins: there is no feature {name!r}.{hint} The features are {', '.join(sorted(known)) or 'none'}; "
        f"the presets are {', '.join(sorted(PRESETS))}."
    )


_TOO_EARLY = ("torch", "megatron")
"""What a feature may not import when it is imported itself."""


def load(entry: FeatureEntry) -> Feature:
    """Import a feature and compare it with the protocol.

    Raises:
        FeatureError: naming the module or distribution and the exception, if it cannot be imported, imports torch or
            Megatron, or does not satisfy the protocol. Broken packages raise all kinds of exceptions on import, so
            every kind is reported here.
    """
    before = {name for name in _TOO_EARLY if name in sys.modules}
    try:
        if entry.entry_point is not None:
            feature = entry.entry_point.load()
        else:
            feature = importlib.import_module(entry.module).FEATURE
    except Exception as error:
        advice = (
            f"repair or uninstall {entry.folder}, or leave {entry.name!r} out of --k3-plugins"
            if entry.entry_point
            else "run python -m k3_plugins.doctor for what is missing"
        )
        raise FeatureError(
            f"feature {entry.name!r} from {entry.origin} cannot be loaded: {type(error).__name__}: {error} "
            f"({place_of(error)}); {advice}"
        ) from error
    early = [name for name in _TOO_EARLY if name in sys.modules and name not in before]
    if early:
        raise FeatureError(
            f"feature {entry.name!r} from {entry.origin} imports {' and '.join(early)} when it is imported, before the "
            "patches are there: import them inside its functions"
        )
    verify(feature, registered_as=entry.name, origin=entry.origin)
    return feature


def check_relations(features: Sequence[Feature]) -> None:
    """Refuse a set with unmet requirements or conflicts.

    Raises:
        FeatureError: with the ``--k3-plugins`` line to type.
    """
    names = [feature.name for feature in features]
    missing = {need for feature in features for need in feature.requires if need not in names}
    if missing:
        by = [feature.name for feature in features if missing & set(feature.requires)]
        raise FeatureError(
            f"{', '.join(by)} need{'s' if len(by) == 1 else ''} {', '.join(sorted(missing))} as well: "
            f"type --k3-plugins {','.join([*sorted(missing), *names])}"
        )
    for feature in features:
        clash = [other for other in feature.conflicts if other in names]
        if clash:
            raise FeatureError(
                f"features {feature.name!r} and {clash[0]!r} exclude each other: type --k3-plugins "
                f"{','.join(n for n in names if n != clash[0])} or --k3-plugins "
                f"{','.join(n for n in names if n != feature.name)}"
            )


def in_dependency_order(features: Sequence[Feature]) -> list[Feature]:
    """Feature order, with every feature after the ones it requires.

    Raises:
        FeatureError: if requirements form a circle.
    """
    by_name = {feature.name: feature for feature in features}
    ordered: list[Feature] = []
    visiting: list[str] = []

    def visit(feature: Feature) -> None:
        if feature in ordered:
            return
        if feature.name in visiting:
            raise FeatureError(f"features require each other in a circle: {' -> '.join([*visiting, feature.name])}")
        visiting.append(feature.name)
        for need in feature.requires:
            visit(by_name[need])
        visiting.pop()
        ordered.append(feature)

    for feature in features:
        visit(feature)
    return ordered
