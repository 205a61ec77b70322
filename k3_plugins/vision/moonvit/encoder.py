"""MoonViT-V2 with its projector: packed patches of images and videos in, tokens of the language model out.

    patch embedding + positions -> blocks -> norm -> mean over frames -> 2 x 2 pixel shuffle -> MLP, norm -> width D

Sources: Kimi-VL technical report (arXiv 2504.07491) for the packed encoder, K3 technical report (arXiv 2607.24653) for
RMSNorm, no biases and video. The ``transformers`` package's Kimi-K2.5 tower computes the same for images once its
biases are zero and its norms are RMSNorms.

Letters: N patches, M tokens of all clips, d encoder width, D width of the language model, P edge of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, sharded_state_dict_default
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from k3_plugins.transformer.norm import RMSNorm, parameter_device
from k3_plugins.transformer.tensor_parallel import enter_region, local_column_linear
from k3_plugins.vision.moonvit.block import MoonViTBlock
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.geometry import MERGE, Clip, Piece, check_batch
from k3_plugins.vision.moonvit.packed import Packed
from k3_plugins.vision.moonvit.positions import rotation_angles, table_positions

Between = Callable[[int, Tensor], Tensor]


def transformer_config(config: MoonViTConfig, text: TransformerConfig) -> TransformerConfig:
    """The encoder's sizes in Megatron's form; dtype, device, initialisation and parallel sizes are the text model's.

    The encoder runs without sequence parallelism: packed patches need not divide by the tensor-parallel size.

    Raises:
        ValueError: a head width that is no multiple of 4, heads or MLP that tensor parallelism does not divide.
    """
    tp = text.tensor_model_parallel_size
    if config.moonvit_head_dim % 4:
        raise ValueError(f"--moonvit-head-dim {config.moonvit_head_dim} must be a multiple of 4")
    for flag, value in (
        ("--moonvit-num-heads", config.moonvit_num_heads),
        ("--moonvit-ffn-size", config.moonvit_ffn_size),
        ("--moonvit-hidden-size", config.moonvit_hidden_size),
    ):
        if value % tp:
            raise ValueError(f"{flag} {value} cannot be split over --tensor-model-parallel-size {tp}")
    return TransformerConfig(
        num_layers=config.moonvit_num_layers,
        hidden_size=config.moonvit_hidden_size,
        num_attention_heads=config.moonvit_num_heads,
        kv_channels=config.moonvit_head_dim,
        ffn_hidden_size=config.moonvit_ffn_size,
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
        sequence_parallel=False,
        params_dtype=text.params_dtype,
        bf16=text.bf16,
        fp16=text.fp16,
        init_method_std=text.init_method_std,
        use_cpu_initialization=text.use_cpu_initialization,
        init_model_with_meta_device=text.init_model_with_meta_device,
        perform_initialization=text.perform_initialization,
        gradient_accumulation_fusion=text.gradient_accumulation_fusion,
        transformer_impl="local",
    )


class PatchEmbedding(MegatronModule):
    """A linear layer on the pixels of a patch, plus the position. Copies on all tensor-parallel ranks are equal.

    ``[N, 3*P*P]`` to ``[N, d]``.
    """

    def __init__(self, config: TransformerConfig, vit: MoonViTConfig) -> None:
        super().__init__(config)
        kwargs = {"dtype": config.params_dtype, "device": parameter_device(config)}
        grid = vit.moonvit_position_grid
        self.interpolation = vit.moonvit_interpolation
        self.weight = nn.Parameter(torch.empty(config.hidden_size, 3 * vit.moonvit_patch_size**2, **kwargs))
        self.positions = nn.Parameter(torch.empty(grid, grid, config.hidden_size, **kwargs))
        if config.perform_initialization:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw in fp32 from the generator that Megatron seeds alike on all tensor-parallel ranks."""
        for parameter in (self.weight, self.positions):
            master = torch.empty_like(parameter, dtype=torch.float32)
            self.config.init_method(master)
            parameter.copy_(master)

    def forward(self, patches: Tensor, pieces: Sequence[Piece]) -> Tensor:
        embedded = nn.functional.linear(patches.to(self.weight.dtype), self.weight)
        return embedded + table_positions(self.positions, pieces, self.interpolation).to(embedded.dtype)


class Projector(MegatronModule):
    """An MLP on the 2 x 2 patches of a token, ``[M, 4, d]`` to ``[M, D]``, normed before (patches) or after."""

    def __init__(
        self, config: TransformerConfig, vit: MoonViTConfig, output_size: int, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        width = MERGE**2 * config.hidden_size
        eps = vit.moonvit_projector_norm_eps
        self.pre_norm = self.post_norm = None
        if vit.moonvit_projector_norm == "pre":
            self.pre_norm = RMSNorm(config, config.hidden_size, eps)
        else:
            self.post_norm = RMSNorm(config, output_size, eps)
        self.linear_fc1 = local_column_linear(width, width, config, self.tp_group)
        self.linear_fc2 = RowParallelLinear(
            width,
            output_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        x = enter_region(x.flatten(1), self.config, self.tp_group)
        x = self.linear_fc2(gelu(self.linear_fc1(x)[0]))[0]
        return x if self.post_norm is None else self.post_norm(x)


class MoonViT(MegatronModule):
    """The encoder and its projector.

    Args:
        vit: sizes and limits.
        text: the language model's config, read for its width and for what both share.
        pg_collection: read for ``tp``; default: Megatron's groups.
    """

    def __init__(
        self, vit: MoonViTConfig, text: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        config = transformer_config(vit, text)
        super().__init__(config)
        self.vit = vit
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp"])
        eps = vit.moonvit_norm_eps
        self.patch_embedding = PatchEmbedding(config, vit)
        self.blocks = nn.ModuleList(
            MoonViTBlock(config, eps, self.pg_collection) for _ in range(vit.moonvit_num_layers)
        )
        self.final_norm = RMSNorm(config, config.hidden_size, eps)
        self.projector = Projector(config, vit, text.hidden_size, self.pg_collection)
        self.patches_encoded = 0

    def forward(self, patches: Tensor, clips: Sequence[Clip], between: Between | None = None) -> Tensor:
        """Encode images and videos of any mix of sizes.

        Args:
            patches: ``[N, 3*P*P]``, the clips one behind the other (see ``geometry.patchify``).
            clips: their grids.
            between: see :meth:`encode`.

        Returns:
            ``[M, D]``, the tokens of the clips one behind the other, row by row.

        Raises:
            ImageError: grids that are refused, or patches that do not fit them.
        """
        check_batch(patches, clips, self.vit)
        if not clips:
            return patches.new_zeros(0, self.projector.linear_fc2.output_size, dtype=self.config.params_dtype)
        return self.encode_packed(patches, Packed(clips), between)

    def encode_packed(self, patches: Tensor, packed: Packed, between: Between | None = None) -> Tensor:
        """Encode the rows that ``packed`` describes: ``[N, 3*P*P]`` to ``[M, D]``."""
        return self.projector(packed.merge(self.encode(patches, packed, between)))

    def encode(self, patches: Tensor, packed: Packed, between: Between | None = None) -> Tensor:
        """``[N, 3*P*P]`` to ``[N, d]``, the final norm included.

        Args:
            between: called ahead of every block with its number and ``[N, d]``; the block gets what it returns.
        """
        self.patches_encoded += len(patches)
        x = self.patch_embedding(patches, packed.pieces)
        angles = rotation_angles(packed.pieces, self.config.kv_channels, x.device)
        compute = torch.promote_types(x.dtype, torch.float32)
        cos, sin = angles.cos().to(compute), angles.sin().to(compute)
        for number, block in enumerate(self.blocks):
            if between is not None:
                x = between(number, x)
            if self.vit.moonvit_recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, packed, use_reentrant=False)
            else:
                x = block(x, cos, sin, packed)
        return self.final_norm(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's distributed-checkpoint description; blocks are asked one by one, so that each tells its shards."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: dict[str, Any] = {}
        for name, module in self._parts():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.pg_collection.tp
            )
        return state

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        yield "patch_embedding", self.patch_embedding
        for number, block in enumerate(self.blocks):
            yield f"blocks.{number}", block
        yield "final_norm", self.final_norm
        yield "projector", self.projector
