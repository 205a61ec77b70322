"""Sizes and limits of MoonViT-V2, one field per flag. This module imports neither torch nor megatron."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class MoonViTConfig:
    """The vision encoder and its projector."""

    moonvit_num_layers: int = 27
    """Encoder blocks."""

    moonvit_hidden_size: int = 1024
    """Width of the encoder."""

    moonvit_num_heads: int = 12
    """Attention heads."""

    moonvit_head_dim: int = 128
    """Width of a head; a multiple of 4, because half of the rotation pairs turn with the column, half with the row."""

    moonvit_ffn_size: int = 4096
    """Width of the hidden layer of a block's MLP."""

    moonvit_patch_size: int = 14
    """Edge of a square patch in pixels."""

    moonvit_position_grid: int = 64
    """Edge of the learned square table of positions, which is interpolated to the grid of each image."""

    moonvit_interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How that table is interpolated: bilinear as published with Kimi K3, bicubic as with Kimi K2.5."""

    moonvit_projector_norm: Literal["post", "pre"] = "post"
    """The projector's norm: of the tokens it hands to the language model, as published with Kimi K3, or of the
    encoder's patches before its MLP, as with Kimi K2.5."""

    moonvit_norm_eps: float = 2.0**-23
    """Added to the mean square in the encoder's norms. The published code leaves it to PyTorch, which takes 2^-23, the
    distance from 1 to the next fp32 number, also for bf16."""

    moonvit_projector_norm_eps: float = 1e-5
    """Added to the mean square in the projector's norm."""

    moonvit_max_patches: int = field(default=65536, metadata={"changes_parameters": False})
    """Most patches of an image or of one frame; 65536 are 3584 x 3584 pixels."""

    moonvit_max_frames: int = field(default=64, metadata={"changes_parameters": False})
    """Most frames of a video clip. A longer video is cut into clips by whoever prepares it."""

    moonvit_frozen: bool = field(default=False, metadata={"changes_parameters": False})
    """Do not train the encoder and its projector: they keep the weights of the checkpoint and have no backward."""

    moonvit_recompute: bool = field(default=False, metadata={"changes_parameters": False})
    """Keep only the input of each encoder block for the backward pass, and run its forward a second time there."""
