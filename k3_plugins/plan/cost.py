"""Time of a step and bytes on the wires, per GPU. Estimates for comparing layouts, not predictions of a cluster.

Compute: FLOPs over peak times efficiency; what a policy computes again is added; the slowest stage sets the pace.
Communication counts what a GPU sends, with the collectives' (n - 1) / n, activations and weights in bf16; of its time a
part is taken to hide behind compute (`HIDDEN`). The pipeline adds (PP - 1) / (VPP m) of a rank's time for its
micro-batches, communication inside them included: who waits for a neighbour waits for that too. What DP does once a
step comes on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3_plugins.models.kimi_k3.config import KimiK3Config
from k3_plugins.plan.flops import feed_forward_flops
from k3_plugins.plan.layout import Job, Layout
from k3_plugins.plan.memory import FULL, Options, chunk_parameters, rows_per_hop
from k3_plugins.plan.parameters import kda_sizes

HIDDEN = {"TP": 0.0, "CP": 0.0, "EP": 0.5, "PP": 0.9, "DP": 0.8}
"""Share of the communication time that runs behind compute."""


@dataclass(frozen=True)
class Hardware:
    """Speeds of one GPU; bytes and FLOPs per second."""

    peak_flops: float
    efficiency: float
    inside_node: float
    between_nodes: float
    gpus_per_node: int

    def bandwidth(self, ranks: int) -> float:
        """Of a group whose members are neighbours: inside a node, or between nodes."""
        return self.inside_node if ranks <= self.gpus_per_node else self.between_nodes


@dataclass(frozen=True)
class Cost:
    """Of one step."""

    seconds: float
    compute_seconds: float
    bubble: float
    """Share of the step in which a GPU waits for the pipeline."""
    imbalance: float
    """Compute of the slowest stage over the mean."""
    sent: dict[str, float]
    """Bytes that the busiest GPU sends per step, by group."""
    model_flops_utilisation: float
    tokens_per_second: float
    """Per GPU."""


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _runs_again(options: Options, module: str) -> bool:
    """Whether a feed-forward module (in Megatron's words) is computed again in the backward."""
    modules = options.recompute_modules if options.policy == "selective" else ()
    inside_moe = module == "shared_experts" and "moe" in modules
    return options.policy in FULL or module in modules or inside_moe


def _flops_again(job: Job, options: Options, layer: int) -> float:
    """FLOPs per token of what the backward of a layer computes again."""
    if options.policy in FULL:
        return job.layer_flops[layer]
    mlp, routed, shared = feed_forward_flops(job.config, layer)
    kinds = ((mlp, "mlp"), (routed, "moe"), (shared, "shared_experts"))
    return sum(flops for flops, module in kinds if _runs_again(options, module))


def sent_bytes(job: Job, layout: Layout, options: Options, sizes: tuple[int, ...]) -> dict[str, float]:
    """Bytes a GPU sends per step, by parallel group; of the pipeline rank with most layers."""
    config, d = job.config, job.config.hidden_size
    rank = max(range(layout.pp), key=lambda r: sum(sizes[r :: layout.pp]))
    layers = _layers(layout, sizes, rank)
    kda = sum(config.attention_pattern[layer] for layer in layers)
    moe = sum(config.moe_pattern[layer] for layer in layers)
    sequence = job.context * layout.micro_batch / layout.cp  # tokens of a TP group in a micro-batch
    own = sequence / layout.tp
    m = layout.num_microbatches
    recompute = options.policy in FULL
    sent = dict.fromkeys(HIDDEN, 0.0)
    # gather and scatter around attention, dense MLP and shared experts: 2 forward, 3 backward, 2 to recompute
    dense, shared = len(layers) - moe, moe if config.num_shared_experts else 0
    passes = (5 + 2 * recompute) * len(layers)
    passes += (5 + 2 * _runs_again(options, "mlp")) * dense + (5 + 2 * _runs_again(options, "shared_experts")) * shared
    sent["TP"] = passes * 2 * sequence * d * _share(layout.tp) * m
    if layout.cp > 1:
        latent = 2 * sequence * (config.kv_lora_rank + config.qk_pos_emb_head_dim) * (layout.cp - 1)
        per_pass = (len(layers) - kda) * latent + kda * _kda_exchange(config, layout, sequence)
        sent["CP"] = (2 + recompute) * per_pass * m
    if config.num_experts is not None:
        sent["EP"] = moe * _expert_exchange(config, layout, options, own) * m
    if layout.pp > 1:
        hops = rows_per_hop(config.attn_res_block_size, layout.pp, sizes)
        rows = max(sum(hops[c] for c in range(r, layout.chunks - 1, layout.pp)) for r in range(layout.pp))
        sent["PP"] = 2 * rows * own * d * 2 * m
    counts = chunk_parameters(config, layout.tp, layout.ep, sizes)[rank :: layout.pp]
    # gradients in fp32 to their shards (once per group of micro-batches with ZeRO-2), parameters back in bf16
    rounds = max(1, m / layout.pp) if options.pipeline_zero2 else 1
    for kind, ranks in ((0, layout.dp * layout.cp), (1, layout.expert_dp)):
        sent["DP"] += (4 * rounds + 2) * sum(count[kind] for count in counts) * _share(ranks)
    return sent


def zigzag_moves(ranks: int) -> float:
    """Share of its rows that the busiest rank sends to go from Megatron's zigzag layout to contiguous slices.

    Zigzag rank i holds slices i and 2n - 1 - i of 2n, contiguous rank i slices 2i and 2i + 1.
    """
    last = 2 * ranks - 1
    return max(sum(part // 2 != rank for part in (rank, last - rank)) for rank in range(ranks)) / 2


def _kda_exchange(config: KimiK3Config, layout: Layout, sequence: float) -> float:
    """Bytes that a GPU sends over CP in a KDA layer, in one pass of a micro-batch.

    Args:
        sequence: tokens of a TP group in a micro-batch.
    """
    kda, sizes = kda_sizes(config)
    heads, value = sizes.num_value_heads / layout.tp, sizes.value_head_dim
    # the input and the decay's low-rank half become contiguous, whole on every TP rank; the output goes back, by heads
    rows = 2 * sequence * (config.hidden_size + sizes.head_dim + heads * value) * zigzag_moves(layout.cp)
    # a state and a transition matrix per head to every rank, fp32
    state = 4 * heads * sizes.head_dim * (value + sizes.head_dim) * layout.micro_batch * (layout.cp - 1)
    channels = (2 * sizes.num_heads * sizes.head_dim + sizes.num_value_heads * value) / layout.tp
    halo = 2 * (kda.kda_conv_kernel_size - 1) * channels * layout.micro_batch
    return rows + state + halo


def _expert_exchange(config: KimiK3Config, layout: Layout, options: Options, tokens: float) -> float:
    """Bytes that a GPU sends over EP in a mixture-of-experts layer, forward and backward of a micro-batch.

    Args:
        tokens: of one rank.
    """
    assert config.num_experts is not None
    width, recompute = config.moe_latent_size or config.hidden_size, _runs_again(options, "moe")
    pairs = tokens * config.moe_top_k
    if not options.moonep:
        # there and back, forward and backward, and forward again
        return (4 + 2 * recompute) * 2 * pairs * width * _share(layout.ep)
    # two hops: equal shares to the relays, which pass on R rows of padding per destination
    share = math.ceil(pairs / layout.ep)
    hops = share + min(share + layout.ep, share * layout.ep)
    passes = (5 if options.moonep_memory_efficient else 4) + 2 * recompute
    sent = passes * 2 * hops * width * (layout.ep - 1)
    # every pass fetches the slots' weights in two hops, whatever the plan; gradients go home in two hops, in fp32
    home = config.num_experts // layout.ep * 3 * width * config.expert_ffn_hidden_size
    return sent + ((2 + recompute) * 2 * 2 + 2 * 4) * home * _share(layout.ep)


def _layers(layout: Layout, sizes: tuple[int, ...], rank: int) -> list[int]:
    starts = [sum(sizes[:chunk]) for chunk in range(len(sizes))]
    own = range(rank, layout.chunks, layout.pp)
    return [layer for chunk in own for layer in range(starts[chunk], starts[chunk] + sizes[chunk])]


def of_layout(job: Job, layout: Layout, options: Options, sizes: tuple[int, ...], hardware: Hardware) -> Cost:
    """The estimate for a step."""
    held = [_layers(layout, sizes, rank) for rank in range(layout.pp)]
    # forward, twice that backward, and what is computed again, never the output layer
    stages = [sum(3 * job.layer_flops[one] + _flops_again(job, options, one) for one in own) for own in held]
    stages[-1] += 3 * job.last_flops
    slowest = max(stages)
    tokens = job.context * layout.micro_batch * layout.num_microbatches / (layout.cp * layout.tp)
    compute = slowest * tokens / (hardware.peak_flops * hardware.efficiency)
    sent = sent_bytes(job, layout, options, sizes)
    reach = {
        "TP": layout.tp,
        "CP": layout.tp * layout.cp,
        "EP": layout.ep,
        "PP": job.gpus,
        "DP": layout.tp * layout.cp * layout.dp,
    }
    waiting = {
        group: bytes_sent / hardware.bandwidth(reach[group]) * (1 - HIDDEN[group]) for group, bytes_sent in sent.items()
    }
    busy = compute + sum(seconds for group, seconds in waiting.items() if group != "DP")
    bubble_seconds = busy * (layout.pp - 1) / (layout.vpp * layout.num_microbatches)
    seconds = busy + bubble_seconds + waiting["DP"]
    step_tokens = job.global_batch * job.context
    useful = 3 * (sum(job.layer_flops) + job.last_flops) * step_tokens
    return Cost(
        seconds=seconds,
        compute_seconds=compute,
        bubble=bubble_seconds / seconds,
        imbalance=max(stages) / (sum(stages) / layout.pp),
        sent=sent,
        model_flops_utilisation=useful / (seconds * job.gpus * hardware.peak_flops),
        tokens_per_second=step_tokens / seconds / job.gpus,
    )
