"""What a KDA layer remembers between tokens when text is generated: a state of constant size.

Per sequence: S ``[HV, K, V]`` in fp32 and the last W - 1 rows in front of each short convolution. Nothing grows with
the length of the text.

Shapes: s new tokens, b batch, d hidden, H key heads, HV value heads, K key width, V value width, W kernel, c channels.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from k3_plugins.transformer.kda.layer import KimiDeltaAttention, l2_norm
from k3_plugins.transformer.kda.ops import kda, kda_gate, kda_step
from k3_plugins.transformer.kda.short_conv import short_conv, short_conv_step


class KDACache:
    """The state of one layer; set as ``layer.generation_cache``, it takes over the layer's forward pass.

    Args:
        layer: a layer that holds all heads (tensor-parallel size 1).
        batch: b.
    """

    def __init__(self, layer: KimiDeltaAttention, batch: int) -> None:
        sizes, weight = layer.sizes, layer.linear_q.weight
        window = layer.kda_config.kda_conv_kernel_size - 1
        self.rows = {
            name: weight.new_zeros(batch, window, getattr(layer, f"{name}_conv").shape[0]) for name in ("q", "k", "v")
        }
        dtype = torch.promote_types(weight.dtype, torch.float32)
        shape = (batch, sizes.num_value_heads, sizes.head_dim, sizes.value_head_dim)
        self.state = torch.zeros(shape, dtype=dtype, device=weight.device)

    @property
    def bytes(self) -> int:
        """Memory of the state and the rows."""
        tensors = [self.state, *self.rows.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def advance(self, layer: KimiDeltaAttention, hidden_states: Tensor) -> Tensor:
        """The layer's output for the next tokens, ``[s, b, d]`` to ``[s, b, d]``; the cache moves on behind them."""
        q, k, v = (self._convolve(layer, name, hidden_states) for name in ("q", "k", "v"))
        q, k = (l2_norm(rearrange(t, "b s (h k) -> b s h k", k=layer.sizes.head_dim)) for t in (q, k))
        v = rearrange(v, "b s (h v) -> b s h v", v=layer.sizes.value_head_dim)
        z = layer.linear_decay_up(layer.linear_decay_down(hidden_states))[0].to(layer.dt_bias.dtype) + layer.dt_bias
        z = rearrange(z, "s b (h k) -> b s h k", k=layer.sizes.head_dim)
        g = kda_gate(z, layer.A_log, layer.kda_config.gate_lower_bound)
        beta = torch.sigmoid(rearrange(layer.linear_beta(hidden_states)[0], "s b h -> b s h").to(g.dtype))
        if hidden_states.shape[0] == 1:
            q, k, v, g, beta = (t.squeeze(1) for t in (q, k, v, g, beta))
            o, self.state = kda_step(q, k, v, g, beta, self.state)
            o = o.unsqueeze(1)
        else:
            o, state = kda(
                q,
                k,
                v,
                g,
                beta,
                initial_state=self.state,
                output_final_state=True,
                backend=layer.kda_config.kda_backend,
            )
            assert state is not None  # output_final_state
            self.state = state
        return layer.linear_proj(layer._gated_norm(o, hidden_states, hidden_states))[0]

    def _convolve(self, layer: KimiDeltaAttention, name: str, hidden_states: Tensor) -> Tensor:
        """``[s, b, d]`` to ``[b, s, c]`` through the projection and the short convolution of q, k or v."""
        x = rearrange(getattr(layer, f"linear_{name}")(hidden_states)[0], "s b c -> b s c")
        weight, rows = getattr(layer, f"{name}_conv"), self.rows[name]
        if x.shape[1] == 1:
            y, self.rows[name] = short_conv_step(x.squeeze(1), weight, rows)
            return y.unsqueeze(1)
        y = short_conv(x, weight, initial_rows=rows)
        self.rows[name] = torch.cat([rows, x], dim=1)[:, x.shape[1] :]
        return y
