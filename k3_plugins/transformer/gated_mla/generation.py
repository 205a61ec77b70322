"""What a gated MLA layer remembers between tokens when text is generated: the latent, never keys and values.

Per token r + p numbers, whatever the number of heads. Attention runs in latent space (DeepSeek-V2, arXiv 2405.04434,
section 2.1.2): the up-projection of the keys is applied to the query and that of the values to the attended latent,

    score = scale * ( (W_k^T q_nope) . c + q_pe . k_pe ),     o = W_v sum_t softmax(score)_t c_t

which equals attention over the expanded keys and values up to rounding.

Shapes: s new tokens, S tokens so far, b batch, d hidden, n heads, r latent width, p shared key channels, v value width.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from k3_plugins.transformer.gated_mla.layer import GatedMLASelfAttention

_FIRST_CAPACITY = 256


class LatentCache:
    """The latents of one layer; set as ``layer.generation_cache``, it takes over the layer's forward pass.

    Args:
        layer: a layer that holds all heads (tensor-parallel size 1).
        batch: b.
    """

    def __init__(self, layer: GatedMLASelfAttention, batch: int) -> None:
        weight = layer.linear_kv_down_proj.weight
        self.length = 0
        self._latents = weight.new_empty(_FIRST_CAPACITY, batch, weight.shape[0])

    @property
    def latents(self) -> Tensor:
        """``[S, b, r + p]``."""
        return self._latents[: self.length]

    @property
    def bytes(self) -> int:
        """Memory that the cached tokens need (the buffer grows by doubling)."""
        return self.latents.numel() * self._latents.element_size()

    def _append(self, new: Tensor) -> None:
        needed = self.length + new.shape[0]
        if needed > self._latents.shape[0]:
            larger = self._latents.new_empty(max(needed, 2 * self._latents.shape[0]), *self._latents.shape[1:])
            larger[: self.length] = self.latents
            self._latents = larger
        self._latents[self.length : needed] = new
        self.length = needed

    def advance(self, layer: GatedMLASelfAttention, hidden_states: Tensor) -> Tensor:
        """The layer's output for the next tokens, ``[s, b, d]`` to ``[s, b, d]``; their latents are appended."""
        config = layer.config
        self._append(layer.compress(hidden_states))
        compute = torch.promote_types(hidden_states.dtype, torch.float32)
        latents = self.latents.to(compute)
        up = rearrange(layer.linear_kv_up_proj.weight.to(compute), "(n c) r -> n c r", n=layer.local_heads)
        up_key, up_value = up.split([config.qk_head_dim, config.v_head_dim], dim=1)
        query = layer.query(hidden_states, hidden_states).to(compute)
        nope, shared = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        query = torch.cat([torch.einsum("sbnc,ncr->sbnr", nope, up_key), shared], dim=-1)

        scores = torch.einsum("sbnr,tbr->bnst", query, latents) * layer.softmax_scale
        new, total = hidden_states.shape[0], self.length
        if new > 1:
            future = torch.ones(new, total, dtype=torch.bool, device=scores.device).triu(total - new + 1)
            scores = scores.masked_fill(future, float("-inf"))
        attended = torch.einsum("bnst,tbr->sbnr", scores.softmax(dim=-1), latents[..., : config.kv_lora_rank])
        out = torch.einsum("sbnr,ncr->sbnc", attended, up_value).flatten(2)
        return layer.linear_proj(layer.gate(out, hidden_states).to(hidden_states.dtype))[0]
