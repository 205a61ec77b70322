"""The three MoE features: the engine's protocol, light imports, and bad flags refused in a sentence."""

import subprocess
import sys
from argparse import Namespace

import pytest

from k3_plugins.feature import FeatureError, verify
from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig
from k3_plugins.transformer.moe.latent_moe.feature import FEATURE as LATENT_MOE
from k3_plugins.transformer.moe.moonep.config import MoonEPConfig
from k3_plugins.transformer.moe.moonep.feature import FEATURE as MOONEP
from k3_plugins.transformer.moe.quantile_balancing.config import QuantileBalancingConfig
from k3_plugins.transformer.moe.quantile_balancing.feature import FEATURE as QUANTILE_BALANCING

FEATURES = (LATENT_MOE, QUANTILE_BALANCING, MOONEP)


def good(**changes):
    values = {
        "spec": None,
        "swiglu": True,
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_latent_size": 16,
        "moe_shared_expert_overlap": False,
        "moe_expert_capacity_factor": None,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
        "moe_router_enable_expert_bias": False,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "transformer_impl": "local",
        "overlap_moe_expert_parallel_comm": False,
        "add_bias_linear": False,
    }
    return Namespace(**(values | changes))


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_protocol_and_patches(feature) -> None:
    verify(feature, registered_as=feature.name, origin="test")
    assert all(patch.feature == feature.name for patch in feature.patches())


def test_importing_the_features_imports_neither_torch_nor_megatron() -> None:
    names = ("latent_moe", "quantile_balancing", "moonep")
    modules = ",".join(f"k3_plugins.transformer.moe.{name}.feature" for name in names)
    program = f"import sys, {modules}; assert not {{'torch', 'megatron'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_good_flags_point_spec_at_the_k3_layers(feature) -> None:
    args = good()
    feature.validate(args, feature.config())
    assert args.spec == ["k3_plugins.models.kimi_k3.layer_specs", "gpt"]


ANY = [(feature, feature.config()) for feature in FEATURES]


@pytest.mark.parametrize(
    "features,changes,words",
    [
        (ANY, {"num_experts": 9}, "--num-experts 9 cannot be spread evenly over --expert-model-parallel-size 2"),
        (ANY, {"moe_router_topk": 9}, "--moe-router-topk 9 is more than --num-experts 8"),
        (ANY, {"add_bias_linear": True}, "--disable-bias-linear"),
        (ANY, {"spec": ["other", "spec"]}, "--spec other spec builds another model"),
        (ANY[1:], {"num_experts": None}, "give --num-experts"),
        (ANY[:1], {"num_experts": None}, "--moe-latent-size needs --num-experts"),
        (ANY[:1], {"swiglu": False}, "pass --swiglu"),
        (ANY[:1], {"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
        ([(LATENT_MOE, LatentMoEConfig(k3_situ_beta_gate=0))], {}, "--k3-situ-beta-gate 0 must be a positive"),
        ([(LATENT_MOE, LatentMoEConfig(k3_situ_beta_up=float("inf")))], {}, "--k3-situ-beta-up inf must be a positive"),
        (ANY, {"moe_router_topk": 0}, "--moe-router-topk 0 must be at least 1"),
        (ANY[1:2], {"moe_router_score_function": "softmax"}, "--moe-router-score-function softmax"),
        (ANY[1:2], {"moe_router_load_balancing_type": "aux_loss"}, "--moe-router-load-balancing-type aux_loss"),
        (ANY[1:2], {"moe_router_enable_expert_bias": True}, "--moe-router-enable-expert-bias"),
        ([(QUANTILE_BALANCING, QuantileBalancingConfig(moe_qb_ema=1.0))], {}, "--moe-qb-ema 1.0"),
        ([(MOONEP, MoonEPConfig())], {"transformer_impl": "transformer_engine"}, "--transformer-impl local"),
        ([(MOONEP, MoonEPConfig())], {"expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size 1"),
        ([(MOONEP, MoonEPConfig())], {"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        ([(MOONEP, MoonEPConfig())], {"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
        ([(MOONEP, MoonEPConfig())], {"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
    ],
)
def test_bad_flags_are_refused_with_what_to_type(features, changes, words) -> None:
    for feature, config in features:
        with pytest.raises(FeatureError) as error:
            feature.validate(good(**changes), config)
        assert words in str(error.value)


def test_situ_in_a_dense_model_needs_no_experts() -> None:
    LATENT_MOE.validate(good(num_experts=None, moe_latent_size=None), LatentMoEConfig())
