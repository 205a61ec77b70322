"""What the feature refuses before training, and what a checkpoint that knows it may be loaded with."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from k3_plugins import features, manifest
from k3_plugins.feature import FeatureError, verify
from k3_plugins.post_training.mxfp4_qat import feature as module
from k3_plugins.post_training.mxfp4_qat import formats
from k3_plugins.post_training.mxfp4_qat.config import MXFP4QATConfig

pytest.importorskip("modelopt.torch.quantization")
FEATURE = module.FEATURE


def arguments(**changes):
    values = dict(
        num_experts=8,
        hidden_size=64,
        moe_latent_size=None,
        ffn_hidden_size=128,
        moe_ffn_hidden_size=64,
        moe_layer_freq=[0, 0, 1, 1],
        expert_tensor_parallel_size=None,
        tensor_model_parallel_size=1,
        fp8=None,
        fp4=None,
        delay_wgrad_compute=False,
        use_transformer_engine_op_fuser=False,
    )
    return Namespace(**{**values, **changes})


def test_it_is_a_feature_and_knows_the_block_size():
    verify(FEATURE, registered_as="mxfp4-qat", origin="here")
    assert any(entry.name == "mxfp4-qat" for entry in features.BUILT_IN)
    assert module.BLOCK == formats.BLOCK
    FEATURE.validate(arguments(), MXFP4QATConfig())
    FEATURE.validate(arguments(moe_latent_size=32, hidden_size=48, moe_layer_freq=1), MXFP4QATConfig())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": None}, "give --num-experts"),
        ({"hidden_size": 80}, r"layers\.2\.mlp\.experts\.linear_fc1 would have 80 input columns \(--hidden-size 80\)"),
        ({"moe_latent_size": 48}, r"linear_fc1 would have 48 input columns \(--moe-latent-size 48\)"),
        ({"moe_ffn_hidden_size": 48}, r"layers\.2\.mlp\.experts\.linear_fc2 would have 48 input columns"),
        ({"tensor_model_parallel_size": 4}, "linear_fc2 would have 16 input columns"),
        ({"expert_tensor_parallel_size": 4}, "linear_fc2 would have 16 input columns"),
        ({"moe_ffn_hidden_size": None, "ffn_hidden_size": 40, "moe_layer_freq": 2}, r"layers\.0\..*would have 40"),
        ({"fp8": "e4m3"}, "--fp8-format cannot be combined"),
        ({"fp4": "e2m1"}, "--fp4-format cannot be combined"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute cannot be combined"),
        ({"use_transformer_engine_op_fuser": True}, "--use-transformer-engine-op-fuser cannot be combined"),
    ],
)
def test_what_cannot_work_is_refused(changes, words):
    with pytest.raises(FeatureError, match=words):
        FEATURE.validate(arguments(**changes), MXFP4QATConfig())


def test_the_cuda_backend_needs_a_device(monkeypatch):
    monkeypatch.setattr(module, "_has_cuda", lambda: False)
    with pytest.raises(FeatureError, match="--mxfp4-qat-backend modelopt-cuda needs a CUDA device"):
        FEATURE.validate(arguments(), MXFP4QATConfig("modelopt-cuda"))
    monkeypatch.setattr(module, "_has_cuda", lambda: True)
    FEATURE.validate(arguments(), MXFP4QATConfig("modelopt-cuda"))
    assert [backend.chosen for backend in FEATURE.backends(MXFP4QATConfig("modelopt-cuda"))] == [False, True]


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    from k3_plugins.compat import optional

    optional.probe.cache_clear()
    monkeypatch.setattr(optional, "_is_installed", lambda name: False)
    with pytest.raises(FeatureError, match="not installed: pip install nvidia-modelopt==0.47.0"):
        FEATURE.validate(arguments(), MXFP4QATConfig())
    optional.probe.cache_clear()


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Other:
    """Another feature that changes parameters."""

    name = "other"
    config = None
    changes_parameters = True


def compare(saved, active):
    """Notes of loading a checkpoint of these features (None: of stock Megatron) with those."""
    known = {"mxfp4-qat": FEATURE, "other": Other()}
    active = [known[name] for name in active]
    activation = SimpleNamespace(
        features=active,
        names=[feature.name for feature in active],
        configs={feature.name: MXFP4QATConfig() if feature is FEATURE else None for feature in active},
    )
    entry = {"changes_parameters": True, "config": {}, "parameter_fields": [], "flags": []}
    contents = None if saved is None else {"features": {name: entry for name in saved}}
    return manifest.compare(manifest.Found("folder", contents), activation)


@pytest.mark.parametrize("saved", [None, [], ["other"]])
def test_it_joins_a_checkpoint_that_was_saved_without_it(saved):
    notes = compare(saved, ["mxfp4-qat", *(saved or [])])
    assert notes == ["checkpoint folder was saved without mxfp4-qat, which begins with this run"]


def test_other_features_still_may_not_join():
    with pytest.raises(FeatureError, match="saved without k3_plugins.*other changes the parameters"):
        compare(None, ["mxfp4-qat", "other"])
    with pytest.raises(FeatureError, match="saved without feature 'other', which is on(.|\n)*--k3-plugins mxfp4-qat$"):
        compare([], ["mxfp4-qat", "other"])


def test_a_checkpoint_of_it_is_refused_without_it_and_the_fix_is_printed():
    with pytest.raises(FeatureError, match="feature 'mxfp4-qat', which is off(.|\n)*--k3-plugins other,mxfp4-qat"):
        compare(["other", "mxfp4-qat"], ["other"])
    assert compare(["other", "mxfp4-qat"], ["other", "mxfp4-qat"]) == []
