"""Which rows of which weights belong to which attention head, and how strongly each row is clipped.

A head whose largest logit exceeds tau gets eta = tau / max, and row i of a weight is multiplied by eta ** exponent[i].
The exponents of a logit's two sides sum to 1, so the next forward's largest logit is tau:

    MLA, query        per head  [no-position rows: alpha | shared-key rows: 1]
    MLA, key-value    per head  [no-position rows: 1 - alpha | value rows: 0]
    attention, n = m  per group [query: alpha | gate: 0 | key: 1 - alpha | value: 0]
    attention, n > m  per group [query: 1 | gate: 0 | key, value: 0]

The shared key channels of MLA and the keys of a query group serve several heads, so they stay and the query takes
the whole factor: other heads keep their bits. Source: Kimi K2 technical report (arXiv 2507.20534), algorithm 1.

Shapes: n heads, m query groups of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3_plugins.feature import FeatureError
from k3_plugins.transformer.logit_maxima import LogitMaxima


@dataclass(frozen=True)
class ClippedRows:
    """One parameter that takes part in a head's logits."""

    parameter: torch.nn.Parameter
    """``[rows, ...]``, this tensor-parallel rank's part."""
    head: Tensor
    """``[rows]`` local head of each row."""
    exponent: Tensor
    """``[rows]`` power of eta; 0 leaves a row as it is, bit for bit."""

    def factors(self, eta: Tensor) -> Tensor:
        """``[rows]`` from eta ``[n]``."""
        exponent = self.exponent.to(eta)
        return torch.where(exponent == 0, 1.0, eta[self.head.to(eta.device)] ** exponent)


@dataclass(frozen=True)
class ClippedAttention:
    """One softmax attention of the model."""

    name: str
    heads: int
    """Heads of this tensor-parallel rank."""
    take: Callable[[], Tensor | None]
    """The largest logit ``[n]`` of each head since the last call."""
    rows: Sequence[ClippedRows]


def clipped_attentions(model_chunks: Sequence[torch.nn.Module], alpha: float) -> list[ClippedAttention]:
    """Every softmax attention of this rank, prepared to collect its maxima.

    Raises:
        FeatureError: for an attention whose logits cannot be had or are not linear in the weights.
    """
    found = []
    for index, chunk in enumerate(model_chunks):
        for name, module in chunk.named_modules():
            attention = getattr(module, "self_attention", None)
            if hasattr(attention, "linear_kv_up_proj") or hasattr(attention, "linear_qkv"):
                label = f"model chunk {index}, {name}.self_attention"
                found.append(_clipped_attention(label, attention, alpha))
    return found


def _clipped_attention(name: str, attention: Any, alpha: float) -> ClippedAttention:
    take = _recorder(name, attention)
    latent = hasattr(attention, "linear_kv_up_proj")
    rows = _latent_rows(attention, alpha) if latent else _plain_rows(name, attention, alpha)
    return ClippedAttention(name, int(rows[0].head.max()) + 1, take, rows)


def _recorder(name: str, attention: Any) -> Callable[[], Tensor | None]:
    """Attach a `LogitMaxima` to our cores; read what Transformer Engine's core keeps by itself."""
    for owner in (attention, getattr(attention, "core_attention", None)):
        if owner is not None and hasattr(owner, "logit_maxima"):
            owner.logit_maxima = LogitMaxima()
            return owner.logit_maxima.take
    core = attention.core_attention
    if not hasattr(core, "current_max_attn_logits"):
        raise FeatureError(
            f"qk-clip: {name} runs {type(core).__name__}, which does not report its largest logits; use the K3 layer"
            " specs (--spec k3_plugins.models.kimi_k3.layer_specs gpt) or Transformer Engine 2.9 or newer, or drop"
            " qk-clip from --k3-plugins"
        )

    return _training_maxima(core)


def _training_maxima(core: Any) -> Callable[[], Tensor | None]:
    """Read Transformer Engine's running maximum, which takes in every forward pass: those of evaluation are undone."""
    before: list[Tensor | None] = []

    def remember(module: Any, inputs: Any) -> None:
        before[:] = [module.current_max_attn_logits]

    def restore(module: Any, inputs: Any, output: Any) -> None:
        if not module.training:
            module.current_max_attn_logits = before[0]

    def take() -> Tensor | None:
        value, core.current_max_attn_logits = core.current_max_attn_logits, None
        return value

    core.register_forward_pre_hook(remember)
    core.register_forward_hook(restore)
    return take


def _latent_rows(attention: Any, alpha: float) -> list[ClippedRows]:
    config = attention.config
    query = attention.linear_q_proj if config.q_lora_rank is None else attention.linear_q_up_proj
    per_query = [(config.qk_head_dim, alpha), (config.qk_pos_emb_head_dim, 1.0)]
    per_key_value = [(config.qk_head_dim, 1.0 - alpha), (config.v_head_dim, 0.0)]
    return [*_head_major(query, per_query), *_head_major(attention.linear_kv_up_proj, per_key_value)]


def _head_major(linear: Any, parts: list[tuple[int, float]]) -> list[ClippedRows]:
    """Rows ``[head, part, channel]``; a bias is scaled like the weight."""
    exponent = torch.cat([torch.full((width,), power) for width, power in parts])
    heads = linear.weight.shape[0] // len(exponent)
    head = torch.arange(heads).repeat_interleave(len(exponent))
    return [ClippedRows(parameter, head, exponent.repeat(heads)) for parameter in _parameters(linear)]


def _plain_rows(name: str, attention: Any, alpha: float) -> list[ClippedRows]:
    config = attention.config
    if config.qk_layernorm or config.qk_l2_norm:
        flag = "--qk-layernorm" if config.qk_layernorm else "--qk-l2-norm"
        raise FeatureError(
            f"qk-clip: {name} normalises queries and keys, so scaling their weights does not bound the logits; drop"
            f" {flag}, or drop qk-clip from --k3-plugins"
        )
    width = config.kv_channels
    groups = attention.num_query_groups_per_partition
    per_group = attention.num_attention_heads_per_partition // groups
    gate = per_group * width if config.attention_output_gate else 0
    query, key = (alpha, 1.0 - alpha) if per_group == 1 else (1.0, 0.0)
    exponent = torch.cat(
        [torch.full((per_group * width,), query), torch.zeros(gate), torch.full((width,), key), torch.zeros(width)]
    )
    # rows without a factor may carry any head's number
    in_group = torch.zeros(len(exponent), dtype=torch.long)
    in_group[: per_group * width] = torch.arange(per_group).repeat_interleave(width)
    head = (torch.arange(groups)[:, None] * per_group + in_group).flatten()
    linear = attention.linear_qkv
    return [ClippedRows(parameter, head, exponent.repeat(groups)) for parameter in _parameters(linear)]


def _parameters(linear: Any) -> list[torch.nn.Parameter]:
    return [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
