"""Megatron distributed checkpoint -> Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3_plugins import manifest
from k3_plugins.models.kimi_k3 import hf_config, hf_folder, hf_names, hf_vision_config, mxfp4
from k3_plugins.models.kimi_k3.checkpoint_model import saved_arguments
from k3_plugins.models.kimi_k3.config import KimiK3Config
from k3_plugins.models.kimi_k3.hf_config import ConversionError, ModelDescription
from k3_plugins.models.kimi_k3.hf_folder import Spelling
from k3_plugins.models.kimi_k3.hf_names import Place
from k3_plugins.models.kimi_k3.safetensors_files import PACKED, SCALE, ShardWriter

QAT = "mxfp4-qat"
"""The feature whose checkpoints hold experts that are meant as MXFP4."""

NOT_THE_MODEL = re.compile(r"(chained_\d+\.)?optimizer\..*|rng_state.*|rerun_state.*")
"""Tensors of a training checkpoint that are no weights."""


def export_checkpoint(
    source: Path,
    target: Path,
    step: int | None = None,
    hf_source: Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    ignore: Sequence[str] = (),
    unpack: bool = False,
) -> None:
    """Convert a checkpoint, saved under any parallel layout.

    Routed experts of a checkpoint from quantization-aware training are written as MXFP4 pairs, in the values that the
    training computed with.

    Args:
        source: folder for ``--load``.
        target: Hugging Face folder; must not exist.
        step: iteration; the latest if None.
        hf_source: Hugging Face folder to take ``config.json``, tokenizer and spelling from.
        max_shard_bytes: largest shard.
        ignore: fields of the config in ``hf_source`` that the user declares harmless.
        unpack: write MXFP4 values as ordinary tensors, for readers that know no packed weights.

    Raises:
        ConversionError: listing everything that does not fit. The target then does not exist.
    """
    with hf_folder.new_folder(target) as folder:
        found = manifest.find(str(source), step)
        if found is None:
            raise ConversionError(f"{source} holds no checkpoint (no {manifest.TRACKER} there)")
        from k3_plugins.models.kimi_k3.dist_checkpoint import BoxReader

        reader = BoxReader(Path(found.folder))
        saved = describe(saved_arguments(Path(found.folder)), found.manifest)
        quantized = QAT in ((found.manifest or {}).get("features") or {})
        companions, spelling, config = _original(Path(found.folder), hf_source, saved, ignore, quantized and not unpack)
        vocab_size = hf_config.language_model(config)["vocab_size"]
        saved = dataclasses.replace(saved, config=saved.config.scaled(vocab_size=vocab_size))
        boxes = plan(saved, spelling, reader.shapes)

        writer = ShardWriter(folder, max_shard_bytes)
        for name, group in groupby(boxes, key=itemgetter(1)):
            parts = []
            for place, _, offset, shape in group:
                tensor = reader.read(place.key, offset, shape)
                if quantized and place.expert is not None:
                    packed, scale = mxfp4.quantize(tensor.reshape(place.hf_shape(shape)), name)
                    if not unpack:
                        writer.add(f"{name}{PACKED}", packed)
                        writer.add(f"{name}{SCALE}", scale)
                        continue
                    tensor = mxfp4.dequantize(packed, scale, tensor.dtype, name).view(shape)
                parts.append(from_megatron(place, name, tensor, spelling))
            if parts:
                writer.add(name, parts[0] if len(parts) == 1 else torch.cat(parts))
        writer.close()
        for path in companions:
            shutil.copyfile(path, folder / path.name)
        (folder / hf_folder.CONFIG).write_text(json.dumps(config, indent=2) + "\n")


# -- the model ---------------------------------------------------------------------------------------------------------


def describe(args: Namespace, manifest_: Mapping[str, Any] | None) -> ModelDescription:
    """The description of a trained model, from its saved arguments.

    Raises:
        ConversionError: for a model that the published checkpoints cannot hold.
    """
    features = set(manifest_["features"]) if manifest_ is not None else set()
    absent = {"kda", "gated-mla"} - features
    if absent:
        raise ConversionError(f"the checkpoint was saved without {', '.join(sorted(absent))}: it is no Kimi model")
    faults = [text for wrong, text in _unconvertible(args, features) if wrong]
    if faults:
        raise ConversionError("the model cannot be converted:\n" + "\n".join(f"  {fault}" for fault in faults))
    experts = args.num_experts is not None
    moe = _moe_pattern(args) if experts else [0] * args.num_layers
    expert_width = (args.moe_ffn_hidden_size or args.ffn_hidden_size) if experts else 0
    latent = "latent-moe" in features
    kda_dim = args.kda_head_dim or args.kv_channels
    config = KimiK3Config(
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        vocab_size=args.vocab_size or args.padded_vocab_size,
        num_attention_heads=args.num_attention_heads,
        q_lora_rank=args.q_lora_rank,
        kv_lora_rank=args.kv_lora_rank,
        qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        v_head_dim=args.v_head_dim,
        mla_output_gate=args.mla_output_gate,
        kda_num_heads=args.kda_num_heads or args.num_attention_heads,
        kda_head_dim=kda_dim,
        kda_value_head_dim=None if args.kda_value_head_dim in (None, kda_dim) else args.kda_value_head_dim,
        kda_conv_kernel_size=args.kda_conv_kernel_size,
        kda_gate=args.kda_gate,
        kda_gate_lower_bound=args.kda_gate_lower_bound,
        kda_output_gate=args.kda_output_gate,
        kda_output_gate_bias=args.kda_output_gate_bias,
        dense_ffn_hidden_size=args.ffn_hidden_size,
        activation="situ" if latent and args.k3_activation == "situ" else "swiglu",
        first_k_dense=moe.index(1) if 1 in moe else 0,
        num_experts=args.num_experts,
        moe_top_k=args.moe_router_topk if experts else 0,
        num_shared_experts=(args.moe_shared_expert_intermediate_size or 0) // expert_width if experts else 0,
        expert_ffn_hidden_size=expert_width,
        moe_latent_size=args.moe_latent_size if latent else None,
        routed_scaling_factor=(args.moe_router_topk_scaling_factor or 1.0) if experts else 1.0,
        attn_res_block_size=args.attn_res_block_size if "attnres" in features else None,
        vision=hf_vision_config.from_arguments(args) if "moonvit" in features else None,
        norm_eps=args.layernorm_epsilon,
        mla_latent_norm_eps=args.mla_latent_norm_eps,
        init_method_std=args.init_method_std,
    )
    return ModelDescription(
        config=config,
        attention_pattern=tuple(args.linear_attention_freq),
        moe_pattern=tuple(moe),
        situ_betas=(args.k3_situ_beta_gate, args.k3_situ_beta_up) if latent else (4.0, 25.0),
        latent_norm=args.moe_latent_norm if latent else True,
        dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
        context_length=args.max_position_embeddings,
    )


def _unconvertible(args: Namespace, features: Collection[str]) -> list[tuple[bool, str]]:
    experts = args.num_experts is not None
    width = args.moe_ffn_hidden_size or args.ffn_hidden_size
    return [
        (not args.swiglu, "its feed-forward networks are not gated (--swiglu)"),
        (args.add_bias_linear, "its linear layers have biases (--disable-bias-linear)"),
        (not args.untie_embeddings_and_output_weights, "its embedding and output layer share their weights"),
        (args.mla_latent_norm_eps != 1e-6, f"--mla-latent-norm-eps is {args.mla_latent_norm_eps}, published is 1e-6"),
        (bool(args.mtp_num_layers), "it has multi-token-prediction layers, which have no published names"),
        (experts and args.moe_router_score_function != "sigmoid", "its router does not use sigmoid scores"),
        (
            experts and not args.moe_router_enable_expert_bias and "quantile-balancing" not in features,
            "its router has no expert bias (quantile-balancing, or --moe-router-enable-expert-bias)",
        ),
        (experts and bool(args.moe_router_num_groups), "its router limits groups"),
        (
            experts and bool((args.moe_shared_expert_intermediate_size or 0) % width),
            "--moe-shared-expert-intermediate-size is no multiple of the expert width",
        ),
    ]


def _moe_pattern(args: Namespace) -> list[int]:
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return [1 if i % frequency == 0 else 0 for i in range(args.num_layers)]
    return list(frequency)


def _original(
    iteration: Path, hf_source: Path | None, saved: ModelDescription, ignore: Sequence[str], pack: bool
) -> tuple[Sequence[Path], Spelling, dict[str, Any]]:
    """Companions, spelling and config: of the given folder, of the conversion, or written anew; ``pack`` says whether
    experts are written packed."""
    if hf_source is not None:
        from k3_plugins.models.kimi_k3 import import_hf

        vision = saved.config.vision is not None
        description, weights, prefix = import_hf.open_folder(hf_source, ignore, vision)
        found = import_hf.match_names(description, weights, prefix, vision)
        spelling = import_hf.read_spelling(found, weights, description, prefix)
        spelling.vision = vision
        folder = hf_source
    else:
        sidecar = hf_folder.read_sidecar(iteration)
        if sidecar is None:
            config = hf_config.write(saved)
            spelling = Spelling(prefix=hf_names.MULTIMODAL_PREFIX if saved.config.vision is not None else "")
            return [], spelling, hf_folder.with_quantization(config, mxfp4.PUBLISHED_FORMAT) if pack else config
        folder, spelling = sidecar
    config = hf_folder.read_json(folder / hf_folder.CONFIG)
    if not spelling.vision:
        config = hf_folder.without_vision(config)
    # Unknown fields were refused or accepted already, when the folder was opened or imported.
    accepted = {*config, *hf_config.language_model(config)}
    accepted |= {f"vision_config.{name}" for name in config.get("vision_config") or ()}
    original, _ = hf_config.read(config, ignore=accepted, output_gate_bias=saved.config.kda_output_gate_bias)
    changed = hf_config.differences(original, saved)
    if changed:
        raise ConversionError(
            f"{folder / hf_folder.CONFIG} and the checkpoint's arguments describe two models (config, checkpoint):\n"
            + "\n".join(f"  {line}" for line in changed)
        )
    if pack:
        config = hf_folder.with_quantization(config, mxfp4.PUBLISHED_FORMAT)
    elif spelling.unpacked:
        config = hf_folder.without_quantization(config)
        print("MXFP4 weights are written unpacked; quantization_config is left out of config.json", flush=True)
    return hf_folder.companions(folder), spelling, config


# -- the tensors -------------------------------------------------------------------------------------------------------


def plan(
    description: ModelDescription, spelling: Spelling, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[Place, str, tuple[int, ...], tuple[int, ...]]]:
    """Every tensor to write: its place, name, and box in the checkpoint.

    Raises:
        ConversionError: listing weights that are missing from the checkpoint, and weights that have no name.
    """
    boxes, missing = [], set()
    for place in hf_names.places(description, spelling.prefix):
        if place.key not in shapes:
            missing.add(place.key)
            continue
        name = place.others[0] if place.entry.hf in spelling.also else place.hf
        boxes.append((place, name, *place.box(shapes[place.key], description.config.vocab_size)))
    used = {place.key for place, *_ in boxes}
    unexpected = [
        key
        for key in shapes
        if key not in used and not hf_names.STATISTICS.fullmatch(key) and not NOT_THE_MODEL.fullmatch(key)
    ]
    hf_names.refuse_unknown((), sorted(missing), unexpected)
    short = [
        f"{place.key} holds {shapes[place.key]}, not {description.config.num_experts} experts"
        for place, *_ in boxes
        if place.expert is not None and shapes[place.key][0] != description.config.num_experts
    ]
    if short:
        raise ConversionError("\n".join(dict.fromkeys(short)))
    return boxes


def from_megatron(place: Place, name: str, box: Tensor, spelling: Spelling) -> Tensor:
    """A box as the Hugging Face tensor it stands for."""
    entry = place.entry.hf
    dtype = spelling.other_dtypes.get(name) or spelling.dtypes.get(entry)
    if dtype is not None:
        box = box.to(getattr(torch, dtype))
    shape = spelling.shapes.get(entry)
    if shape is None:
        if place.entry.form == "heads" and not spelling.prefix:
            return box.reshape(1, 1, -1, 1)  # as Kimi-Linear is published; K3 (with its prefix) has one axis
        return box.reshape(place.hf_shape(tuple(box.shape)))
    if place.entry.form == "heads" and prod(shape) > box.numel():
        box = torch.cat([box, box.new_zeros(prod(shape) - box.numel())])
    return box.reshape(shape)
