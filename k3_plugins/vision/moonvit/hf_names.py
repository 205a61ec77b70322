"""Names and layouts of ``vision_tower.*`` and ``mm_projector.*`` in Hugging Face checkpoints.

The published towers of this family hold one fused ``wqkv`` per block (q, then k, then v rows; rotated channel pairs lie
side by side, as here), a convolution for the patch embedding, and ``norm0``/``norm1``, ``mlp.fc0``/``mlp.fc1``. An
unknown tensor ends the conversion, a bias among them, which MoonViT-V2 does not have; loading the result into the model
strictly finds what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

FIXED = {
    # Hugging Face name -> parameter of the encoder
    "vision_tower.patch_embed.proj.weight": "patch_embedding.weight",
    "vision_tower.patch_embed.pos_emb.weight": "patch_embedding.positions",
    "vision_tower.encoder.final_layernorm.weight": "final_norm.weight",
    "mm_projector.pre_norm.weight": "projector.pre_norm.weight",
    "mm_projector.post_norm.weight": "projector.post_norm.weight",
    "mm_projector.proj.0.weight": "projector.linear_fc1.weight",
    "mm_projector.proj.2.weight": "projector.linear_fc2.weight",
}
BLOCK_PREFIX = "vision_tower.encoder.blocks."
BLOCK = {
    # the same within a block
    "norm0.weight": "norm0.weight",
    "norm1.weight": "norm1.weight",
    "wo.weight": "linear_proj.weight",
    "mlp.fc0.weight": "linear_fc1.weight",
    "mlp.fc1.weight": "linear_fc2.weight",
}
WQKV = "wqkv.weight"
FUSED = ("linear_q.weight", "linear_k.weight", "linear_v.weight")
_BLOCK_NAME = re.compile(r"vision_tower\.encoder\.blocks\.(\d+)\.(.+)")


class VisionNameError(ValueError):
    """A checkpoint whose vision tensors are not those of MoonViT-V2."""


def from_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole (not tensor-parallel) weights by the names of :class:`~k3_plugins.vision.moonvit.encoder.MoonViT`.

    Args:
        tensors: all ``vision_tower.*`` and ``mm_projector.*`` tensors.

    Raises:
        VisionNameError: naming the tensor that is unknown.
    """
    state = {}
    for name, tensor in tensors.items():
        match = _BLOCK_NAME.fullmatch(name)
        if name in FIXED:
            # The convolution's kernel is the linear weight: channels first, then rows.
            state[FIXED[name]] = tensor.flatten(1) if name.endswith("patch_embed.proj.weight") else tensor
        elif match and match[2] == WQKV:
            if tensor.shape[0] % 3:
                raise VisionNameError(f"{name} has {tensor.shape[0]} rows, which are not three equal parts")
            state |= {f"blocks.{match[1]}.{part}": t for part, t in zip(FUSED, tensor.chunk(3), strict=True)}
        elif match and match[2] in BLOCK:
            state[f"blocks.{match[1]}.{BLOCK[match[2]]}"] = tensor
        else:
            what = "MoonViT-V2 has no biases" if name.endswith(".bias") else "MoonViT-V2 has no such tensor"
            raise VisionNameError(f"{name}: {what}")
    return state


def to_hf(state: Mapping[str, Tensor], patch_size: int) -> dict[str, Tensor]:
    """The inverse of :func:`from_hf`.

    Raises:
        VisionNameError: naming what is unknown or missing.
    """
    fixed = {ours: hf for hf, ours in FIXED.items()}
    block = {ours: hf for hf, ours in BLOCK.items()}
    tensors: dict[str, Tensor] = {}
    fused: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if name in fixed:
            tensors[fixed[name]] = tensor.unflatten(1, (3, patch_size, patch_size)) if tensor.ndim == 2 and (
                name == "patch_embedding.weight"
            ) else tensor  # fmt: skip
        elif match and match[2] in block:
            tensors[f"{BLOCK_PREFIX}{match[1]}.{block[match[2]]}"] = tensor
        elif match and match[2] in FUSED:
            fused.setdefault(match[1], {})[match[2]] = tensor
        else:
            raise VisionNameError(f"{name}: no parameter of MoonViT-V2 has this name")
    for number, parts in fused.items():
        if set(parts) != set(FUSED):
            raise VisionNameError(f"blocks.{number}: only {', '.join(sorted(parts))} of {', '.join(FUSED)} are there")
        tensors[f"{BLOCK_PREFIX}{number}.{WQKV}"] = torch.cat([parts[part] for part in FUSED])
    return tensors
