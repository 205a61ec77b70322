"""Which elements a rank must receive, counted one by one: from Megatron's bucket layout, rows written out, and owners.

It shares no code with the planner: `holders` reads the layout that Megatron computed, `matrices` knows the small models
of `muon_cases` by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tests.distributed.optimizer.per_head_muon import literal

Key = tuple[str, int]
"""Parameter, and the flat element at which a matrix begins."""


def holders(start: int, stop: int, low: int, high: int, ranks: int) -> np.ndarray:
    """The data-parallel rank of every element of a parameter at [start, stop) of a bucket at [low, high)."""
    return (np.arange(start, stop) - low) // ((high - low) // ranks)


def matrices(name: str, shape: tuple[int, ...], rule: Callable = literal.rows_of) -> dict[Key, np.ndarray]:
    """The flat elements of every matrix of a parameter; experts are stacked along a leading dimension."""
    key = name.replace("experts.weight1", "experts.linear_fc1").replace("experts.weight2", "experts.linear_fc2")
    rows, columns = shape[-2:]
    flat = np.arange(int(np.prod(shape))).reshape(-1, rows, columns)
    found = [whole[block].reshape(-1) for whole in flat for block in rule(key, rows)]
    return {(name, int(elements[0])): elements for elements in found}


def received(
    elements: Mapping[Key, np.ndarray], held: Mapping[str, np.ndarray], owners: Mapping[Key, int], ranks: int
) -> list[int]:
    """By rank: what others hold of the matrices it owns, and the updates of what it holds of theirs."""
    counts = [0] * ranks
    for key, index in elements.items():
        where, owner = held[key[0]][index], owners[key]
        counts[owner] += int((where != owner).sum())
        for rank in set(where.tolist()) - {owner}:
            counts[rank] += int((where == rank).sum())
    return counts


def formula(elements: Mapping[Key, np.ndarray], held: Mapping[str, np.ndarray], owners: Mapping[Key, int]) -> int:
    """2 sum(n - own piece), over all ranks."""
    return sum(2 * int((held[key[0]][index] != owners[key]).sum()) for key, index in elements.items())


def of_optimizer(optimizer: object, rule: Callable) -> tuple[list[int], int]:
    """(elements that every data-parallel rank receives in a step, the formula) of a built optimizer at TP 1.

    Collective over the optimizer's data-parallel group, for the owners.
    """
    import torch.distributed as dist

    group = optimizer.data_parallel_group
    mine = [
        (a.matrix.parameter, a.matrix.parts[0].intervals[0][0])
        for chunk in optimizer.optimizer.work
        for a in (*chunk.plan.local, *chunk.plan.owned)
    ]
    by_rank: list = [None] * group.size()
    dist.all_gather_object(by_rank, mine, group=group)
    owners = {key: rank for rank, keys in enumerate(by_rank) for key in keys}
    assert len(owners) == sum(map(len, by_rank)), "a matrix has two owners"
    held, elements = {}, {}
    for buffer in optimizer.buffers:
        for parameter, (start, stop, number) in buffer.param_index_map.items():
            entry = optimizer.table[parameter]
            if entry.optimizer == "muon":
                bucket = buffer.buckets[number]
                low, high = bucket.offset, bucket.offset + bucket.grad_data.numel()
                held[entry.name] = holders(start, stop, low, high, group.size())
                elements |= matrices(entry.name, tuple(parameter.shape), rule)
    assert elements.keys() == owners.keys()
    return received(elements, held, owners, group.size()), formula(elements, held, owners)
