"""Which ranks of a group encode which image or video: a pure function, without torch.

The group is divided into aligned sub-groups of 1, 2, 4, ... ranks, and each sample goes to one of them. A sample of a
sub-group of g ranks is cut into g equal pieces. Nothing is split that need not be: splitting costs messages in every
block of the encoder, so that it begins with the pieces that hold up the busiest rank, and ends as soon as the load is
even enough.

    balance([(4096, 9.0), (64, 0.1), (64, 0.1)], 4)   # patches and cost of each sample

Letters: G ranks of the group, g of a sub-group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Sample(NamedTuple):
    """What the balance knows about an image or video."""

    patches: int
    cost: float
    """Of encoding all of it, in any unit; every patch costs the same."""


class SubGroup(NamedTuple):
    """Ranks ``first`` to ``first + size - 1``."""

    first: int
    size: int

    @property
    def ranks(self) -> range:
        """Its ranks in the group."""
        return range(self.first, self.first + self.size)


@dataclass(frozen=True)
class Assignment:
    """Where every sample is encoded, and what that costs."""

    owners: tuple[SubGroup, ...]
    """By sample."""
    loads: tuple[float, ...]
    """By rank: the cost of its pieces."""
    unsplit_makespan: float
    """The largest load if every sample went to one rank, the most expensive ones first, each to the idlest rank."""

    @property
    def makespan(self) -> float:
        """Predicted time of the group: the largest load."""
        return max(self.loads)

    @property
    def mean(self) -> float:
        """The load of every rank if all were equal."""
        return sum(self.loads) / len(self.loads)


def cut(patches: int, size: int, member: int) -> tuple[int, int]:
    """First and behind-last patch of one member's piece; pieces differ by at most one patch."""
    return patches * member // size, patches * (member + 1) // size


def balance(samples: Sequence[Sample], group_size: int, imbalance: float = 1.05) -> Assignment:
    """Assign samples to sub-groups.

    Args:
        group_size: G, any number of ranks. Sub-groups have 1, 2, 4, ... ranks and start at a multiple of their size;
            the whole group is one too, if G is no power of two.
        imbalance: largest load over mean load that is even enough.

    Returns:
        the first assignment within ``imbalance`` as splitting goes on, else the best one met.

    Raises:
        ValueError: a size or an imbalance below 1, a negative or not finite cost, a sample without patches.
    """
    if group_size < 1:
        raise ValueError(f"a group of {group_size} ranks cannot encode")
    if not imbalance >= 1:
        raise ValueError(f"imbalance {imbalance} must be at least 1")
    for number, sample in enumerate(samples):
        if sample.patches < 1 or not 0 <= sample.cost < float("inf"):
            raise ValueError(f"sample {number} has {sample.patches} patches and cost {sample.cost}")
    sizes = list(_sizes(group_size))
    level = [0] * len(samples)  # index of each sample's size
    unsplit = _place(samples, [1] * len(samples), group_size)
    best = unsplit
    while True:
        owners, loads = _place(samples, [sizes[k] for k in level], group_size)
        if max(loads) < max(best[1]):
            best = owners, loads
        busiest = loads.index(max(loads))
        # The largest piece on the busiest rank that can be cut further.
        candidates = [
            (sample.cost / owner.size, -number)
            for number, (sample, owner) in enumerate(zip(samples, owners, strict=True))
            if busiest in owner.ranks and level[number] + 1 < len(sizes) and sizes[level[number] + 1] <= sample.patches
        ]
        if max(best[1]) * group_size <= imbalance * sum(best[1]) or not candidates:
            return Assignment(tuple(best[0]), tuple(best[1]), max(unsplit[1]))
        level[-max(candidates)[1]] += 1


def _sizes(group_size: int) -> Iterator[int]:
    size = 1
    while size <= group_size:
        yield size
        size *= 2
    if size // 2 != group_size:
        yield group_size


def _place(samples: Sequence[Sample], sizes: Sequence[int], group_size: int) -> tuple[list[SubGroup], list[float]]:
    """Wide samples first, then expensive ones, each to the sub-group that ends first with it."""
    loads = [0.0] * group_size
    owners: list[SubGroup] = [SubGroup(0, 1)] * len(samples)
    order = sorted(range(len(samples)), key=lambda k: (-sizes[k], -samples[k].cost / sizes[k], k))
    for number in order:
        size = sizes[number]
        starts = range(0, group_size - size + 1, size)
        first = min(starts, key=lambda start: (max(loads[start : start + size]), sum(loads[start : start + size])))
        owners[number] = SubGroup(first, size)
        patches, cost = samples[number]
        for member in range(size):
            start, stop = cut(patches, size, member)
            loads[first + member] += cost * (stop - start) / patches
    return owners, loads
