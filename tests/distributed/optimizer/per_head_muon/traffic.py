"""Which elements a rank must receive, counted one by one: from Megatron's bucket layout, rows written out, and owners.

It shares no code with the planner: places in the whole model come from the model's checkpoint description, ranks from
the layout that Megatron computed, and matrices from `literal`. Only who owns a matrix is the planner's word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tests.distributed.optimizer.per_head_muon import literal

Matrix = tuple[np.ndarray, int]
"""The rank that holds each element, and the rank that owns all."""


def holders(start: int, stop: int, low: int, high: int, ranks: int) -> np.ndarray:
    """The data-parallel rank of every element of a parameter at [start, stop) of a bucket at [low, high)."""
    return (np.arange(start, stop) - low) // ((high - low) // ranks)


def received(matrices: Iterable[Matrix], ranks: int) -> list[int]:
    """By rank: what others hold of the matrices it owns, and the updates of what it holds of theirs."""
    counts = [0] * ranks
    for held, owner in matrices:
        counts[owner] += int((held != owner).sum())
        for rank in set(held.tolist()) - {owner}:
            counts[rank] += int((held == rank).sum())
    return counts


def formula(matrices: Iterable[Matrix]) -> int:
    """2 sum(n - own piece), over all ranks."""
    return sum(2 * int((held != owner).sum()) for held, owner in matrices)


def seen_here(run) -> tuple[list, list]:
    """What this rank knows of a run: who holds which part of the whole model, and the matrices that it owns.

    Returns:
        (key, global shape, slices, global rank of every element, tensor rank), and (key, element, tensor rank).
    """
    import torch.distributed as dist

    places = {parameter: parts for chunk in run.places for parameter, parts in chunk.items()}
    shards, owned = [], []
    for optimizer in run.optimizer.chained_optimizers:
        expert = any(optimizer.table[p].expert for buffer in optimizer.buffers for p in buffer.param_index_map)
        tensor_rank = (optimizer.expert_tp_group if expert else optimizer.tp_group).rank()
        ranks = np.array(dist.get_process_group_ranks(optimizer.data_parallel_group))
        parameters = {optimizer.table[p].name: p for buffer in optimizer.buffers for p in buffer.param_index_map}
        for buffer in optimizer.buffers:
            for parameter, (start, stop, number) in buffer.param_index_map.items():
                if optimizer.table[parameter].optimizer == "muon":
                    bucket = buffer.buckets[number]
                    end = bucket.offset + bucket.grad_data.numel()
                    where = ranks[holders(start, stop, bucket.offset, end, len(ranks))]
                    for key, shape, slices, index in places[parameter]:
                        shards.append((key, shape, slices, where[index.numpy()], tensor_rank))
        for chunk in optimizer.optimizer.work:
            for assignment in (*chunk.plan.local, *chunk.plan.owned):
                part = next(p for p in assignment.matrix.parts if p.tensor_rank == tensor_rank)
                parts = places[parameters[assignment.matrix.parameter]]
                owned.append((*_whole_element(parts, part.intervals[0][0]), tensor_rank))
    return shards, owned


def _whole_element(parts, element: int) -> tuple[str, int]:
    """Key and flat position in the whole model of an element of a local parameter."""
    for key, shape, slices, index in parts:
        found = np.argwhere(index.numpy() == element)
        if len(found):
            at = [int(i) + piece.start for i, piece in zip(found[0], slices, strict=True)]
            return key, int(np.ravel_multi_index(at, shape))
    raise AssertionError(f"element {element} is in no part of the checkpoint")


def matrices(by_rank: list[tuple[list, list]], rule: Callable = literal.rows_of) -> Iterator[Matrix]:
    """Every matrix of the whole model, from what all ranks have seen.

    A matrix that every tensor rank holds completely is one for each of them; one that they hold together is one.
    """
    held: dict[str, dict[int, np.ndarray]] = {}
    owners: dict[str, dict[int, np.ndarray]] = {}
    for rank, (shards, owned) in enumerate(by_rank):
        for key, shape, slices, where, t in shards:
            for table in (held, owners):
                table.setdefault(key, {}).setdefault(t, np.full(shape, -1))
            known = held[key][t][slices]
            assert ((known == -1) | (known == where)).all(), f"ranks disagree about {key}"
            held[key][t][slices] = where
        for key, element, t in owned:
            assert owners[key][t].flat[element] == -1, f"a matrix of {key} has two owners"
            owners[key][t].flat[element] = rank
    for key, by_tensor_rank in held.items():
        shape = next(iter(by_tensor_rank.values())).shape
        for whole in np.arange(np.prod(shape)).reshape(-1, *shape[-2:]):
            for rows in rule(key, shape[-2]):
                elements = whole[rows].reshape(-1)
                complete = [t for t, where in by_tensor_rank.items() if (where.flat[elements] >= 0).all()]
                for group in [[t] for t in complete] or [list(by_tensor_rank)]:
                    where = np.max([by_tensor_rank[t].flat[elements] for t in group], axis=0)
                    owner = {int(rank) for t in group for rank in owners[key][t].flat[elements] if rank >= 0}
                    assert len(owner) == 1 and (where >= 0).all(), f"{key}: owners {owner}"
                    yield where, owner.pop()
