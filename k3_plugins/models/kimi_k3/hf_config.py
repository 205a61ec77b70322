"""Hugging Face ``config.json`` of Kimi-Linear and Kimi-K3 <-> the model's description.

    read(values) -> (ModelDescription, notes)        # every field is used, checked, known to be harmless, or an error
    write(description) -> values                     # in the published form

Two forms exist: the published one (``linear_attn_config`` with 1-indexed layer lists, ``first_k_dense_replace``) and
the one that ``transformers`` saves (``layer_types``, ``mlp_layer_types``, ``linear_*``). A K3 config nests the language
model's fields in ``text_config``. A field that is not known here may change the model, so it is refused, not skipped.

This module imports neither torch nor megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from k3_plugins.models.kimi_k3 import hf_vision_config
from k3_plugins.models.kimi_k3.config import KimiK3Config, expert_pattern
from k3_plugins.models.kimi_k3.hf_fields import FieldReader, is_among, is_number, shown
from k3_plugins.transformer.kda.pattern import full_attention_pattern
from k3_plugins.vision.moonvit.config import MoonViTConfig


class ConversionError(Exception):
    """A checkpoint that cannot be converted as it is; the text says what is wrong with it and what to do."""


@dataclass(frozen=True)
class ModelDescription:
    """What a checkpoint's config says: the sizes, and the layer patterns written out."""

    config: KimiK3Config
    attention_pattern: tuple[int, ...]
    """1 for KDA, 0 for full attention, layer by layer."""
    moe_pattern: tuple[int, ...]
    """1 for a mixture of experts, 0 for dense, layer by layer."""
    situ_betas: tuple[float, float] = (4.0, 25.0)
    """SiTU's bounds of the gate and the up branch."""
    latent_norm: bool = True
    """RMSNorm on the combined latent expert output."""
    dtype: str = "float32"
    """Element type of the weights: float32, bfloat16 or float16."""
    context_length: int = 4096
    """Longest sequence the config names."""

    @property
    def features(self) -> tuple[str, ...]:
        """The features of ``--k3-plugins`` that build this model."""
        needed = ["kda", "gated-mla"]
        if self.config.attn_res_block_size is not None:
            needed.append("attnres")
        if self.config.moe_latent_size is not None or self.config.activation == "situ":
            needed.append("latent-moe")
        if self.config.vision is not None:
            needed.append("moonvit")
        return tuple(needed)

    def arguments(self) -> dict[str, Any]:
        """Values of Megatron's and the features' flags, by argparse destination."""
        values = self.config.argument_defaults(self.features)
        values["linear_attention_freq"] = list(self.attention_pattern)
        if self.config.num_experts is not None:
            values["moe_layer_freq"] = list(self.moe_pattern)
        if "latent-moe" in self.features:
            values |= {
                "k3_activation": self.config.activation,
                "k3_situ_beta_gate": self.situ_betas[0],
                "k3_situ_beta_up": self.situ_betas[1],
                "moe_latent_norm": self.latent_norm,
                "moe_latent_norm_eps": self.config.norm_eps,
            }
        return {name: value for name, value in values.items() if value is not None}


# -- the fields --------------------------------------------------------------------------------------------------------

SIZES = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "vocab_size": "vocab_size",
    "num_attention_heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "intermediate_size": "dense_ffn_hidden_size",
    "rms_norm_eps": "norm_eps",
}
"""Required fields of the config -> fields of the description. Whole numbers from 1, but for the two tables below."""

EXPERT_SIZES = {
    "num_experts": "num_experts",
    "num_experts_per_token": "moe_top_k",
    "num_shared_experts": "num_shared_experts",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "routed_scaling_factor": "routed_scaling_factor",
}
"""The same for a mixture of experts; required when ``num_experts`` is there."""

OPTIONAL_SIZES = {
    "q_lora_rank": "q_lora_rank",
    "routed_expert_hidden_size": "moe_latent_size",
    "attn_res_block_size": "attn_res_block_size",
    "initializer_range": "init_method_std",
}
"""Fields that may be absent or null."""

FACTORS = frozenset(("rms_norm_eps", "routed_scaling_factor", "initializer_range"))
"""Of the fields above, those that are positive numbers of any kind."""

COUNTS = frozenset(("num_shared_experts",))
"""Of the fields above, those that may be 0."""

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "mla_use_nope": ((True,), "full attention here has no rotary embedding"),
    "rope_scaling": ((None,), "there is no rotary embedding to scale"),
    "rope_parameters": ((None,), "there is no rotary embedding"),
    "attention_bias": ((False,), "the projections have no biases"),
    "attention_dropout": ((0, 0.0), "published models have none; --attention-dropout can be set for training"),
    "tie_word_embeddings": ((False,), "the output layer has weights of its own"),
    "moe_router_activation_func": (("sigmoid",), "the router's scores are sigmoids"),
    "moe_renormalize": ((True,), "routing weights are renormalised over the chosen experts"),
    "moe_layer_freq": ((1,), "after the first dense layers every layer is a mixture of experts"),
    "topk_method": (("noaux_tc",), "experts are chosen by biased scores"),
    "num_expert_group": ((1, None), "group-limited routing is not part of the model"),
    "topk_group": ((1, None), "group-limited routing is not part of the model"),
    "num_nextn_predict_layers": ((0, None), "multi-token prediction layers have no names to convert"),
    "pretraining_tp": ((1, None), "sliced linear layers are not part of the model"),
}
"""Fields that describe something this model has one form of: accepted values, and why."""

HARMLESS = frozenset(
    """architectures auto_map bos_token_id eos_token_id pad_token_id transformers_version use_cache
    output_router_logits head_dim qk_head_dim rope_theta use_grouped_topk _name_or_path return_dict output_attentions
    output_hidden_states torch_dtype dtype model_type quantization_config media_placeholder_token_id
    ignore_index _commit_hash id2label label2id problem_type is_encoder_decoder chunk_size_feed_forward""".split()
)
"""Fields that do not change what the weights compute (``rope_theta``: there is no rotation; ``head_dim`` and
``qk_head_dim`` repeat other fields; ``quantization_config`` says how weights are packed, which their names show)."""

PATTERN_FIELDS = frozenset(
    """linear_attn_config layer_types mlp_layer_types first_k_dense_replace linear_head_dim linear_num_heads
    linear_conv_kernel_dim num_key_value_heads hidden_act activation_situ_beta activation_situ_linear_beta
    mla_use_output_gate latent_moe_use_norm model_max_length max_position_embeddings""".split()
)
"""Fields that are read one by one below."""

LINEAR_ATTENTION_FIELDS = frozenset(
    "kda_layers full_attn_layers num_heads head_dim short_conv_kernel_size gate_lower_bound use_full_rank_gate".split()
)

ACTIVATIONS: dict[str, Literal["swiglu", "situ"]] = {"silu": "swiglu", "swish": "swiglu", "situ": "situ"}
DTYPES = ("float32", "bfloat16", "float16")


# -- reading -----------------------------------------------------------------------------------------------------------


def _entry(reader: FieldReader, name: str, required: bool = False) -> Any:
    """A field of the tables of sizes."""
    if name in FACTORS:
        return reader.factor(name, required=required)
    return reader.size(name, required, smallest=0 if name in COUNTS else 1)


def language_model(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's fields: ``text_config`` of a multimodal config, or the config itself."""
    nested = values.get("text_config")
    return nested if isinstance(nested, Mapping) else values


def read(
    values: Mapping[str, Any], ignore: Iterable[str] = (), output_gate_bias: bool = False
) -> tuple[ModelDescription, list[str]]:
    """The description of a model from its ``config.json``.

    Args:
        values: the parsed file.
        ignore: unknown fields that the user declares harmless.
        output_gate_bias: whether the checkpoint has ``g_b_proj.bias``, which no field tells.

    Returns:
        the description, and notes for the user: the fields that were not used.

    Raises:
        ConversionError: listing everything that is missing, contradictory, unsupported or unknown.
    """
    ignored = frozenset(ignore)
    text = language_model(values)
    reader = FieldReader(text)
    outer = set() if text is values else set(values) - {"text_config", "vision_config"} - HARMLESS
    if text is not values:
        outer -= {name for name in outer if name in FIXED and is_among(values[name], FIXED[name][0])}
    linear = reader.get("linear_attn_config", dict, {})
    _check_unknown(reader, linear, outer, ignored)
    vision = None
    if values.get("vision_config") is not None and text is not values:
        vision = hf_vision_config.read(values, text.get("hidden_size"), ignored, reader)
    for name, (accepted, why) in FIXED.items():
        if name in text and not is_among(text[name], accepted):
            reader.faults.append(f"{name} is {shown(text[name])}, only {accepted[0]!r} can be converted: {why}")

    sizes = {ours: _entry(reader, name, required=True) for name, ours in SIZES.items()}
    sizes |= {ours: _entry(reader, name) for name, ours in OPTIONAL_SIZES.items()}
    if text.get("num_experts") is not None:
        sizes |= {ours: _entry(reader, name, required=True) for name, ours in EXPERT_SIZES.items()}
        experts, chosen = sizes["num_experts"], sizes["moe_top_k"]
        if experts and chosen and chosen > experts:
            reader.faults.append(f"num_experts_per_token is {chosen}, and there are only {experts} experts")
    heads = text.get("num_key_value_heads")
    if heads is not None and not is_among(heads, (sizes["num_attention_heads"],)):
        reader.faults.append(
            f"num_key_value_heads is {shown(heads)}, not num_attention_heads: MLA has no grouped heads"
        )
    activation = reader.get("hidden_act", str, "silu")
    if activation not in ACTIVATIONS:
        reader.faults.append(f"hidden_act is {activation!r}; known are {', '.join(ACTIVATIONS)}")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or values.get("dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        reader.faults.append(f"dtype is {dtype!r}; known are {', '.join(DTYPES)}")
    lengths = [reader.size(name) for name in ("model_max_length", "max_position_embeddings")]
    situ_betas = (reader.factor("activation_situ_beta", 4.0), reader.factor("activation_situ_linear_beta", 25.0))
    latent_norm = reader.get("latent_moe_use_norm", bool, True)
    output_gate = reader.get("mla_use_output_gate", bool, False)

    sizes |= _linear_attention(reader, linear)
    layers = sizes["num_layers"]
    attention = _attention_pattern(reader, linear, layers) if layers else []
    moe = _moe_pattern(reader, layers, "num_experts" in sizes) if layers else []
    if reader.faults:
        listing = "\n".join(f"  - {fault}" for fault in reader.faults)
        raise ConversionError(f"config.json cannot be converted:\n{listing}")

    period = next((p for p in range(1, layers + 1) if full_attention_pattern(layers, p) == attention), 4)
    config = KimiK3Config(
        **{name: value for name, value in sizes.items() if value is not None},
        vision=vision,
        mla_output_gate=output_gate,
        kda_output_gate_bias=output_gate_bias,
        activation=ACTIVATIONS[activation],
        first_k_dense=moe.index(1) if 1 in moe else 0,
        full_attention_period=period,
    )
    description = ModelDescription(
        config=config,
        attention_pattern=tuple(attention),
        moe_pattern=tuple(moe),
        situ_betas=situ_betas,
        latent_norm=latent_norm,
        dtype=dtype,
        context_length=next((length for length in lengths if length), 4096),
    )
    return description, reader.notes


def _check_unknown(reader: FieldReader, linear: Mapping[str, Any], outer: set[str], ignored: frozenset[str]) -> None:
    """Report every field that nothing reads; an unknown one is a fault unless the user declared it harmless."""
    known = SIZES.keys() | EXPERT_SIZES.keys() | OPTIONAL_SIZES.keys() | FIXED.keys() | PATTERN_FIELDS
    unknown = set(reader.values) - known - HARMLESS
    unknown |= {f"linear_attn_config.{name}" for name in set(linear) - LINEAR_ATTENTION_FIELDS}
    unknown |= outer - HARMLESS
    for name in sorted(unknown):
        if name in ignored:
            reader.notes.append(f"{name}: unknown, ignored as asked")
        else:
            reader.faults.append(
                f"{name} is a field this converter does not know; it may change the model. If it does not, pass "
                f"--ignore-config-field {name}"
            )
    skipped = sorted(set(reader.values) & HARMLESS - {"dtype", "torch_dtype"})
    if skipped:
        reader.notes.append(f"not used (they do not change what the weights compute): {', '.join(skipped)}")


def _linear_attention(reader: FieldReader, linear: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and gates of the KDA layers."""
    sizes: dict[str, Any] = {}
    for ours, published, saved in (
        ("kda_num_heads", "num_heads", "linear_num_heads"),
        ("kda_head_dim", "head_dim", "linear_head_dim"),
        ("kda_conv_kernel_size", "short_conv_kernel_size", "linear_conv_kernel_dim"),
    ):
        if published in linear:
            sizes[ours] = reader.checked_size(f"linear_attn_config.{published}", linear[published])
        elif reader.values.get(saved) is not None:
            sizes[ours] = reader.size(saved)
        else:
            reader.faults.append(f"linear_attn_config.{published} (or {saved}) is missing")
    bound = linear.get("gate_lower_bound")
    sizes["kda_gate"] = "softplus" if bound is None else "bounded"
    if bound is not None:
        if not (is_number(bound) and bound < 0):
            reader.faults.append(f"linear_attn_config.gate_lower_bound is {shown(bound)}, not a number below 0")
        else:
            sizes["kda_gate_lower_bound"] = float(bound)
    full_rank = linear.get("use_full_rank_gate")
    if not is_among(full_rank, (True, False, None)):
        reader.faults.append(f"linear_attn_config.use_full_rank_gate is {shown(full_rank)}, not true or false")
    sizes["kda_output_gate"] = "full-rank" if full_rank else "low-rank"
    return sizes


def _attention_pattern(reader: FieldReader, linear: Mapping[str, Any], layers: int) -> list[int]:
    """1 for KDA, 0 for full attention, from the 1-indexed lists or from ``layer_types``."""
    if reader.values.get("layer_types") is not None:
        return _kinds_of_layers(reader, "layer_types", {"linear_attention": 1, "full_attention": 0}, layers)
    if "kda_layers" not in linear or "full_attn_layers" not in linear:
        reader.faults.append("neither layer_types nor linear_attn_config.kda_layers and .full_attn_layers are there")
        return []
    lists = linear["kda_layers"], linear["full_attn_layers"]
    if not all(type(item) is list and all(type(layer) is int for layer in item) for item in lists):
        reader.faults.append("linear_attn_config.kda_layers and .full_attn_layers must be lists of layer numbers")
        return []
    kda, full = map(set, lists)
    outside = sorted(layer for layer in kda | full if not 1 <= layer <= layers)
    twice = sorted(kda & full)
    absent = layers - len((kda | full) - set(outside))
    if outside or twice or absent:
        reader.faults.append(
            f"linear_attn_config.kda_layers and .full_attn_layers must name every layer from 1 to {layers} exactly "
            f"once; in both: {shown(twice)}, no layers: {shown(outside)}, not named: {absent}"
        )
        return []
    return [1 if layer in kda else 0 for layer in range(1, layers + 1)]


def _moe_pattern(reader: FieldReader, layers: int, experts: bool) -> list[int]:
    if not experts:
        return [] if reader.faults else expert_pattern(layers, layers)
    if reader.values.get("mlp_layer_types") is not None:
        return _kinds_of_layers(reader, "mlp_layer_types", {"sparse": 1, "dense": 0}, layers)
    dense = reader.size("first_k_dense_replace", required=True, smallest=0)
    # With faults there is no model to describe, and its number of layers may be nonsense.
    return [] if reader.faults or dense is None else expert_pattern(layers, dense)


def _kinds_of_layers(reader: FieldReader, name: str, kinds: Mapping[str, int], layers: int) -> list[int]:
    named = reader.get(name, list, [])
    if len(named) != layers or not all(type(kind) is str and kind in kinds for kind in named):
        reader.faults.append(f"{name} must name {' or '.join(kinds)} for each of the {layers} layers")
        return []
    return [kinds[kind] for kind in named]


# -- writing -----------------------------------------------------------------------------------------------------------


def write(description: ModelDescription) -> dict[str, Any]:
    """The published form of the config; ``read`` of it gives the description back.

    Raises:
        ConversionError: for a model that the published form cannot describe.
    """
    config = description.config
    dense = config.first_k_dense if config.num_experts is not None else config.num_layers
    if list(description.moe_pattern) != expert_pattern(config.num_layers, dense):
        raise ConversionError(
            f"dense and mixture-of-experts layers {list(description.moe_pattern)} are not 'the first so many are "
            "dense', which is all that first_k_dense_replace can say"
        )
    if config.kda_value_head_dim not in (None, config.kda_head_dim):
        raise ConversionError("--kda-value-head-dim differs from --kda-head-dim; the published config has one head_dim")
    pattern = description.attention_pattern
    linear: dict[str, Any] = {
        "kda_layers": [i + 1 for i, kda in enumerate(pattern) if kda],
        "full_attn_layers": [i + 1 for i, kda in enumerate(pattern) if not kda],
        "num_heads": config.kda_num_heads,
        "head_dim": config.kda_head_dim,
        "short_conv_kernel_size": config.kda_conv_kernel_size,
    }
    if config.kda_gate == "bounded":
        linear["gate_lower_bound"] = config.kda_gate_lower_bound
    if config.kda_output_gate == "full-rank":
        linear["use_full_rank_gate"] = True
    values: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": description.dtype,
        "hidden_act": "situ" if config.activation == "situ" else "silu",
        "linear_attn_config": linear,
        "mla_use_nope": True,
        "num_key_value_heads": config.num_attention_heads,
        "model_max_length": description.context_length,
        "tie_word_embeddings": False,
        # A config that leaves them out has those of the published vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    values |= {name: getattr(config, ours) for name, ours in SIZES.items()}
    values |= {name: getattr(config, ours) for name, ours in OPTIONAL_SIZES.items() if name != "q_lora_rank"}
    values["q_lora_rank"] = config.q_lora_rank
    if config.num_experts is not None:
        values |= {name: getattr(config, ours) for name, ours in EXPERT_SIZES.items()}
        values |= {
            "first_k_dense_replace": dense,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_expert_group": 1,
            "topk_group": 1,
        }
    if config.mla_output_gate:
        values["mla_use_output_gate"] = True
    if config.activation == "situ":
        values["activation_situ_beta"], values["activation_situ_linear_beta"] = description.situ_betas
    if config.moe_latent_size is not None:
        values["latent_moe_use_norm"] = description.latent_norm
    absent = ("routed_expert_hidden_size", "attn_res_block_size")
    values = {name: value for name, value in values.items() if value is not None or name not in absent}
    if config.vision is None:
        return values
    if config.vision.moonvit_norm_eps != MoonViTConfig.moonvit_norm_eps:
        raise ConversionError(
            f"--moonvit-norm-eps is {config.vision.moonvit_norm_eps:g}; the published config has no field for it, and"
            f" readers take {MoonViTConfig.moonvit_norm_eps:g}"
        )
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": description.dtype,
        "text_config": values,
        "vision_config": hf_vision_config.write(config.vision, config.hidden_size),
        "tie_word_embeddings": False,
    }


def differences(one: ModelDescription, other: ModelDescription) -> list[str]:
    """Fields in which two descriptions disagree about what the weights compute, as ``name: a, b``."""
    training_only = {"init_method_std", "required_features", "full_attention_period", "vision"}
    found = hf_vision_config.differences(one.config.vision, other.config.vision) + [
        f"{item.name}: {getattr(one.config, item.name)!r}, {getattr(other.config, item.name)!r}"
        for item in fields(KimiK3Config)
        if item.name not in training_only and getattr(one.config, item.name) != getattr(other.config, item.name)
    ]
    return found + [
        f"{item.name}: {getattr(one, item.name)!r}, {getattr(other, item.name)!r}"
        for item in fields(ModelDescription)
        if item.name not in ("config", "dtype", "context_length")
        and getattr(one, item.name) != getattr(other, item.name)
    ]
