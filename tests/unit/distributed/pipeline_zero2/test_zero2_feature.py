"""The feature `pipeline-zero2`: the engine's protocol, light imports, and what it refuses by name."""

import subprocess
import sys
from argparse import Namespace

import pytest

from k3_plugins.compat import optional
from k3_plugins.distributed.pipeline_zero2.config import PipelineZeRO2Config
from k3_plugins.distributed.pipeline_zero2.feature import FEATURE
from k3_plugins.distributed.pipeline_zero2.validate import REFUSALS
from k3_plugins.feature import FeatureError, verify


def good(**changes):
    values = {refusal.field: None for refusal in REFUSALS}
    values |= {
        "use_distributed_optimizer": True,
        "optimizer": "adam",
        "log_params_norm": False,
        "cuda_graph_impl": "none",
        "num_distributed_optimizer_instances": 1,
        "ddp_param_name_patterns_for_fp32_local_accumulation": [],
    }
    return Namespace(**(values | changes))


def test_protocol_and_patches():
    verify(FEATURE, registered_as="pipeline-zero2", origin="test")
    assert all(patch.feature == FEATURE.name for patch in FEATURE.patches())
    assert not FEATURE.changes_parameters


def test_importing_the_feature_imports_neither_torch_nor_megatron():
    program = (
        "import sys; from k3_plugins.distributed.pipeline_zero2.feature import FEATURE; FEATURE.patches();"
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("device", ["device", "cpu"])
def test_good_arguments(device):
    FEATURE.validate(good(), PipelineZeRO2Config(zero2_optimizer_device=device, zero2_group=4))


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.field)
def test_refused_flags(refusal):
    value = {"cuda_graph_impl": "local"}.get(refusal.field, 2)
    with pytest.raises(FeatureError) as error:
        FEATURE.validate(good(**{refusal.field: value}), PipelineZeRO2Config())
    text = str(error.value)
    assert text.startswith(refusal.flag) and refusal.because in text and "Drop the flag" in text


@pytest.mark.parametrize(
    ("changes", "config", "sentence"),
    [
        ({"use_distributed_optimizer": False}, {}, "pass --use-distributed-optimizer"),
        ({}, {"zero2_group": 0}, "--zero2-group 0 must be at least 1"),
        ({"optimizer": "muon"}, {"zero2_optimizer_device": "cpu"}, "not with --optimizer muon"),
        ({"log_params_norm": True}, {"zero2_optimizer_device": "cpu"}, "--log-params-norm"),
        ({}, {"zero2_cpu_adam": "deepspeed"}, "add --zero2-optimizer-device cpu"),
    ],
)
def test_refused_combinations(changes, config, sentence):
    with pytest.raises(FeatureError, match=sentence):
        FEATURE.validate(good(**changes), PipelineZeRO2Config(**config))


def test_deepspeed_is_asked_for_by_name_and_missing(monkeypatch):
    monkeypatch.setattr(optional, "_is_installed", lambda module: False)
    optional.probe.cache_clear()
    config = PipelineZeRO2Config(zero2_optimizer_device="cpu", zero2_cpu_adam="deepspeed")
    try:
        with pytest.raises(FeatureError, match=r"--zero2-cpu-adam deepspeed needs deepspeed.*pip install deepspeed=="):
            FEATURE.validate(good(), config)
    finally:
        optional.probe.cache_clear()
    chosen = [backend.name for backend in FEATURE.backends(config) if backend.chosen]
    assert chosen == ["deepspeed"]
