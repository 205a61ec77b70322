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


@dataclass(frozen=True)
class TooLarge:
    """A layout that fits under no policy, with the one that misses least."""

    layout: Layout
    policy: str
    excess: float
    """Bytes that are missing, on the device and in host memory together."""
    fullest: Memory
    """The pipeline rank that needs most of its device."""
    host: float
    """The most that a pipeline rank needs in host memory."""


@dataclass
class Result:
    """Of a search."""

    found: list[Found]
    """Fastest first."""
    considered: int
    rejected: Counter[str]
    """Reason -> number of combinations."""
    nearest: list[TooLarge] = field(default_factory=list)
    """Least excess first."""


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
    found, nearest, considered = [], list[TooLarge](), 0
    splits: dict[int, tuple[int, ...]] = {}
    for layout, reason in candidates(job, fixed, hardware.gpus_per_node):
        considered += 1
        if layout is None:
            rejected[reason] += 1
            continue
        if layout.chunks not in splits:
            splits[layout.chunks] = tuple(split_layers(job.layer_flops, job.last_flops, layout.chunks))
        sizes, missed = splits[layout.chunks], list[TooLarge]()
        for policy in policies:
            # two buffers save something where there are more chunks
            options = replace(base, policy=policy, pipeline_zero2=base.pipeline_zero2 and layout.vpp > 2)
            memory = tuple(of_rank(job, layout, options, sizes, rank) for rank in range(layout.pp))
            fullest, on_host = max(memory, key=lambda m: m.total), max(m.host for m in memory)
            excess = max(0.0, fullest.total - device_bytes) + max(0.0, on_host - host_bytes)
            if not excess:
                found.append(Found(layout, options, sizes, memory, of_layout(job, layout, options, sizes, hardware)))
                break
            missed.append(TooLarge(layout, policy, excess, fullest, on_host))
        else:
            best = min(missed, key=lambda entry: entry.excess)
            device = best.fullest.device
            share = f"largest share: {max(device, key=device.__getitem__)}"
            what = share if best.fullest.total > device_bytes else "too little host memory"
            rejected[f"does not fit under any policy; {what}"] += 1
            nearest.append(best)
    found.sort(key=lambda entry: entry.cost.seconds)
    nearest.sort(key=lambda entry: entry.excess)
    return Result(found, considered, rejected, nearest[:5])
