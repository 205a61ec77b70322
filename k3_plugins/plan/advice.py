"""Why no combination of sizes is a layout at all, by the flags that were given, and which of them to change."""

from __future__ import annotations

import math
from collections.abc import Mapping

from k3_plugins.plan.layout import Job, Obstacle, candidates, feed_forward_widths


def explain(job: Job, fixed: Mapping[str, int], flags: Mapping[str, str], gpus_per_node: int, model: str) -> str:
    """What stops the combinations that pass most checks, and sizes with which there are layouts.

    Args:
        job: for which every combination has an obstacle.
        fixed: sizes that the user gave, by name.
        flags: how the user gives a size, by name.
        gpus_per_node: as in the search.
        model: the preset's name.
    """
    order = list(Obstacle)
    reasons = {Obstacle(reason) for layout, reason in candidates(job, fixed, gpus_per_node) if layout is None}
    last = max(reasons, key=order.index)
    given = ", ".join(f"{flags[name]} {size}" for name, size in fixed.items())
    sentence = requirement(job, last, model)
    return f"no combination of sizes is a layout: {sentence}; {remedy(job, fixed, flags, gpus_per_node, given)}"


def requirement(job: Job, obstacle: Obstacle, model: str) -> str:
    """What an obstacle asks of the sizes, with the job's numbers."""
    config = job.config
    heads = sorted({config.num_attention_heads, config.kda_num_heads})
    widths = [width for width in feed_forward_widths(config) if width]
    batch = f"the {job.global_batch} sequences of a step (--global-batch-tokens over --context {job.context})"
    return {
        Obstacle.HEADS: f"TP must divide the {_list(heads, 'and')} heads of {model}",
        Obstacle.WIDTHS: f"TP must divide the feed-forward widths of {model}, {_list(widths, 'and')}",
        Obstacle.NO_EXPERTS: f"{model} has no experts for EP",
        Obstacle.EXPERTS: f"EP must divide the {config.num_experts} experts of {model}",
        Obstacle.NO_PIPELINE: "virtual stages need a pipeline, PP above 1",
        Obstacle.CHUNKS: f"PP x virtual stages must not exceed the {config.num_layers} layers of {model}",
        Obstacle.GPUS: f"TP x CP x PP must divide --gpus {job.gpus}",
        Obstacle.EXPERT_RANKS: f"EP must divide TP x CP x DP, which is --gpus {job.gpus} over PP",
        Obstacle.ZIGZAG: f"2 x CP must divide --context {job.context}",
        Obstacle.SEQUENCE: f"CP x TP must divide --context {job.context}",
        Obstacle.BATCH: f"DP x micro-batch must divide {batch}, with DP = --gpus {job.gpus} over TP x CP x PP",
        Obstacle.ROUNDS: f"with virtual stages, PP x DP x micro-batch must divide {batch}",
    }[obstacle]


def remedy(
    job: Job, fixed: Mapping[str, int], flags: Mapping[str, str], gpus_per_node: int, given: str
) -> str:
    """Single sizes whose change gives layouts; else what else can be changed."""
    ways = []
    for name in fixed:
        others = {other: size for other, size in fixed.items() if other != name}
        layouts = [layout for layout, _ in candidates(job, others, gpus_per_node) if layout is not None]
        if layouts:
            sizes = sorted({getattr(layout, name) for layout in layouts})
            ways.append(f"{flags[name]} {_list(sizes, 'or')} in place of {fixed[name]}")
    if ways:
        return f"there are layouts with {', or with '.join(ways)}"
    if fixed and any(layout is not None for layout, _ in candidates(job, {}, gpus_per_node)):
        return f"there are layouts without {given}: give fewer of them, or others"
    cut = math.prod(fixed.get(name, 1) for name in ("tp", "cp", "pp"))
    odd = job.gpus // math.gcd(job.gpus, cut)
    odd //= odd & -odd
    if job.global_batch % odd:
        tokens = f"a multiple of {odd * job.context} for --global-batch-tokens"
        return f"DP is a multiple of {odd}: choose other --gpus, or {tokens}"
    return "change --gpus, --context or --global-batch-tokens" + (f", or {given}" if given else "")


def _list(values: list[int], word: str) -> str:
    """``1, 2 or 4``."""
    *most, last = map(str, values)
    return f"{', '.join(most)} {word} {last}" if most else last
