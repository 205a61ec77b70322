"""One encoder block: spatial attention, temporal attention with the same weights, MLP.

    x = x + Attention_frame(norm0(x))          every frame for itself, 2D rotary positions
    x = x + Attention_time(norm0(x))           clips with several frames: the patches of one place, across frames
    x = x + MLP(norm1(x))                      GELU (tanh)

The rotation depends on row and column only, so that it cancels in the scores of temporal attention, where both are the
same for query and key; it is left out there.

Letters: N patches of all clips, d width, n heads of this tensor-parallel rank, k head width.
"""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import gelu

from k3_plugins.transformer.norm import RMSNorm
from k3_plugins.transformer.tensor_parallel import enter_region, local_column_linear
from k3_plugins.vision.moonvit.packed import Packed
from k3_plugins.vision.moonvit.positions import rotate


class MoonViTBlock(MegatronModule):
    """See the module docstring.

    Args:
        config: the encoder's sizes in Megatron's form (see ``encoder.transformer_config``).
        norm_eps: epsilon of the norms.
        pg_collection: read for ``tp``.
    """

    def __init__(self, config: TransformerConfig, norm_eps: float, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.head_dim = config.kv_channels
        self.local_heads = config.num_attention_heads // self.tp_group.size()
        inner = config.num_attention_heads * config.kv_channels
        self.norm0 = RMSNorm(config, config.hidden_size, norm_eps)
        self.linear_q = local_column_linear(config.hidden_size, inner, config, self.tp_group)
        self.linear_k = local_column_linear(config.hidden_size, inner, config, self.tp_group)
        self.linear_v = local_column_linear(config.hidden_size, inner, config, self.tp_group)
        self.linear_proj = self._row(inner)
        self.norm1 = RMSNorm(config, config.hidden_size, norm_eps)
        self.linear_fc1 = local_column_linear(config.hidden_size, config.ffn_hidden_size, config, self.tp_group)
        self.linear_fc2 = self._row(config.ffn_hidden_size)

    def _row(self, input_size: int) -> RowParallelLinear:
        return RowParallelLinear(
            input_size,
            self.config.hidden_size,
            config=self.config,
            init_method=self.config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed) -> Tensor:
        """``[N, d]`` to ``[N, d]``; ``cos`` and ``sin`` are ``[N, k/2]``."""
        q, k, v = self._project(x)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        x = x + self.linear_proj(packed.attend_space(q, k, v))[0]
        if packed.video_rows is not None:
            rows = packed.video_rows.to(x.device)
            x = x.index_add(0, rows, self.linear_proj(packed.attend_time(*self._project(x[rows])))[0])
        hidden, _ = self.linear_fc1(enter_region(self.norm1(x), self.config, self.tp_group))
        return x + self.linear_fc2(gelu(hidden, approximate="tanh"))[0]

    def _project(self, x: Tensor) -> list[Tensor]:
        normed = enter_region(self.norm0(x), self.config, self.tp_group)
        shape = (-1, self.local_heads, self.head_dim)
        return [linear(normed)[0].reshape(shape) for linear in (self.linear_q, self.linear_k, self.linear_v)]
