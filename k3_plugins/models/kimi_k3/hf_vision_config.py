"""``vision_config`` of a Kimi-K3 ``config.json`` <-> the sizes of MoonViT-V2.

Every field is used, checked, known to be harmless, or an error, as in ``hf_config``. Names are those of the published
Kimi-K3 configuration (``vt_*``); Kimi-K2.5 has the same names, and LayerNorms with biases, which are refused.

This module imports neither torch nor megatron.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Literal

from k3_plugins.models.kimi_k3.config import vision_values
from k3_plugins.models.kimi_k3.hf_fields import FieldReader, is_among, shown
from k3_plugins.vision.moonvit.config import MoonViTConfig

SIZES = {
    "vt_num_hidden_layers": "moonvit_num_layers",
    "vt_hidden_size": "moonvit_hidden_size",
    "vt_num_attention_heads": "moonvit_num_heads",
    "vt_intermediate_size": "moonvit_ffn_size",
    "patch_size": "moonvit_patch_size",
}
"""Required fields -> fields of the encoder's config: whole numbers from 1."""

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "norm_type": (("rmsnorm",), "the norms are RMSNorms"),
    "attn_bias": ((False,), "the projections have no biases"),
    "linear_bias": ((False,), "the MLPs have no biases"),
    "patch_embed_proj_bias": ((False,), "the patch embedding has no bias"),
    "activation_func": (("gelu_pytorch_tanh",), "the MLPs use the tanh form of GELU"),
    "mlp_type": (("mlp2",), "the MLPs have two matrices"),
    "merge_type": (("sd2_tpool",), "frames are averaged and 2 x 2 patches become a token"),
    "merge_kernel_size": (([2, 2],), "2 x 2 patches become a token"),
    "pos_emb_type": (("divided_fixed",), "positions are a learned table and fixed sinusoids of the frame"),
    "projector_hidden_act": (("gelu",), "the projector uses GELU"),
    "video_attn_type": (("spatial_temporal",), "attention goes over space and time"),
}
"""Fields that describe something the encoder has one form of: accepted values, and why."""

REQUIRED = frozenset(("norm_type", "attn_bias", "linear_bias", "patch_embed_proj_bias"))
"""Of these, the ones whose absence means something else: Kimi-K2.5 leaves them out."""

PROJECTORS: dict[str, Literal["post", "pre"]] = {"patchmergerv2": "post", "patchmerger": "pre"}
"""``mm_projector_type`` -> where the projector's norm stands."""

READ_BELOW = frozenset(
    """qkv_hidden_size init_pos_emb_height init_pos_emb_width pos_emb_interpolation_mode mm_projector_type
    projector_ln_eps mm_hidden_size text_hidden_size""".split()
)

HARMLESS = frozenset("_attn_implementation init_pos_emb_time model_type dtype torch_dtype transformers_version".split())
"""Fields that do not change what the weights compute (``init_pos_emb_time`` limits the frames of a clip)."""


def read(
    values: Mapping[str, Any], text_hidden_size: Any, ignored: Collection[str], reader: FieldReader
) -> MoonViTConfig | None:
    """The encoder's sizes; what is wrong goes to the reader of the whole file.

    Args:
        values: the whole file, with ``vision_config``.
        text_hidden_size: width of the language model.
        ignored: fields that the user declares harmless, as ``vision_config.NAME``.
    """
    nested = values["vision_config"]
    if not isinstance(nested, Mapping):
        reader.faults.append(f"vision_config is {shown(nested)}, not a table of fields")
        return None
    own = FieldReader(nested)
    known = SIZES.keys() | FIXED.keys() | READ_BELOW | HARMLESS
    for name in sorted(set(nested) - known):
        if f"vision_config.{name}" in ignored:
            reader.notes.append(f"vision_config.{name}: unknown, ignored as asked")
        else:
            own.faults.append(
                f"{name} is a field this converter does not know; it may change the model. If it does not, pass"
                f" --ignore-config-field vision_config.{name}"
            )
    for name, (accepted, why) in FIXED.items():
        if name not in nested:
            if name in REQUIRED:
                own.faults.append(f"{name} is missing; only {accepted[0]!r} can be converted: {why}")
        elif not is_among(nested[name], accepted):
            own.faults.append(f"{name} is {shown(nested[name])}, only {accepted[0]!r} can be converted: {why}")
    sizes: dict[str, Any] = {ours: own.size(name, required=True) for name, ours in SIZES.items()}
    heads, width = sizes["moonvit_num_heads"], sizes["moonvit_hidden_size"]
    inner = own.size("qkv_hidden_size") or width
    if heads and inner and inner % (4 * heads):
        own.faults.append(f"qkv_hidden_size {inner} is not vt_num_attention_heads {heads} times a multiple of 4")
    rows, columns = (own.size(f"init_pos_emb_{edge}", required=True) for edge in ("height", "width"))
    if rows and columns and rows != columns:
        own.faults.append(f"init_pos_emb_height is {rows}, init_pos_emb_width {columns}: the table must be square")
    mode = own.get("pos_emb_interpolation_mode", str, "bicubic")
    if mode not in ("bilinear", "bicubic"):
        own.faults.append(f"pos_emb_interpolation_mode is {shown(mode)}; known are bilinear, bicubic")
    projector = own.get("mm_projector_type", str, "patchmergerv2")
    if projector not in PROJECTORS:
        own.faults.append(f"mm_projector_type is {shown(projector)}; known are {', '.join(PROJECTORS)}")
    eps = own.factor("projector_ln_eps", 1e-5)
    for name, expected in (("mm_hidden_size", width), ("text_hidden_size", text_hidden_size)):
        if nested.get(name) is not None and not is_among(nested[name], (expected,)):
            own.faults.append(f"{name} is {shown(nested[name])}, and the model has {shown(expected)}")
    reader.faults += [f"vision_config.{fault}" for fault in own.faults]
    if own.faults or rows is None:
        return None
    return MoonViTConfig(
        **sizes,
        moonvit_head_dim=inner // heads,
        moonvit_position_grid=rows,
        moonvit_interpolation=mode,
        moonvit_projector_norm=PROJECTORS[projector],
        moonvit_projector_norm_eps=eps,
    )


def write(vision: MoonViTConfig, text_hidden_size: int) -> dict[str, Any]:
    """The published form; ``read`` of it gives the sizes back."""
    projectors = {norm: name for name, norm in PROJECTORS.items()}
    return {
        **{name: accepted[0] for name, (accepted, _) in FIXED.items() if name != "video_attn_type"},
        **{name: getattr(vision, ours) for name, ours in SIZES.items()},
        "qkv_hidden_size": vision.moonvit_num_heads * vision.moonvit_head_dim,
        "init_pos_emb_height": vision.moonvit_position_grid,
        "init_pos_emb_width": vision.moonvit_position_grid,
        "init_pos_emb_time": 4,
        "pos_emb_interpolation_mode": vision.moonvit_interpolation,
        "mm_projector_type": projectors[vision.moonvit_projector_norm],
        "projector_ln_eps": vision.moonvit_projector_norm_eps,
        "mm_hidden_size": vision.moonvit_hidden_size,
        "text_hidden_size": text_hidden_size,
    }


def differences(one: MoonViTConfig | None, other: MoonViTConfig | None) -> list[str]:
    """Fields in which two encoders disagree about what the weights compute, as ``name: a, b``."""
    if one is None or other is None:
        return [] if one is other else [f"vision encoder: {_there(one)}, {_there(other)}"]
    ours, theirs = vision_values(one), vision_values(other)
    return [f"{name}: {ours[name]!r}, {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]


def _there(vision: MoonViTConfig | None) -> str:
    return "none" if vision is None else "MoonViT-V2"


def from_arguments(args: Any) -> MoonViTConfig:
    """The encoder of a trained model, from its saved arguments."""
    names = [item.name for item in fields(MoonViTConfig) if hasattr(args, item.name)]
    return MoonViTConfig(**{name: getattr(args, name) for name in names})
