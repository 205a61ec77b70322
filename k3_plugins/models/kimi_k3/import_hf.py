"""Hugging Face folder -> Megatron distributed checkpoint, tensor by tensor."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3_plugins import features as feature_list
from k3_plugins import manifest
from k3_plugins.data.tokenizers import PADDING_MULTIPLE
from k3_plugins.models.kimi_k3 import hf_config, hf_folder, hf_names
from k3_plugins.models.kimi_k3.hf_config import ConversionError, ModelDescription
from k3_plugins.models.kimi_k3.hf_folder import Spelling
from k3_plugins.models.kimi_k3.hf_names import Place
from k3_plugins.models.kimi_k3.safetensors_files import Weights

RELEASE = "release"


def import_checkpoint(
    source: Path, target: Path, ignore: Sequence[str] = (), vision: bool = True
) -> list[str]:
    """Convert a folder.

    Args:
        source: ``config.json`` and safetensors.
        target: checkpoint folder for ``--load``; must not exist.
        ignore: fields of ``config.json`` that the user declares harmless.
        vision: False leaves a vision tower and its projector out.

    Returns:
        the words of the flag line that loads the checkpoint.

    Raises:
        ConversionError: listing everything that does not fit. The target then does not exist.
    """
    with hf_folder.new_folder(target) as folder:
        description, weights, prefix = open_folder(source, ignore, vision)
        found = match_names(description, weights, prefix, vision)
        spelling = read_spelling(found, weights, description, prefix)
        spelling.vision = vision
        _refuse_missing_features(description)

        from k3_plugins.models.kimi_k3 import megatron_session

        values = run_values(description)
        activation = megatron_session.open_door(description.features, "cpu", "k3_plugins.models.kimi_k3.convert")
        args = megatron_session.initialize(activation, values)
        layout = megatron_session.expected_layout(args)
        boxes = check_layout(found, layout.tensors, weights, description)

        iteration = folder / RELEASE
        iteration.mkdir()
        _write(iteration, boxes, layout, weights, description, args, _tokenizer(source, target))
        hf_folder.write_sidecar(source, iteration, spelling)
        manifest.write(iteration, activation, 0)
        (folder / manifest.TRACKER).write_text(RELEASE)
    printed = values | _tokenizer(source, target)
    words = megatron_session.words({name: value for name, value in printed.items() if value is not None})
    features = ",".join(description.features)
    return ["--k3-plugins", features, *words, "--ckpt-format", "torch_dist", "--load", str(target)]


def open_folder(
    source: Path, ignore: Sequence[str] = (), vision: bool = True
) -> tuple[ModelDescription, Weights, str]:
    """The description, the weights and the prefix of the names; prints what of the config was not used."""
    config = hf_folder.read_json(source / hf_folder.CONFIG)
    if not vision:
        config = hf_folder.without_vision(config)
    text = hf_config.language_model(config)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "float32")
    weights = Weights(source, getattr(torch, dtype.removeprefix("torch."), torch.float32))
    names = weights.names
    prefix = hf_names.MULTIMODAL_PREFIX if any(name.startswith(hf_names.MULTIMODAL_PREFIX) for name in names) else ""
    bias = any(name.endswith(".self_attn.g_b_proj.bias") for name in names)
    description, notes = hf_config.read(config, ignore, output_gate_bias=bias)
    for note in notes:
        print(f"config.json: {note}", flush=True)
    return description, weights, prefix


def _refuse_missing_features(description: ModelDescription) -> None:
    available = {entry.name for entry in feature_list.available()}
    missing = [name for name in description.features if name not in available]
    if missing:
        raise ConversionError(
            f"this model needs {', '.join(missing)}, which this version of k3_plugins does not have as a feature of "
            "--k3-plugins; its weights would have nowhere to go"
        )


def match_names(
    description: ModelDescription, weights: Weights, prefix: str, vision: bool = True
) -> list[tuple[Place, str]]:
    """Every tensor of the model with the name it was found under, in the order of the files.

    Args:
        vision: False does not look at the tensors of a vision tower.

    Raises:
        ConversionError: listing missing and unexpected names.
    """
    names = {name for name in weights.names if vision or not name.startswith(hf_names.VISION)}
    found, missing = [], []
    for place in hf_names.places(description, prefix):
        name = next((name for name in (place.hf, *place.others) if name in names), None)
        if name is None:
            missing.append(place.hf)
        else:
            found.append((place, name))
    unexpected = names - {name for _, name in found}
    hf_names.refuse_unknown(names, missing, sorted(unexpected))
    return sorted(found, key=lambda pair: weights.position(pair[1]))


def read_spelling(
    found: Sequence[tuple[Place, str]], weights: Weights, description: ModelDescription, prefix: str
) -> Spelling:
    """What has to be remembered for the way back; checks the padding of ``A_log``.

    Raises:
        ConversionError: for padding that is not zero, or shapes of one kind that differ between layers.
    """
    spelling = Spelling(prefix=prefix, unpacked=bool(weights.packed))
    for place, name in found:
        entry = place.entry.hf
        if name in place.others and entry not in spelling.also:
            spelling.also.append(entry)
        dtype = weights.dtype_of(name)
        if spelling.dtypes.setdefault(entry, dtype) != dtype:
            spelling.other_dtypes[name] = dtype
        if place.entry.form not in ("heads", "row"):
            continue
        shape = list(weights.shape(name))
        if spelling.shapes.setdefault(entry, shape) != shape:
            raise ConversionError(f"{name} has shape {shape}, in another layer it is {spelling.shapes[entry]}")
        if place.entry.form == "heads":
            _check_padding(name, weights.read(name), description.config.kda_num_heads)
    return spelling


def _check_padding(name: str, tensor: Tensor, heads: int) -> None:
    padding = tensor.flatten()[heads:]
    wrong = int(padding.count_nonzero())
    if wrong:
        raise ConversionError(
            f"{name} has {tensor.numel()} entries for {heads} heads, and {wrong} of the {padding.numel()} that pad it "
            "are not zero: they would be lost. Check num_heads in config.json"
        )


def run_values(description: ModelDescription) -> dict[str, Any]:
    """Values of the flags that the description does not hold: context, vocabulary, precision."""
    vocab = description.config.vocab_size
    length = min(description.context_length, 4096)
    return description.arguments() | {
        "seq_length": length,
        "max_position_embeddings": length,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": vocab,
        "padded_vocab_size": -(-vocab // PADDING_MULTIPLE) * PADDING_MULTIPLE,
        "bf16": description.dtype == "bfloat16",
        "fp16": description.dtype == "float16",
    }


def _tokenizer(source: Path, target: Path) -> dict[str, Any]:
    """Flags of the tokenizer that came with the weights, as it lies in the finished checkpoint."""
    if not hf_folder.has_tokenizer(source):
        return {}
    folder = target.absolute() / RELEASE / hf_folder.SIDECAR_FOLDER
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder), "vocab_size": None}


Boxes = list[tuple[Place, str, tuple[int, ...], tuple[int, ...]]]


def check_layout(
    found: Sequence[tuple[Place, str]],
    tensors: Mapping[str, tuple[int, ...]],
    weights: Weights,
    description: ModelDescription,
) -> Boxes:
    """The box of every tensor in the model's own tensors: (place, name, offset, shape).

    Raises:
        ConversionError: for shapes that do not fit, and model tensors that no Hugging Face tensor fills.
    """
    boxes, faults = [], []
    for place, name in found:
        if place.key not in tensors:
            faults.append(f"{name}: the model has no {place.key}")
            continue
        offset, shape = place.box(tensors[place.key], description.config.vocab_size)
        if not place.fits(weights.shape(name), shape):
            faults.append(f"{name} has shape {weights.shape(name)}, the config asks for {place.whole_shape(shape)}")
        boxes.append((place, name, offset, shape))
    filled = {place.key for place, _ in found}
    empty = [key for key in tensors if key not in filled and not hf_names.STATISTICS.fullmatch(key)]
    faults += [f"nothing fills the model's {key}" for key in empty]
    if faults:
        more = [f"... and {len(faults) - 40} more"] if len(faults) > 40 else []
        raise ConversionError("\n  ".join(["the tensors do not fit the model:", *faults[:40], *more]))
    return boxes


def to_megatron(place: Place, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A Hugging Face tensor as the box it fills."""
    if place.entry.form == "heads":
        tensor = tensor.flatten()[: shape[0]]
    return tensor.reshape(tuple(shape))


def _write(
    iteration: Path,
    boxes: Boxes,
    layout: Any,
    weights: Weights,
    description: ModelDescription,
    args: Any,
    tokenizer: Mapping[str, Any],
) -> None:
    from k3_plugins.models.kimi_k3.dist_checkpoint import COMMON_STATE, BoxWriter

    writer = BoxWriter(iteration)
    for place, name, offset, shape in boxes:
        whole = layout.tensors[place.key]
        box = to_megatron(place, place.rows(weights.read(name)), shape)
        writer.tensor(place.key, whole, offset, box)
        padding = whole[0] - description.config.vocab_size
        if place.entry.form == "vocabulary" and padding:
            writer.tensor(place.key, whole, (whole[0] - padding, 0), box.new_zeros(padding, whole[1]))
    for key, whole in layout.tensors.items():
        if hf_names.STATISTICS.fullmatch(key):
            writer.tensor(key, whole, (0,) * len(whole), torch.zeros(whole))
    for key, value in layout.objects.items():
        writer.object(key, value)
    saved = copy.copy(args)
    for name, value in tokenizer.items():
        if value is not None:  # vocab_size stays: it says where the padding of the embedding begins
            setattr(saved, name, value)
    common = {
        "args": saved,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": layout.metadata,
    }
    writer.object(COMMON_STATE, common)
    writer.close()

