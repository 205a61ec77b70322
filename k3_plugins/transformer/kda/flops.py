"""FLOPs of KDA layers in Megatron's throughput figure, which counts every layer as softmax attention.

Megatron's convention: 2 per multiply-add, times 3 for forward, data gradient and weight gradient; a delta-rule
recurrence counts 4 K V multiply-adds per head and token (decay, readout for the correction, update, readout), the cost
of the mathematics rather than of a chunked kernel.
"""

import copy
from argparse import Namespace
from collections.abc import Callable

from k3_plugins.transformer.kda.config import KDAConfig, KDASizes

FORWARD_BACKWARD = 3
FMA = 2


def kda_flops_per_token(config: KDAConfig, hidden_size: int, num_attention_heads: int, kv_channels: int) -> int:
    """Forward and backward FLOPs of one KDA layer for one token, all tensor-parallel ranks together."""
    sizes = KDASizes.resolve(config, num_attention_heads, kv_channels)
    heads, value_heads, k, v = sizes.num_heads, sizes.num_value_heads, sizes.head_dim, sizes.value_head_dim
    key_width, value_width = heads * k, value_heads * v
    projections = hidden_size * (2 * key_width + value_width + value_heads)  # q, k, v, beta
    decay = hidden_size * k + k * value_heads * k
    gate = hidden_size * value_width if config.kda_output_gate == "full-rank" else v * (hidden_size + value_width)
    convolution = config.kda_conv_kernel_size * (2 * key_width + value_width)
    recurrence = 4 * value_heads * k * v
    output = value_width * hidden_size
    return FORWARD_BACKWARD * FMA * (projections + decay + gate + convolution + recurrence + output)


def correct_flops(count: Callable[..., float]) -> Callable[..., float]:
    """Wrap Megatron's ``num_floating_point_operations`` so that KDA layers are counted as KDA layers."""

    def num_floating_point_operations(
        args: Namespace,
        batch_size: int,
        seqlen_squared_sum_in_batch: float | None = None,
        total_real_tokens_in_batch: float | None = None,
    ) -> float:
        from k3_plugins.activation import active

        config = active().config("kda")
        sequences = (batch_size, seqlen_squared_sum_in_batch, total_real_tokens_in_batch)
        tokens = total_real_tokens_in_batch if total_real_tokens_in_batch is not None else batch_size * args.seq_length
        everything_softmax = count(args, *sequences)
        attention = everything_softmax - count(_without_attention(args), *sequences)
        layers = args.num_layers + (args.mtp_num_layers or 0)
        kda_layers = sum(args.linear_attention_freq)
        kda = kda_flops_per_token(config, args.hidden_size, args.num_attention_heads, args.kv_channels) * tokens
        return everything_softmax + kda_layers * (kda - attention / layers)

    return num_floating_point_operations


def _without_attention(args: Namespace) -> Namespace:
    """Arguments for which Megatron's formula counts no attention: plain attention of zero width."""
    bare = copy.copy(args)
    bare.multi_latent_attention = False
    bare.kv_channels = 0
    return bare
