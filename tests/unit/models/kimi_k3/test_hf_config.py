"""``config.json`` <-> the model's description: both forms, every field accounted for, contradictions refused."""

import dataclasses

import pytest

from k3_plugins.models.kimi_k3 import hf_config
from k3_plugins.models.kimi_k3.config import KIMI_K3, KIMI_K3_SMALL, KIMI_LINEAR, expert_pattern
from k3_plugins.models.kimi_k3.hf_config import ConversionError, ModelDescription
from tests.unit.models.kimi_k3 import small_k3

# Fields and values of the published Kimi-Linear-48B-A3B configuration.
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_published_config_is_the_preset():
    description, notes = hf_config.read(PUBLISHED)
    assert description.config == KIMI_LINEAR
    assert description.attention_pattern == tuple(KIMI_LINEAR.attention_pattern)
    assert description.moe_pattern == (0,) + (1,) * 26
    assert description.dtype == "bfloat16" and description.features == ("kda", "gated-mla")
    # Fields that are not used are named.
    assert all(name in notes[-1] for name in ("rope_theta", "head_dim", "auto_map"))


# Fields and values of the published Kimi-K3 vision_config.
PUBLISHED_VISION = {
    **small_k3.CONFIG["vision_config"],
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "mm_hidden_size": 1024,
    "patch_size": 14,
    "qkv_hidden_size": 1536,
    "text_hidden_size": 7168,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "vt_num_attention_heads": 12,
    "vt_num_hidden_layers": 27,
}


def k3_description(vision=None):
    return ModelDescription(
        config=dataclasses.replace(KIMI_K3, required_features=("kda", "gated-mla"), vision=vision),
        attention_pattern=tuple(KIMI_K3.attention_pattern),
        moe_pattern=tuple(expert_pattern(93, 1)),
        dtype="bfloat16",
        context_length=1 << 20,
    )


@pytest.mark.parametrize(
    "description",
    [
        hf_config.read(PUBLISHED)[0],
        k3_description(),
        dataclasses.replace(k3_description(), situ_betas=(3.0, 20.0), latent_norm=False),
        dataclasses.replace(k3_description(), attention_pattern=(0,) * 46 + (1,) * 47),
        k3_description(KIMI_K3.vision),
        k3_description(
            dataclasses.replace(KIMI_K3_SMALL.vision, moonvit_projector_norm="pre", moonvit_interpolation="bicubic")
        ),
    ],
    ids=["kimi-linear", "k3", "k3 other activation", "other pattern", "k3 with vision", "another encoder"],
)
def test_written_and_read_it_is_the_same(description):
    values = hf_config.write(description)
    again, _ = hf_config.read(values)
    assert hf_config.differences(again, description) == []
    assert (again.dtype, again.context_length) == (description.dtype, description.context_length)
    if description.config.vision is None:
        nested, _ = hf_config.read({"model_type": "kimi_k3", "text_config": values})
        assert nested == again


def with_vision(**changes):
    vision = {name: value for name, value in {**PUBLISHED_VISION, **changes}.items() if value is not None}
    return {"text_config": hf_config.write(k3_description()), "vision_config": vision}


def test_the_published_vision_config_is_the_preset():
    description, _ = hf_config.read(with_vision())
    assert description.config.vision == KIMI_K3.vision
    assert description.features == ("kda", "gated-mla", "attnres", "latent-moe", "moonvit")
    assert description.arguments()["moonvit_head_dim"] == 128
    again, _ = hf_config.read(hf_config.write(description))
    assert hf_config.differences(description, again) == []
    other, _ = hf_config.read(with_vision(vt_num_hidden_layers=26))
    assert hf_config.differences(description, other) == ["moonvit_num_layers: 27, 26"]
    text_alone, _ = hf_config.read(with_vision()["text_config"])
    assert hf_config.differences(description, text_alone) == ["vision encoder: MoonViT-V2, none"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vt_hidden_size": None}, "vision_config.vt_hidden_size is missing"),
        ({"vt_num_hidden_layers": 2.5}, "vision_config.vt_num_hidden_layers is 2.5, not a whole number"),
        ({"norm_type": None}, "vision_config.norm_type is missing; only 'rmsnorm' can be converted"),
        ({"norm_type": "layernorm"}, "vision_config.norm_type is 'layernorm'"),
        ({"attn_bias": True}, "vision_config.attn_bias is True"),
        ({"merge_kernel_size": [4, 4]}, "vision_config.merge_kernel_size is [4, 4]"),
        ({"qkv_hidden_size": 1530}, "qkv_hidden_size 1530 is not vt_num_attention_heads 12 times a multiple of 4"),
        ({"init_pos_emb_width": 32}, "the table must be square"),
        ({"pos_emb_interpolation_mode": "nearest"}, "pos_emb_interpolation_mode is 'nearest'"),
        ({"mm_projector_type": "linear"}, "mm_projector_type is 'linear'; known are patchmergerv2, patchmerger"),
        ({"text_hidden_size": 4096}, "vision_config.text_hidden_size is 4096, and the model has 7168"),
        ({"deepstack": [3]}, "vision_config.deepstack is a field this converter does not know"),
    ],
)
def test_vision_configs_that_cannot_be_converted_are_named(changes, says):
    with pytest.raises(ConversionError) as error:
        hf_config.read(with_vision(**changes))
    assert says in str(error.value)


def test_an_unknown_field_of_the_vision_config_can_be_declared_harmless():
    assert hf_config.read(with_vision(deepstack=[3]), ignore=["vision_config.deepstack"])
    with pytest.raises(ConversionError, match="vision_config is 3, not a table of fields"):
        hf_config.read({**with_vision(), "vision_config": 3})


def test_norms_that_the_published_config_cannot_describe_are_refused():
    vision = dataclasses.replace(KIMI_K3.vision, moonvit_norm_eps=1e-5)
    with pytest.raises(ConversionError, match="--moonvit-norm-eps is 1e-05; the published config has no field"):
        hf_config.write(k3_description(vision))


def test_k3_needs_its_features():
    assert k3_description().features == ("kda", "gated-mla", "attnres", "latent-moe")


def test_layer_lists_count_from_one():
    description, _ = hf_config.read(PUBLISHED)
    assert [i for i, kda in enumerate(description.attention_pattern) if not kda] == [3, 7, 11, 15, 19, 23, 26]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sliding_window": 4096}, "sliding_window is a field this converter does not know"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"num_expert_group": 8}, "num_expert_group is 8"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "2304"}, "hidden_size is '2304'"),
        ({"num_experts_per_token": None}, "num_experts_per_token is missing"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"linear_attn_config": None}, "linear_attn_config.num_heads"),
        ({"linear_attn_config": {**PUBLISHED["linear_attn_config"], "use_rope": 1}}, "linear_attn_config.use_rope"),
        ({"linear_attn_config": {**PUBLISHED["linear_attn_config"], "kda_layers": [0, 1]}}, "exactly once"),
        ({"layer_types": ["linear_attention"] * 26}, "layer_types"),
    ],
)
def test_what_cannot_be_converted_is_named(changes, says):
    with pytest.raises(ConversionError) as error:
        hf_config.read({**PUBLISHED, **changes})
    assert says in str(error.value)


def with_field(name, value):
    """The published config with one field changed; ``linear_attn_config.x`` is a field of that table."""
    table, _, inner = name.rpartition(".")
    return {**PUBLISHED, **({table: {**PUBLISHED[table], inner: value}} if table else {name: value})}


SIZE_FIELDS = (
    *(set(hf_config.SIZES) | set(hf_config.EXPERT_SIZES) | set(hf_config.OPTIONAL_SIZES)) - hf_config.FACTORS,
    *("model_max_length", "max_position_embeddings", "first_k_dense_replace"),
    *(f"linear_attn_config.{name}" for name in ("num_heads", "head_dim", "short_conv_kernel_size")),
)


@pytest.mark.parametrize("name", sorted(SIZE_FIELDS))
def test_sizes_are_whole_numbers_from_one(name):
    may_be_zero = name in hf_config.COUNTS or name == "first_k_dense_replace"
    zero = () if may_be_zero else (0,)
    for nonsense in (*zero, -72, 2.5, 72.0, True, "72", [72], {"a": 1}, float("nan"), float("inf")):
        with pytest.raises(ConversionError) as error:
            hf_config.read(with_field(name, nonsense))
        assert f"{name} is {nonsense!r}, not a whole number of at least {0 if may_be_zero else 1}" in str(error.value)


@pytest.mark.parametrize("name", sorted({*hf_config.FACTORS, "activation_situ_beta", "activation_situ_linear_beta"}))
def test_factors_are_numbers_above_zero(name):
    assert hf_config.read(with_field(name, 2))  # a whole number is a number
    for nonsense in (-0.5, 0, False, "1e-5", [1.0], float("nan"), float("inf"), 10**400):
        with pytest.raises(ConversionError) as error:
            hf_config.read(with_field(name, nonsense))
        assert f"{name} is " in str(error.value) and "not a number above 0" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("linear_attn_config.gate_lower_bound", "-5", "gate_lower_bound is '-5', not a number below 0"),
        ("linear_attn_config.gate_lower_bound", 5.0, "gate_lower_bound is 5.0, not a number below 0"),
        ("linear_attn_config.use_full_rank_gate", "no", "use_full_rank_gate is 'no', not true or false"),
        ("linear_attn_config.kda_layers", 3, "must be lists of layer numbers"),
        ("linear_attn_config.kda_layers", [[1], 2], "must be lists of layer numbers"),
        ("linear_attn_config.kda_layers", ["1"], "must be lists of layer numbers"),
        ("linear_attn_config", [1], "linear_attn_config is [1], not a table of fields"),
        ("layer_types", "linear_attention", "layer_types is 'linear_attention', not a list"),
        ("layer_types", [["linear_attention"]] * 27, "layer_types must name"),
        ("mlp_layer_types", [{}] * 27, "mlp_layer_types must name"),
        ("mla_use_output_gate", "yes", "mla_use_output_gate is 'yes', not true or false"),
        ("latent_moe_use_norm", 1, "latent_moe_use_norm is 1, not true or false"),
        ("hidden_act", 3, "hidden_act is 3, not text"),
        ("mla_use_nope", 1, "mla_use_nope is 1"),
        ("moe_layer_freq", True, "moe_layer_freq is True"),
        ("num_key_value_heads", 32.0, "num_key_value_heads is 32.0"),
        ("num_experts_per_token", 257, "num_experts_per_token is 257, and there are only 256 experts"),
        ("num_hidden_layers", 10**15, "exactly once"),
    ],
)
def test_nonsense_of_any_type_is_named(name, value, says):
    with pytest.raises(ConversionError) as error:
        hf_config.read(with_field(name, value))
    assert says in str(error.value)


def test_all_faults_are_named_at_once():
    with pytest.raises(ConversionError) as error:
        hf_config.read({**PUBLISHED, "hidden_size": None, "new_gate": True, "topk_group": 4})
    assert all(name in str(error.value) for name in ("hidden_size", "new_gate", "topk_group"))


def test_an_unknown_field_can_be_declared_harmless():
    values = {**PUBLISHED, "new_field": 1}
    description, notes = hf_config.read(values, ignore=["new_field"])
    assert description.config == KIMI_LINEAR
    assert any("new_field" in note for note in notes)
