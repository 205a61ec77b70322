"""The ONE description of a Kimi-K3-style model, and its presets.

Everything that could disagree is derived from it: which layers are KDA and which are full attention, which are dense
and which are mixtures of experts, where attention-residual blocks begin. A preset becomes defaults of Megatron's and
the features' flags, so any flag on the command line still wins, and the patterns follow the depth asked for.

This module imports neither torch nor megatron: planners and ``--help`` read it on any machine.
Sources: K3 technical report (arXiv 2607.24653), Kimi Linear (arXiv 2510.26692) and its published configuration.
"""

import dataclasses
from argparse import Namespace
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from k3_plugins.transformer.kda.pattern import full_attention_pattern
from k3_plugins.vision.moonvit.config import MoonViTConfig


def expert_pattern(num_layers: int, first_dense: int) -> list[int]:
    """Megatron's MoE pattern: 0 for a dense layer, 1 for a mixture of experts; the first layers are dense."""
    return [0 if i < first_dense else 1 for i in range(num_layers)]


@dataclass(frozen=True)
class KimiK3Config:
    """Sizes of a Kimi-K3-style model, all ranks together."""

    hidden_size: int
    """Width of the residual stream."""
    num_layers: int
    """Number of transformer layers."""
    vocab_size: int
    """Size of the vocabulary."""

    num_attention_heads: int
    """Heads of the full-attention (MLA) layers."""
    kv_lora_rank: int
    """Width of the key-value latent."""
    qk_head_dim: int
    """Query/key channels per head that come from the latents."""
    qk_pos_emb_head_dim: int
    """Query/key channels per head whose key part is shared by the heads; not rotated (NoPE)."""
    v_head_dim: int
    """Value channels per head."""

    kda_num_heads: int
    """KDA heads."""
    kda_head_dim: int
    """Key width K of a KDA head."""

    dense_ffn_hidden_size: int
    """Width of the feed-forward network of dense layers."""

    q_lora_rank: int | None = None
    """Width of the query latent; None projects queries directly."""
    mla_output_gate: bool = True
    """Per-channel output gate on MLA."""
    kda_value_head_dim: int | None = None
    """Value width V of a KDA head; K when None."""
    kda_conv_kernel_size: int = 4
    """Short-convolution kernel."""
    kda_gate: Literal["bounded", "softplus"] = "bounded"
    """Decay gate."""
    kda_gate_lower_bound: float = -5.0
    """Lower bound of the bounded gate's log-decay."""
    kda_output_gate: Literal["full-rank", "low-rank"] = "full-rank"
    """Output gate projection of KDA."""
    kda_output_gate_bias: bool = False
    """Bias on the second matrix of the low-rank output gate."""
    full_attention_period: int = 4
    """Every so-many-th layer is full attention; the last layer always is."""

    activation: Literal["swiglu", "situ"] = "swiglu"
    """Gated activation of the feed-forward networks."""
    first_k_dense: int = 0
    """Leading dense layers of a mixture-of-experts model."""
    num_experts: int | None = None
    """Routed experts; None for a dense model."""
    moe_top_k: int = 0
    """Routed experts per token."""
    num_shared_experts: int = 0
    """Shared experts, each of expert width, full hidden width."""
    expert_ffn_hidden_size: int = 0
    """Width of one expert."""
    moe_latent_size: int | None = None
    """Latent width that the routed experts work in; None for the full width."""
    routed_scaling_factor: float = 1.0
    """Factor on the renormalised routing weights."""

    attn_res_block_size: int | None = None
    """Transformer layers per attention-residual block; None for plain residuals."""

    vision: MoonViTConfig | None = None
    """The vision encoder of the model; None if it was published without one."""

    norm_eps: float = 1e-5
    """Epsilon of the layer norms and of KDA's output norm."""
    mla_latent_norm_eps: float = 1e-6
    """Epsilon of the norms on MLA's latents."""
    init_method_std: float = 0.02
    """Standard deviation of the weights' initial values."""
    required_features: tuple[str, ...] = field(default=("kda", "gated-mla"))
    """Features without which this model cannot be built."""

    @property
    def attention_pattern(self) -> list[int]:
        """1 for KDA, 0 for full attention, layer by layer."""
        return full_attention_pattern(self.num_layers, self.full_attention_period)

    @property
    def moe_pattern(self) -> list[int]:
        """1 for a mixture of experts, 0 for dense, layer by layer."""
        return expert_pattern(self.num_layers, self.first_k_dense if self.num_experts else self.num_layers)

    def argument_defaults(self, active: Collection[str] = ()) -> dict[str, Any]:
        """Defaults for Megatron's and the features' flags, by argparse destination.

        Args:
            active: names of the active features; quantile balancing takes the place of Megatron's bias rule, and only
                moonvit has flags for the vision encoder.

        The layer patterns are not among them: they are derived from the depth after parsing (the features'
        ``validate``), so that ``--num-layers`` may differ from the preset's.
        """
        defaults: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            # Megatron wants a head width even where MLA does not use it, and cannot always derive one: 7168 / 96
            "kv_channels": self.v_head_dim,
            "multi_latent_attention": True,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_head_dim": self.qk_head_dim,
            "qk_pos_emb_head_dim": self.qk_pos_emb_head_dim,
            "v_head_dim": self.v_head_dim,
            "mla_output_gate": self.mla_output_gate,
            "mla_latent_norm_eps": self.mla_latent_norm_eps,
            "kda_num_heads": self.kda_num_heads,
            "kda_head_dim": self.kda_head_dim,
            "kda_value_head_dim": self.kda_value_head_dim,
            "kda_conv_kernel_size": self.kda_conv_kernel_size,
            "kda_gate": self.kda_gate,
            "kda_gate_lower_bound": self.kda_gate_lower_bound,
            "kda_output_gate": self.kda_output_gate,
            "kda_output_gate_bias": self.kda_output_gate_bias,
            "ffn_hidden_size": self.dense_ffn_hidden_size,
            "swiglu": True,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_eps,
            "position_embedding_type": "none",
            "untie_embeddings_and_output_weights": True,
            "init_method_std": self.init_method_std,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }
        if self.num_experts is not None:
            defaults |= {
                "num_experts": self.num_experts,
                "moe_router_topk": self.moe_top_k,
                "moe_ffn_hidden_size": self.expert_ffn_hidden_size,
                "moe_shared_expert_intermediate_size": self.num_shared_experts * self.expert_ffn_hidden_size or None,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": "quantile-balancing" not in active,
                "moe_router_load_balancing_type": "none",
                "moe_router_dtype": "fp32",
                "moe_router_topk_scaling_factor": self.routed_scaling_factor,
            }
        if self.moe_latent_size is not None:
            defaults["moe_latent_size"] = self.moe_latent_size
        if self.activation == "situ":
            defaults["k3_activation"] = "situ"
        if self.attn_res_block_size is not None:
            defaults["attn_res_block_size"] = self.attn_res_block_size
        if self.vision is not None and "moonvit" in active:
            defaults |= vision_values(self.vision)
        return defaults

    def derive_patterns(self, args: Namespace) -> None:
        """Set the dense/MoE pattern for the depth that was asked for, unless the user wrote one out.

        The KDA pattern needs nothing here: the kda feature derives it from ``--linear-attention-freq``.

        Args:
            args: Megatron's parsed arguments, whose ``moe_layer_freq`` is 1 unless given.
        """
        if args.num_experts and args.moe_layer_freq == 1 and self.first_k_dense:
            args.moe_layer_freq = expert_pattern(args.num_layers, self.first_k_dense)
        if args.linear_attention_freq is None:
            args.linear_attention_freq = self.full_attention_period

    def scaled(self, **changes: Any) -> "KimiK3Config":
        """A copy with other sizes, for proxies."""
        return dataclasses.replace(self, **changes)


def vision_values(vision: MoonViTConfig) -> dict[str, Any]:
    """What decides the encoder's parameters and what they mean, by argparse destination; no limits of a run."""
    items = dataclasses.fields(vision)
    return {item.name: getattr(vision, item.name) for item in items if item.metadata.get("changes_parameters", True)}


KIMI_K3 = KimiK3Config(
    hidden_size=7168,
    num_layers=93,
    vocab_size=163840,
    num_attention_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
    kda_num_heads=96,
    kda_head_dim=128,
    dense_ffn_hidden_size=33792,
    activation="situ",
    first_k_dense=1,
    num_experts=896,
    moe_top_k=16,
    num_shared_experts=2,
    expert_ffn_hidden_size=3072,
    moe_latent_size=3584,
    attn_res_block_size=12,
    vision=MoonViTConfig(),
    required_features=("kda", "gated-mla", "attnres", "latent-moe"),
)

KIMI_LINEAR = KimiK3Config(
    hidden_size=2304,
    num_layers=27,
    vocab_size=163840,
    num_attention_heads=32,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
    mla_output_gate=False,
    kda_num_heads=32,
    kda_head_dim=128,
    kda_gate="softplus",
    kda_output_gate="low-rank",
    dense_ffn_hidden_size=9216,
    first_k_dense=1,
    num_experts=256,
    moe_top_k=8,
    num_shared_experts=1,
    expert_ffn_hidden_size=1024,
    routed_scaling_factor=2.446,
)

# Proxies keep the structure (3 KDA : 1 MLA, gates, latents) at sizes that train on two CPU cores, byte by byte.
KIMI_K3_TINY = KimiK3Config(
    hidden_size=128,
    num_layers=4,
    vocab_size=257,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=48,
    qk_head_dim=24,
    qk_pos_emb_head_dim=8,
    v_head_dim=32,
    kda_num_heads=4,
    kda_head_dim=32,
    dense_ffn_hidden_size=384,
    vision=MoonViTConfig(
        moonvit_num_layers=2,
        moonvit_hidden_size=64,
        moonvit_num_heads=2,
        moonvit_head_dim=32,
        moonvit_ffn_size=256,
        moonvit_position_grid=8,
    ),
)

KIMI_K3_SMALL = KIMI_K3_TINY.scaled(
    hidden_size=256,
    num_layers=8,
    num_attention_heads=4,
    q_lora_rank=128,
    kv_lora_rank=96,
    qk_head_dim=48,
    qk_pos_emb_head_dim=16,
    v_head_dim=64,
    kda_num_heads=4,
    kda_head_dim=64,
    dense_ffn_hidden_size=704,
    vision=MoonViTConfig(
        moonvit_num_layers=4,
        moonvit_hidden_size=128,
        moonvit_num_heads=4,
        moonvit_head_dim=32,
        moonvit_ffn_size=512,
        moonvit_position_grid=16,
    ),
)

KIMI_LINEAR_TINY = KIMI_LINEAR.scaled(
    hidden_size=128,
    num_layers=5,
    vocab_size=257,
    num_attention_heads=4,
    kv_lora_rank=48,
    qk_head_dim=24,
    qk_pos_emb_head_dim=8,
    v_head_dim=32,
    kda_num_heads=4,
    kda_head_dim=32,
    dense_ffn_hidden_size=384,
    num_experts=8,
    moe_top_k=2,
    expert_ffn_hidden_size=64,
    vision=KIMI_K3_TINY.vision,
)

KIMI_K3_MOE_TINY = KIMI_K3_TINY.scaled(
    num_layers=8,
    activation="situ",
    first_k_dense=1,
    num_experts=16,
    moe_top_k=4,
    num_shared_experts=1,
    expert_ffn_hidden_size=64,
    moe_latent_size=64,
    attn_res_block_size=3,
    required_features=KIMI_K3.required_features,
)

PRESETS: dict[str, KimiK3Config] = {
    "kimi_k3": KIMI_K3,
    "kimi_linear": KIMI_LINEAR,
    "kimi_k3_tiny": KIMI_K3_TINY,
    "kimi_k3_small": KIMI_K3_SMALL,
    "kimi_k3_moe_tiny": KIMI_K3_MOE_TINY,
    "kimi_linear_tiny": KIMI_LINEAR_TINY,
}
"""Models that ``--k3-model`` names: the two published ones and proxies of them."""


def preset(name: str) -> KimiK3Config:
    """The description called ``name``.

    Raises:
        ValueError: no such preset; the message lists the names.
    """
    if name not in PRESETS:
        raise ValueError(f"--k3-model {name!r} is not a known model; choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]
