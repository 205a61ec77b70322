"""Flags of the ``kda`` feature. Sizes left at None follow the Megatron model, so that the two cannot disagree."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention layers; which layers use it follows --linear-attention-freq."""

    kda_num_heads: int | None = None
    """Number of key (and query) heads; the number of attention heads when not given."""

    kda_num_value_heads: int | None = None
    """Number of value heads, a multiple of --kda-num-heads; the same number when not given."""

    kda_head_dim: int | None = None
    """Width K of a query and key head; --kv-channels when not given."""

    kda_value_head_dim: int | None = None
    """Width V of a value head; --kda-head-dim when not given."""

    kda_conv_kernel_size: int = 4
    """Kernel of the depthwise causal convolution on queries, keys and values."""

    kda_gate: Literal["bounded", "softplus"] = "bounded"
    """Decay gate: 'bounded' is K3's lower_bound * sigmoid(exp(A_log) * z), 'softplus' is Kimi Linear's
    -exp(A_log) * softplus(z)."""

    kda_gate_lower_bound: float = -5.0
    """Lower bound of the log-decay of the bounded gate; negative. Not used by the softplus gate."""

    kda_output_gate: Literal["full-rank", "low-rank"] = "full-rank"
    """Output gate projection: one matrix (K3), or two through --kda-head-dim channels (Kimi Linear)."""

    kda_output_gate_bias: bool = False
    """Add a bias to the second matrix of the low-rank output gate."""

    kda_last_layer_full_attention: bool = True
    """When --linear-attention-freq is a number, the last layer of the stack is full attention whatever its index
    (K3 and Kimi Linear both close the stack this way). A written-out pattern is taken as it is."""

    kda_backend: str = "auto"
    """Implementation of the recurrence: naive, torch, fla, or auto, which logs what it chose and why."""

    @property
    def gate_lower_bound(self) -> float | None:
        """The number that ``kda_gate`` takes: the bound, or None for the softplus gate."""
        return self.kda_gate_lower_bound if self.kda_gate == "bounded" else None


@dataclass(frozen=True)
class KDASizes:
    """Sizes of one KDA layer over all tensor-parallel ranks."""

    num_heads: int
    num_value_heads: int
    head_dim: int
    value_head_dim: int

    @classmethod
    def resolve(cls, kda_config: KDAConfig, num_attention_heads: int, kv_channels: int) -> "KDASizes":
        """Fill the sizes that the flags left open from the Megatron model.

        Raises:
            ValueError: a size that is not positive, or value heads that are not a multiple of the key heads.
        """

        def given(size: int | None, default: int) -> int:
            return default if size is None else size  # 0 is a size, and a wrong one

        heads = given(kda_config.kda_num_heads, num_attention_heads)
        head_dim = given(kda_config.kda_head_dim, kv_channels)
        value_heads = given(kda_config.kda_num_value_heads, heads)
        sizes = cls(heads, value_heads, head_dim, given(kda_config.kda_value_head_dim, head_dim))
        for flag, value in zip(
            ("--kda-num-heads", "--kda-num-value-heads", "--kda-head-dim", "--kda-value-head-dim"),
            (sizes.num_heads, sizes.num_value_heads, sizes.head_dim, sizes.value_head_dim),
            strict=True,
        ):
            if value <= 0:
                raise ValueError(f"{flag} is {value}; it must be a positive number.")
        if value_heads % heads:
            raise ValueError(
                f"--kda-num-value-heads {value_heads} is not a multiple of --kda-num-heads {heads}; every key head "
                "serves the same number of value heads."
            )
        return sizes
