"""Time of a step and bytes on the wires, per GPU. Estimates for comparing layouts, not predictions of a cluster.

Compute: FLOPs over peak times efficiency; a policy that recomputes adds its share of a forward; the slowest stage sets
the pace. Communication counts what a GPU sends, with the collectives' (n - 1) / n; of its time a part is taken to hide
behind compute (`HIDDEN`). The pipeline adds (PP - 1) / (VPP m) of a rank's time for its micro-batches, communication
inside them included: who waits for a neighbour waits for that too. What DP does once a step comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3_plugins.plan.layout import Job, Layout
from k3_plugins.plan.memory import Options, chunk_parameters, rows_per_hop

RECOMPUTED = {"keep": 0.0, "selective": 0.05, "full": 1.0, "full+cpu": 1.0}
"""Share of a forward pass that a policy runs again."""

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
    recompute = RECOMPUTED[options.policy] == 1.0
    sent = dict.fromkeys(HIDDEN, 0.0)
    # gather and scatter around attention, dense MLP and shared experts: 2 forward, 3 backward, 2 to recompute
    blocks = 2 * len(layers) if config.num_shared_experts else 2 * len(layers) - moe
    sent["TP"] = (5 + 2 * recompute) * blocks * 2 * sequence * d * _share(layout.tp) * m
    if layout.cp > 1:
        # MLA gathers its latent; KDA passes a state and a transition matrix per head, fp32
        latent = 2 * sequence * (config.kv_lora_rank + config.qk_pos_emb_head_dim)
        heads, value = config.kda_num_heads or config.num_attention_heads, config.kda_value_head_dim
        width = (value or config.kda_head_dim) + config.kda_head_dim
        state = 4 * heads / layout.tp * config.kda_head_dim * width * layout.micro_batch
        per_pass = (len(layers) - kda) * latent + kda * state
        sent["CP"] = (2 + recompute) * per_pass * (layout.cp - 1) * m
    if config.num_experts is not None:
        expert_width = config.moe_latent_size or d
        rows = own * config.moe_top_k * expert_width * 2 * _share(layout.ep)
        passes = (5 if options.moonep else 4) + 2 * recompute
        sent["EP"] = moe * passes * rows * (2 if options.moonep else 1) * m
        if options.moonep:
            # twice as many experts' weights as slots, whatever the plan: forward, backward, and gradients home
            home = config.num_experts // layout.ep * 3 * expert_width * config.expert_ffn_hidden_size
            sent["EP"] += moe * (3 + recompute) * 2 * home * 2 * _share(layout.ep) * m
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


def _layers(layout: Layout, sizes: tuple[int, ...], rank: int) -> list[int]:
    starts = [sum(sizes[:chunk]) for chunk in range(len(sizes))]
    own = range(rank, layout.chunks, layout.pp)
    return [layer for chunk in own for layer in range(starts[chunk], starts[chunk] + sizes[chunk])]


def of_layout(job: Job, layout: Layout, options: Options, sizes: tuple[int, ...], hardware: Hardware) -> Cost:
    """The estimate for a step."""
    stages = [sum(job.layer_flops[layer] for layer in _layers(layout, sizes, rank)) for rank in range(layout.pp)]
    stages[-1] += job.last_flops
    # forward, twice that backward, and what is computed again (not the output layer)
    again = RECOMPUTED[options.policy]
    slowest = max(stages) * (3 + again)
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
