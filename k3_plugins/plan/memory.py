"""Bytes on a GPU by kind, for every pipeline rank of a layout. Estimates: each term says what it counts.

Activations under sequence parallelism are cut over TP throughout, and over CP; "token" below is one token of a rank's
share before that cut. Widths are in elements of bf16 (2 bytes) unless said otherwise; fp32 training doubles them, also
the few that are fp32 anyway. Counted is what the backward needs with the GPU kernels (fla, flash attention, grouped
GEMM); kernels' own workspaces are in ``--reserve-memory``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from k3_plugins.models.kimi_k3.config import KimiK3Config
from k3_plugins.pipeline_parallel.attnres_payload.plan import PipelinePlan
from k3_plugins.plan.layout import Job, Layout, in_flight, padded_vocabulary
from k3_plugins.plan.parameters import (
    Part,
    first_parts,
    kda_sizes,
    last_parts,
    layer_parts,
    mtp_parts,
    on_rank,
    orthogonalised,
    vision,
)

KINDS = (
    "weights",
    "gradients",
    "optimizer",
    "vision encoder",
    "activations",
    "residual blocks",
    "MoonEP",
    "logits",
    "reserve",
)
POLICIES = ("keep", "selective", "full", "full+cpu")
"""What stays for the backward: everything; all but what `Options.recompute_modules` computes again; the input of a
layer; that input in host memory, but for two layers."""

FULL = ("full", "full+cpu")
"""Policies that compute whole layers again."""

Encoder = Literal["none", "first stage", "every stage", "every stage and a copy"]
"""Where the vision encoder stands: vision-bubble puts it on every stage, pipeline-zero2 a copy beside the model's that
is trained."""

KDA_CHUNK = 64
"""Tokens in a chunk of the KDA kernels, which keep two [chunk, chunk] matrices per head and chunk."""


@dataclass(frozen=True)
class Options:
    """Choices that are not parallel sizes."""

    policy: str = "full"
    recompute_modules: tuple[str, ...] = ("mlp", "moe")
    """Under the policy ``selective``, in Megatron's words: of those that do something with the layers of K3 (measured),
    `mlp` and `moe` compute whole feed-forward networks again, `shared_experts` and `layernorm` parts of a layer, and
    `moe_act` the activation of Transformer Engine's grouped experts."""
    recompute_block: bool = False
    """Under the policies `FULL`, Megatron's method ``block``: the first layers of a chunk are computed again, one by
    one, and the others keep everything. Otherwise ``uniform``: all layers, in groups of which the input stays."""
    recompute_num_layers: int = 1
    """Of a chunk (``block``) or of a group (``uniform``)."""
    pipeline_zero2: bool = True
    optimizer_on_host: float = 0.0
    """Share of the master weights and moments that is in host memory."""
    moonep: bool = True
    moonep_memory_efficient: bool = True
    """Of the routed experts only the input stays for the backward."""
    stacked_experts: bool = False
    """Experts of `transformer.moe.experts` without MoonEP, which keep no activation."""
    reserve: float = 6 * 2**30
    """CUDA context, communication buffers, workspaces, fragmentation."""
    element_bytes: float = 2.0
    """Of a weight and of an activation."""
    gradient_bytes: float = 4.0
    state_bytes: float = 12.0
    """Of an element's optimizer states under AdamW: the moments, and the master weight unless the weight is it."""
    muon_state_bytes: float | None = None
    """The same for what Per-Head Muon updates, which has one momentum; None without that feature."""
    sharded_states: bool = True
    """Over data and context parallelism."""
    mtp_layers: int = 0
    """Depths of multi-token prediction, on the last stage."""
    encoder: Encoder = "none"
    encoder_trained: bool = True


def _count(parts: Iterable[Part], config: KimiK3Config, tp: int, ep: int, muon_only: bool) -> tuple[int, int]:
    dense = experts = 0
    padded = padded_vocabulary(config.vocab_size, tp)
    for part in parts:
        if muon_only and not orthogonalised(part):
            continue
        count = on_rank(part, tp, ep, config.vocab_size, padded)
        if part.sharding == "expert":
            experts += count
        else:
            dense += count
    return dense, experts


@functools.lru_cache(maxsize=4096)
def chunk_parameters(
    config: KimiK3Config, tp: int, ep: int, sizes: tuple[int, ...], mtp_layers: int = 0, muon_only: bool = False
) -> tuple[tuple[int, int], ...]:
    """(dense, expert) parameters on one rank, for every chunk of these numbers of layers.

    Args:
        mtp_layers: depths of multi-token prediction, in the last chunk.
        muon_only: count what Per-Head Muon updates.
    """
    layers = [
        _count(layer_parts(config, layer), config, tp, ep, muon_only) for layer in range(config.num_layers)
    ]
    ends = {0: first_parts(config)}
    last = last_parts(config) + mtp_parts(config) * mtp_layers
    if mtp_layers and len(sizes) > 1:
        last += first_parts(config)  # its own copy of the embedding
    ends[len(sizes) - 1] = ends.get(len(sizes) - 1, []) + last
    counts, start = [], 0
    for chunk, size in enumerate(sizes):
        held = layers[start : start + size] + [_count(ends.get(chunk, []), config, tp, ep, muon_only)]
        counts.append((sum(dense for dense, _ in held), sum(experts for _, experts in held)))
        start += size
    return tuple(counts)


def norm_width(config: KimiK3Config, again: bool) -> float:
    """Elements per token that the norm before a sublayer keeps, and the residual stream under it.

    Args:
        again: the norm is computed again from its input.
    """
    # a copy of the input in fp32, and the output; Attention Residuals keep the partial sum itself
    kept = 0 if again else 3
    return config.hidden_size * (kept + (again or config.attn_res_block_size is not None))


def attention_width(config: KimiK3Config, layer: int) -> float:
    """Elements per token that an attention sublayer keeps, without its norm."""
    if config.attention_pattern[layer]:
        _, sizes = kda_sizes(config)
        keys, values = sizes.num_heads * sizes.head_dim, sizes.num_value_heads * sizes.value_head_dim
        kept = 2 * (2 * keys + values)  # q, k, v before the convolution and after it
        kept += 2 * sizes.num_value_heads * sizes.head_dim  # the decay, fp32
        kept += 2 * sizes.num_value_heads * KDA_CHUNK  # A and its inverse
        return kept + 3 * values  # output of the recurrence; gate before the sigmoid; gated output
    heads, value = config.num_attention_heads, config.v_head_dim
    query = config.qk_head_dim + config.qk_pos_emb_head_dim
    kept = (config.q_lora_rank or 0) + config.kv_lora_rank + config.qk_pos_emb_head_dim
    kept += heads * (2 * query + value)  # q, k, v
    return kept + heads * value * 3 + 2 * heads  # output, gate, gated output; log-sum-exp in fp32


def feed_forward_width(config: KimiK3Config, layer: int, options: Options, again: Collection[str]) -> float:
    """Elements per token that a feed-forward sublayer keeps, without its norm.

    Args:
        again: modules that are computed again.
    """
    if not config.moe_pattern[layer]:
        return 0 if "mlp" in again else 3 * config.dense_ffn_hidden_size
    if "moe" in again:
        return 0  # from the norm's output
    width, f, k = config.moe_latent_size or config.hidden_size, config.expert_ffn_hidden_size, config.moe_top_k
    assert config.num_experts is not None
    kept = 2.0 * config.num_experts  # scores, fp32
    if config.moe_latent_size:
        kept += 3 * width  # the norm behind the experts
    if "shared_experts" not in again:
        kept += 3 * f * config.num_shared_experts
    if options.moonep:
        # routing weights in fp32; ways of the rows, three int64
        kept += (2 + 12) * k
        return kept + (width if options.moonep_memory_efficient else k * (width + 2 * f))
    kept += width if config.moe_latent_size else 0
    return kept + k * (width + (2 if options.stacked_experts or "moe_act" in again else 3) * f)


def layer_bytes(config: KimiK3Config, layer: int, options: Options) -> float:
    """Activation bytes per token of a layer, of which nothing is computed again as a whole."""
    again = options.recompute_modules if options.policy == "selective" else ()
    widths = 2 * norm_width(config, "layernorm" in again) + attention_width(config, layer)
    return options.element_bytes * (widths + feed_forward_width(config, layer, options, again))


def layers_kept(config: KimiK3Config, options: Options, layers: Sequence[int]) -> list[float]:
    """Bytes per token that stay for the backward, by layer.

    Args:
        layers: of one chunk, in order.
    """
    whole = [layer_bytes(config, layer, options) for layer in layers]
    if options.policy not in FULL:
        return whole
    entry, number = options.element_bytes * config.hidden_size, options.recompute_num_layers
    if options.recompute_block:
        return [entry] * len(layers[:number]) + whole[number:]
    return [0.0 if place % number else entry for place in range(len(layers))]


def most_again(config: KimiK3Config, options: Options, layers: Sequence[int]) -> float:
    """Bytes per token that the backward of a chunk computes again and holds at a time, at most."""
    keep, number = replace(options, policy="keep"), 1
    if options.policy in FULL:
        number = options.recompute_num_layers
        again = [layer_bytes(config, layer, keep) for layer in layers]
        if options.recompute_block:
            again, number = again[:number], 1
    else:
        again = [layer_bytes(config, layer, keep) - layer_bytes(config, layer, options) for layer in layers]
    return max((sum(again[start : start + number]) for start in range(0, len(again), number)), default=0.0)


def moonep_bytes(config: KimiK3Config, options: Options, experts: int, tokens: float) -> float:
    """The most that MoonEP (its transport ``torch``) holds at a time beside what stays for the backward.

    That is in the backward of one layer, since layers take turns: either in the activation's backward, whose
    intermediate results are fp32, or when the slots' gradients go home.

    Args:
        experts: home experts, and slots, of one rank.
        tokens: of one rank.
    """
    element, f = options.element_bytes, config.expert_ffn_hidden_size
    width = config.moe_latent_size or config.hidden_size
    home = experts * 3 * width * f
    # rows of the output's gradient as received and as computed with; the input's, and the hidden layer
    row = 2 * width + ((2 * width + 2 * f) if options.moonep_memory_efficient else 0)
    rows = tokens * config.moe_top_k
    intermediate = 4 * f * (14 if config.activation == "situ" else 12)  # of both halves
    # weights of home and slots, and the second gradient
    in_activation = element * home * (2 + 2 / 3) + rows * (element * row + intermediate)
    # weights and gradients of home and slots; six fp32 copies of the slots' (transport.give_back); the input's gradient
    giving_back = element * home * 4 + 4 * home * 6 + rows * element * (row + width)
    return max(in_activation, giving_back)


@functools.lru_cache(maxsize=4096)
def chunk_bytes(config: KimiK3Config, options: Options, sizes: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
    """Activation bytes per token of every chunk: what stays, and what is computed again and held at a time."""
    counts, start = [], 0
    for chunk, size in enumerate(sizes):
        layers = range(start, start + size)
        kept = sum(layers_kept(config, options, layers))
        if chunk == len(sizes) - 1:
            kept += layers_kept(config, options, [config.num_layers - 1])[0] * options.mtp_layers
        counts.append((kept, most_again(config, options, layers)))
        start += size
    return tuple(counts)


@dataclass(frozen=True)
class Memory:
    """Bytes of one pipeline rank."""

    rank: int
    device: dict[str, float]
    host: float

    @property
    def total(self) -> float:
        """On the device."""
        return sum(self.device.values())


@functools.lru_cache(maxsize=4096)
def rows_per_hop(block_size: int | None, pp: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Rows [tokens, hidden] of every message between chunks: the hidden state, and what Attention Residuals add."""
    if block_size is None:
        return (1,) * (len(sizes) - 1)
    return tuple(PipelinePlan(pp, sizes, block_size, "on").rows_per_hop())


def of_rank(job: Job, layout: Layout, options: Options, sizes: tuple[int, ...], rank: int) -> Memory:
    """The estimate for one pipeline rank.

    Args:
        sizes: layers of every chunk, in model order.
    """
    config = job.config
    own = range(rank, layout.chunks, layout.pp)
    counts = chunk_parameters(config, layout.tp, layout.ep, sizes, options.mtp_layers)
    dense, experts = sum(counts[chunk][0] for chunk in own), sum(counts[chunk][1] for chunk in own)
    local, largest_chunk = dense + experts, max(sum(counts[chunk]) for chunk in own)
    # ranks that share the states of dense parameters, and of experts
    sharing, expert_sharing = (layout.dp * layout.cp, layout.expert_dp) if options.sharded_states else (1, 1)
    states = options.state_bytes * (dense / sharing + experts / expert_sharing)
    if options.muon_state_bytes is not None:
        muon = chunk_parameters(config, layout.tp, layout.ep, sizes, options.mtp_layers, muon_only=True)
        smaller = sum(muon[chunk][0] for chunk in own) / sharing + sum(muon[chunk][1] for chunk in own) / expert_sharing
        states -= (options.state_bytes - options.muon_state_bytes) * smaller
    shard = 4.0 * (dense / (layout.dp * layout.cp) + experts / layout.expert_dp)
    device = dict.fromkeys(KINDS, 0.0)
    device["weights"] = options.element_bytes * local
    device["gradients"] = options.gradient_bytes * (min(2 * largest_chunk, local) if options.pipeline_zero2 else local)
    device["optimizer"] = states * (1 - options.optimizer_on_host)
    host = (shard if options.pipeline_zero2 else 0.0) + states * options.optimizer_on_host
    device["vision encoder"], encoder_host = _encoder(config, options, rank, sharing)
    host += encoder_host

    tokens = job.context * layout.micro_batch / (layout.cp * layout.tp)
    passes = in_flight(layout, rank)
    kept = chunk_bytes(config, options, sizes)
    stored = sum(kept[chunk][0] for chunk in own) * tokens * passes / layout.vpp
    resident = stored
    if options.policy == "full+cpu":
        resident = min(stored, 2 * options.element_bytes * config.hidden_size * tokens)  # two layers' inputs
        host += stored - resident
    device["activations"] = resident + max(kept[chunk][1] for chunk in own) * tokens
    if config.attn_res_block_size is not None and layout.pp > 1:
        hops = rows_per_hop(config.attn_res_block_size, layout.pp, sizes)
        arriving = sum(hops[chunk - 1] for chunk in own if chunk) / layout.vpp
        device["residual blocks"] = options.element_bytes * config.hidden_size * tokens * arriving * passes
    if options.moonep and config.num_experts is not None:
        device["MoonEP"] = moonep_bytes(config, options, config.num_experts // layout.ep, tokens)
    if layout.chunks - 1 in own:
        # logits and their fp32 softmax; sequence shards are gathered before the output layer
        vocabulary = padded_vocabulary(config.vocab_size, layout.tp) / layout.tp
        device["logits"] = (options.element_bytes + 4.0) * vocabulary * tokens * layout.tp * (1 + options.mtp_layers)
    device["reserve"] = options.reserve
    return Memory(rank, device, host)


def _encoder(config: KimiK3Config, options: Options, rank: int, sharing: int) -> tuple[float, float]:
    """Device and host bytes of the vision encoder's weights, gradients and states; TP, CP and EP do not cut it."""
    if options.encoder == "none" or (rank and options.encoder == "first stage"):
        return 0.0, 0.0
    gradients = options.gradient_bytes if options.encoder_trained else 0.0
    in_model = vision(config) * (options.element_bytes + gradients) if rank == 0 else 0.0
    copied = rank > 0 or options.encoder == "every stage and a copy"
    copy = vision(config) * (options.element_bytes + (4.0 if options.encoder_trained else 0.0)) if copied else 0.0
    states = vision(config) * options.state_bytes / sharing if rank == 0 and options.encoder_trained else 0.0
    on_host = states * options.optimizer_on_host
    return in_model + copy + states - on_host, on_host
