"""From Megatron's buffers and process groups to the planner's input, and from the plan to the optimizer's work.

Every rank of a grid (tensor-parallel times data-parallel ranks) computes the same plan: names, shapes and bounds of a
tensor rank are exchanged once, when the optimizer is built.

Letters: T tensor-parallel ranks, t this one; D data-parallel ranks, d this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from k3_plugins.feature import FeatureError
from k3_plugins.optimizer.per_head_muon.exchange import Exchange
from k3_plugins.optimizer.per_head_muon.optimizer import ChunkWork, Shard
from k3_plugins.optimizer.per_head_muon.planner import Assignment, Place, assign, even_bounds, view
from k3_plugins.optimizer.per_head_muon.settings import MuonSettings
from k3_plugins.optimizer.per_head_muon.table import Entry


@dataclass(frozen=True)
class Grid:
    """The ranks that share the work of one optimizer."""

    here: Place
    tensor_ranks: int
    data_ranks: int
    global_ranks: Mapping[Place, int]
    tensor_group: dist.ProcessGroup
    data_group: dist.ProcessGroup

    @classmethod
    def of(cls, data_group: dist.ProcessGroup, tensor_group: dist.ProcessGroup) -> Grid:
        """Collective over the tensor group.

        Raises:
            FeatureError: if the tensor ranks have data-parallel groups of different sizes.
        """
        columns = everywhere(dist.get_process_group_ranks(data_group), tensor_group)
        if len({len(column) for column in columns}) > 1:
            raise FeatureError(f"per-head-muon: tensor-parallel ranks have data-parallel groups {columns}")
        return cls(
            here=Place(tensor_group.rank(), data_group.rank()),
            tensor_ranks=len(columns),
            data_ranks=len(columns[0]),
            global_ranks={Place(t, d): rank for t, column in enumerate(columns) for d, rank in enumerate(column)},
            tensor_group=tensor_group,
            data_group=data_group,
        )


def everywhere(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of every rank of a group."""
    if group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True)
class ChunkLayout:
    """One chunk's matrices' parameters, and where they lie."""

    entries: Sequence[Entry]
    bounds: Mapping[str, Sequence[int]] | None
    """D + 1 flat bounds of every parameter; None if every data rank holds everything."""


def buffer_layout(buffer: Any, table: Mapping[Any, Entry]) -> ChunkLayout:
    """Of one of the distributed optimizer's buffers, cut evenly over the data ranks bucket by bucket."""
    ranks = buffer.data_parallel_group.size()
    entries, bounds = [], {}
    for parameter, (start, stop, bucket_id) in buffer.param_index_map.items():
        entry = table[parameter]
        if entry.optimizer == "muon":
            bucket = buffer.buckets[bucket_id]
            low = bucket.offset
            entries.append(entry)
            bounds[entry.name] = even_bounds(start, stop, low, low + bucket.grad_data.numel(), ranks)
    return ChunkLayout(entries, bounds)


def plan_chunk(layout: ChunkLayout, grid: Grid, settings: MuonSettings) -> list[Assignment]:
    """Collective over the tensor group.

    Raises:
        FeatureError: if the tensor ranks do not hold the same parameters.
    """
    shapes = [(entry.name, entry.shape, entry.tensor_dim, entry.split) for entry in layout.entries]
    gathered = everywhere((shapes, layout.bounds), grid.tensor_group)
    for t, (other, _) in enumerate(gathered):
        if other != shapes:
            odd = sorted({str(item[:3]) for item in set(other) ^ set(shapes)})
            raise FeatureError(
                f"per-head-muon: tensor-parallel ranks {grid.here.tensor_rank} and {t} hold different matrices: {odd}"
            )
    by_rank: list[list] = [[] for _ in range(grid.tensor_ranks)]
    for entry in layout.entries:
        for own, found in zip(by_rank, entry.matrices(grid.tensor_ranks), strict=True):
            own.extend(found)
    bounds = None if layout.bounds is None else [bounds for _, bounds in gathered]
    return assign(by_rank, bounds, grid.data_ranks, settings.owner)


def bind(
    optimizer: Any,
    layouts: Sequence[ChunkLayout],
    mains: Mapping[str, tuple[torch.Tensor, int]],
    grid: Grid,
    device: torch.device,
) -> None:
    """Plan every chunk and hand the work to a `PerHeadMuon`. Collective over the tensor group.

    Args:
        optimizer: the `PerHeadMuon`.
        layouts: chunk by chunk, the same number on every rank of the grid.
        mains: by parameter name, this rank's fp32 tensor and the parameter's element at which it starts.
        grid: the ranks.
        device: where exchanges and Newton-Schulz run.
    """
    work, joined = [], False
    for layout in layouts:
        assignments = plan_chunk(layout, grid, optimizer.settings)
        joined = joined or any(assignment.matrix.joined for assignment in assignments)
        names = [entry.name for entry in layout.entries if entry.name in mains]
        shards = {name: Shard(name, *mains[name]) for name in names}
        work.append(ChunkWork(shards, view(assignments, grid.here)))
    # No process group of Megatron's spans the tensor and the data ranks of experts, so joined matrices use the world.
    group = None if joined else grid.data_group
    optimizer.bind(work, Exchange(grid.global_ranks, group, device))
