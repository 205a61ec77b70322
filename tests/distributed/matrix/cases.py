"""Cases from the table: which features train under which layout, with which words, compared with what."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from k3_plugins import features as registry
from tests.distributed.matrix.table import (
    ALONE,
    ATTENTION,
    AXES,
    EXPERTS,
    IMAGES,
    MODEL_OF_THE_MATRIX,
    MOST_RANKS,
    PAIRS,
    SUBJECTS,
    TEXT,
    TEXT_DOOR,
    TOGETHER,
    VISION_DOOR,
    Bounds,
    Layout,
    Subject,
)

ENTRIES = {entry.name: entry for entry in registry.BUILT_IN}
FEATURES: tuple[str, ...] = tuple(ENTRIES)
"""The rows, in the registry's order."""


_SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")


def subject(feature: str) -> Subject:
    """Its row of the table; a feature that has none is turned on by its name alone."""
    return SUBJECTS.get(feature, Subject())


def closure(names: Iterable[str]) -> tuple[str, ...]:
    """The features, the attention of the model and everything they require, in the registry's order."""
    wanted, waiting = set(), [*ATTENTION, *names]
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += registry.load(ENTRIES[name]).requires
    return tuple(name for name in FEATURES if name in wanted)


@dataclass(frozen=True)
class Case:
    """One launch: a set of features under one layout."""

    features: tuple[str, ...]
    layout: Layout
    experts: bool
    """The model has MoE layers."""

    @property
    def id(self) -> str:
        """What it is called in the record and on the page."""
        return f"{'+'.join(self.features)} | {self.layout.name}"

    @property
    def vision(self) -> bool:
        return any(subject(name).vision for name in self.features)

    @property
    def door(self) -> str:
        """The module that trains."""
        return VISION_DOOR if self.vision else TEXT_DOOR

    @property
    def gradients(self) -> bool:
        """The first step's gradients are read: they stand in Megatron's buffers, and the first step is run."""
        return not self.layout.goes_on and all(subject(name).gradients_in_buffers for name in self.features)

    @property
    def compared(self) -> dict[str, float]:
        """What is compared, by the fields of Bounds, and how large its difference may be."""
        unread = () if self.gradients else ("gradients", "all_gradients")
        return {
            name: bound for name, bound in asdict(self.bounds).items() if bound is not None and name not in unread
        }

    @property
    def statistics(self) -> tuple[str, ...]:
        """How names in checkpoints end that are not compared."""
        return tuple(name for feature in self.features for name in subject(feature).statistics)

    @property
    def bounds(self) -> Bounds:
        if self.layout.bounds is not None:
            return self.layout.bounds
        bounds = Bounds()
        for name in self.features:
            bounds = bounds.loosest(subject(name).bounds)
        return bounds

    @property
    def ranks(self) -> int:
        """Processes."""
        sizes = {flag: int(value) for flag, value in itertools.pairwise(self.words) if flag in _SIZES}
        return self.layout.data * math.prod(sizes.values())

    @property
    def words(self) -> list[str]:
        """The command line, but for data and checkpoints."""
        words = [*MODEL_OF_THE_MATRIX, *(IMAGES if self.vision else TEXT), *(EXPERTS if self.experts else [])]
        words += ["--k3-plugins", ",".join(self.features)]
        for name in self.features:
            words += f"{subject(name).flags} {subject(name).layout}".split()
        return words + self.layout.words.split()

    @property
    def digest(self) -> str:
        """Of everything that decides what the case does: a record of other words is no record of this case."""
        parts = [self.door, str(self.ranks), str(self.layout.goes_on), *self.words]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def without_layout(self) -> Case:
        """The same features on one process, or on as few as they need."""
        return Case(self.features, ALONE, self.experts)

    def reference(self) -> Case:
        """The same model on one process, without the features that change only how it is computed."""
        kept = tuple(name for name in self.features if not subject(name).same_model)
        return Case(kept, ALONE, self.experts)


def case(names: Iterable[str], layout: Layout) -> Case:
    """The features and what they need under a layout."""
    features = closure(names)
    return Case(features, layout, layout.experts or any(subject(name).needs_experts for name in features))


def axis_cases(feature: str, axis: str) -> list[Case]:
    """The cases of one cell, in the order in which they are tried."""
    return [case([feature], layout) for layout in AXES[axis]]


def pair_cases(first: str, second: str) -> list[Case]:
    """The cases of two features together, in the order in which they are tried."""
    tried = [case([first, second], layout) for layout in PAIRS]
    return [each for each in tried if each.ranks <= MOST_RANKS and each.digest != each.reference().digest]


def together_cases() -> list[Case]:
    """Many features at once: every two of them work together if it does."""
    return [case(set(FEATURES) - set(left_out), layout) for layout, left_out in TOGETHER]


def pairs() -> Iterator[tuple[str, str]]:
    """All of them, once."""
    return itertools.combinations(FEATURES, 2)


def all_cases() -> list[Case]:
    """Everything that a cell could need, each once."""
    cells = [axis_cases(feature, axis) for feature in FEATURES for axis in AXES]
    cells += [together_cases(), *(pair_cases(*pair) for pair in pairs())]
    return list({each.id: each for cell in cells for each in cell}.values())
