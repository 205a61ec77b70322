"""Every layout of a job, estimated: which fit, how fast they are, and why the others are out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from k3_plugins.plan.cost import Cost, Hardware, of_layout
from k3_plugins.plan.layout import Job, Layout, candidates, split_layers
from k3_plugins.plan.memory import Memory, Options, of_rank


@dataclass(frozen=True)
class Found:
    """A layout that fits, with the fastest policy under which it does."""

    layout: Layout
    options: Options
    layers_per_chunk: tuple[int, ...]
    memory: tuple[Memory, ...]
    """Of every pipeline rank."""
    cost: Cost

    @property
    def fullest(self) -> Memory:
        """The pipeline rank with least room."""
        return max(self.memory, key=lambda memory: memory.total)


@dataclass
class Result:
    """Of a search."""

    found: list[Found]
    """Fastest first."""
    considered: int
    rejected: Counter[str]
    """Reason -> number of combinations."""
    nearest: list[tuple[float, Layout, Memory]] = field(default_factory=list)
    """Layouts that do not fit under any policy, smallest first: bytes on the fullest rank."""


def search(
    job: Job,
    hardware: Hardware,
    device_bytes: float,
    host_bytes: float,
    base: Options,
    policies: Sequence[str],
    fixed: dict[str, int],
) -> Result:
    """Estimate all combinations of power-of-two sizes.

    Args:
        device_bytes, host_bytes: of one GPU, and of the host memory that belongs to it.
        base: options that all share; the policy is tried in the order of ``policies`` (fastest first).
        fixed: sizes that the user gave.
    """
    rejected: Counter[str] = Counter()
    found, nearest, considered = [], [], 0
    splits: dict[int, tuple[int, ...]] = {}
    for layout, reason in candidates(job, fixed, hardware.gpus_per_node):
        considered += 1
        if layout is None:
            rejected[reason] += 1
            continue
        if layout.chunks not in splits:
            splits[layout.chunks] = tuple(split_layers(job.layer_flops, job.last_flops, layout.chunks))
        sizes = splits[layout.chunks]
        for policy in policies:
            # two buffers save something where there are more chunks
            options = replace(base, policy=policy, pipeline_zero2=base.pipeline_zero2 and layout.vpp > 2)
            memory = tuple(of_rank(job, layout, options, sizes, rank) for rank in range(layout.pp))
            fits = max(m.total for m in memory) <= device_bytes and max(m.host for m in memory) <= host_bytes
            if fits:
                found.append(Found(layout, options, sizes, memory, of_layout(job, layout, options, sizes, hardware)))
                break
        else:
            fullest = max(memory, key=lambda m: m.total)
            on_host = fullest.total <= device_bytes
            kind = "host memory" if on_host else max(fullest.device, key=fullest.device.__getitem__)
            rejected[f"does not fit under any policy; largest share: {kind}"] += 1
            nearest.append((fullest.total, layout, fullest))
    found.sort(key=lambda entry: entry.cost.seconds)
    nearest.sort(key=lambda entry: entry[0])
    return Result(found, considered, rejected, nearest[:5])
