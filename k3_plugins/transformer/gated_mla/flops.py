"""FLOPs of MLA's output gate in Megatron's throughput figure, whose MLA formula has no gate."""

from argparse import Namespace
from collections.abc import Callable

FORWARD_BACKWARD = 3
FMA = 2


def add_gate_flops(count: Callable[..., float]) -> Callable[..., float]:
    """Wrap Megatron's ``num_floating_point_operations`` so that the gate projection of every MLA layer is counted."""

    def num_floating_point_operations(
        args: Namespace,
        batch_size: int,
        seqlen_squared_sum_in_batch: float | None = None,
        total_real_tokens_in_batch: float | None = None,
    ) -> float:
        from k3_plugins.activation import active

        total = count(args, batch_size, seqlen_squared_sum_in_batch, total_real_tokens_in_batch)
        if not active().config("gated-mla").mla_output_gate:
            return total
        tokens = total_real_tokens_in_batch if total_real_tokens_in_batch is not None else batch_size * args.seq_length
        mla_layers = (args.linear_attention_freq or [0] * args.num_layers).count(0)
        gate = args.hidden_size * args.num_attention_heads * args.v_head_dim
        return total + mla_layers * FORWARD_BACKWARD * FMA * gate * tokens

    return num_floating_point_operations
