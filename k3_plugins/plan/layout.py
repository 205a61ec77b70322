"""Ways to split a model over GPUs: parallel sizes, which layers each stage holds, and why a way is impossible.

Letters as in Megatron's flags: TP, CP, PP, VPP, EP, DP; C = PP * VPP chunks; m micro-batches per rank and step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product

from k3_plugins.models.kimi_k3.config import KimiK3Config
from k3_plugins.plan.flops import ends_flops, layer_flops

VOCABULARY_MULTIPLE = 128
"""Megatron's default of --make-vocab-size-divisible-by."""


@dataclass(frozen=True)
class Job:
    """What is asked for, whatever the layout."""

    config: KimiK3Config
    gpus: int
    context: int
    """Tokens in a sequence."""
    global_batch: int
    """Sequences in a step."""

    @cached_property
    def layer_flops(self) -> tuple[float, ...]:
        """Forward, per token, layer by layer."""
        return tuple(layer_flops(self.config, layer, self.context) for layer in range(self.config.num_layers))

    @cached_property
    def last_flops(self) -> float:
        """Forward, per token, of the output layer."""
        return ends_flops(self.config)


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of a job. The expert-parallel group is cut out of TP x CP x DP, as Megatron does with ETP 1."""

    tp: int
    cp: int
    pp: int
    vpp: int
    ep: int
    dp: int
    micro_batch: int
    num_microbatches: int

    @property
    def chunks(self) -> int:
        """Model chunks in all."""
        return self.pp * self.vpp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.tp * self.cp * self.dp // self.ep

    def __str__(self) -> str:
        return f"TP {self.tp} CP {self.cp} PP {self.pp} VPP {self.vpp} EP {self.ep} DP {self.dp}"


def padded_vocabulary(vocabulary: int, tp: int) -> int:
    """Rows of the embedding after Megatron's padding."""
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-vocabulary // multiple) * multiple


def split_layers(costs: Sequence[float], last: float, chunks: int) -> list[int]:
    """Layers of every chunk: contiguous, at least one each, so that the most expensive chunk is as cheap as possible.

    Args:
        costs: of the layers, in order.
        last: of what stands behind the last layer.
        chunks: at most as many as layers.
    """
    def parts(limit: float) -> list[int] | None:
        """Fill chunks up to the limit, but leave a layer for each that follows; None if the limit is too low."""
        sizes, position, total = [], 0, len(costs)
        for chunk in range(chunks):
            left = chunks - chunk - 1
            held, size = (last if left == 0 else 0.0), 0
            while position < total - left and (held + costs[position] <= limit * (1 + 1e-12) or size == 0):
                if held + costs[position] > limit * (1 + 1e-12):
                    return None
                held += costs[position]
                position, size = position + 1, size + 1
            sizes.append(size)
        return sizes if position == total else None

    low, high = max(costs), sum(costs) + last
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if parts(middle) else (middle, high)
    found = parts(high)
    assert found is not None, "one chunk with everything is always possible"
    return found


def powers_of_two(limit: int) -> Iterator[int]:
    """1, 2, 4, ... up to the limit."""
    value = 1
    while value <= limit:
        yield value
        value *= 2


class Obstacle(StrEnum):
    """Why sizes are no layout, in the order in which they are examined."""

    HEADS = "TP does not divide the heads"
    WIDTHS = "TP does not divide the feed-forward widths"
    NO_EXPERTS = "EP without experts"
    EXPERTS = "EP does not divide the experts"
    NO_PIPELINE = "virtual stages without a pipeline"
    CHUNKS = "more chunks than layers"
    GPUS = "TP x CP x PP does not divide the number of GPUs"
    EXPERT_RANKS = "EP does not divide TP x CP x DP"
    ZIGZAG = "2 x CP does not divide the context"
    SEQUENCE = "CP x TP does not divide the context"
    BATCH = "DP x micro-batch does not divide the global batch"
    ROUNDS = "virtual stages need a number of micro-batches that PP divides"


def candidates(job: Job, fixed: Mapping[str, int], gpus_per_node: int) -> Iterator[tuple[Layout | None, str]]:
    """Every combination of power-of-two sizes; a layout, or None and the reason why there is none.

    Args:
        fixed: sizes that the user gave, by name (tp, cp, pp, vpp, ep, micro_batch).
        gpus_per_node: TP does not leave a node.
    """
    config = job.config

    def choices(name: str, limit: int) -> list[int]:
        return [fixed[name]] if name in fixed else list(powers_of_two(limit))

    sizes = product(
        choices("tp", gpus_per_node),
        choices("cp", max(1, job.context // 8192)),
        choices("pp", min(config.num_layers, 64)),
        choices("vpp", 8),
        choices("ep", config.num_experts or 1),
        choices("micro_batch", 4),
    )
    for tp, cp, pp, vpp, ep, micro_batch in sizes:
        reason = impossible(job, tp, cp, pp, vpp, ep, micro_batch)
        if reason:
            yield None, reason
            continue
        dp = job.gpus // (tp * cp * pp)
        yield Layout(tp, cp, pp, vpp, ep, dp, micro_batch, job.global_batch // (dp * micro_batch)), ""


def impossible(job: Job, tp: int, cp: int, pp: int, vpp: int, ep: int, micro_batch: int) -> str:
    """Why these sizes cannot be used, an `Obstacle`; empty if they can."""
    config = job.config
    dp = job.gpus // (tp * cp * pp)
    sequences = dp * micro_batch
    checks = {
        Obstacle.HEADS: any(heads % tp for heads in (config.num_attention_heads, config.kda_num_heads)),
        Obstacle.WIDTHS: any(width % tp for width in feed_forward_widths(config)),
        Obstacle.NO_EXPERTS: config.num_experts is None and ep > 1,
        Obstacle.EXPERTS: (config.num_experts or ep) % ep,
        Obstacle.NO_PIPELINE: pp == 1 and vpp > 1,
        Obstacle.CHUNKS: pp * vpp > config.num_layers,
        Obstacle.GPUS: job.gpus % (tp * cp * pp),
        Obstacle.EXPERT_RANKS: (tp * cp * dp) % ep,
        Obstacle.ZIGZAG: cp > 1 and job.context % (2 * cp),  # a rank holds two slices, for balance
        Obstacle.SEQUENCE: job.context % (cp * tp),  # sequence parallelism cuts what a CP rank holds
        Obstacle.BATCH: dp == 0 or job.global_batch % sequences,
        Obstacle.ROUNDS: dp > 0 and vpp > 1 and (job.global_batch // sequences) % pp,
    }
    return next((reason for reason, holds in checks.items() if holds), "")


def feed_forward_widths(config: KimiK3Config) -> tuple[int, int]:
    """Of the dense layers and of the shared experts, which TP cuts."""
    return config.dense_ffn_hidden_size, config.num_shared_experts * config.expert_ffn_hidden_size


def in_flight(layout: Layout, rank: int) -> int:
    """Chunk passes whose activations a pipeline rank holds at its worst moment (1F1B, Megatron's schedules)."""
    if layout.vpp == 1:
        return min(layout.pp - rank, layout.num_microbatches)
    warm_up = 2 * (layout.pp - rank - 1) + (layout.vpp - 1) * layout.pp
    return min(warm_up + 1, layout.num_microbatches * layout.vpp)


def layout_string(sizes: Sequence[int]) -> str:
    """Megatron's --pipeline-model-parallel-layout for these chunks."""
    words = ["t" * size for size in sizes]
    words[0], words[-1] = f"E{words[0]}", f"{words[-1]}L"
    return "|".join(words)
