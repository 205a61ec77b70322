"""Flags of the ``gated-mla`` feature; the sizes are Megatron's own --q-lora-rank, --kv-lora-rank, --qk-head-dim, ..."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatedMLAConfig:
    """Gated multi-head latent attention without position encoding, in every full-attention layer."""

    mla_output_gate: bool = True
    """Multiply the attention output by sigmoid(W_g x), channel by channel (K3). Kimi Linear has no such gate."""

    mla_latent_norm_eps: float = 1e-6
    """Epsilon of the RMSNorms on the query and key-value latents; the published checkpoints use 1e-6 here even where
    the layer norms use another value."""
