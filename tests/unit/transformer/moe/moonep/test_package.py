"""The adapter for the public moonep package: what it says when the package is absent, broken or another version."""

import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch

from k3_plugins.feature import FeatureError
from k3_plugins.transformer.moe.moonep import package
from k3_plugins.transformer.moe.moonep.config import MoonEPConfig
from k3_plugins.transformer.moe.moonep.feature import FEATURE
from tests.distributed.transformer.moe import moonep_stand_in


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("moonep", "moonep.buffer"):
        monkeypatch.setitem(sys.modules, name, None)  # import raises ModuleNotFoundError


def test_the_documented_interface_is_accepted() -> None:
    installed = moonep_stand_in.install()
    assert package.load() is installed


def test_a_missing_package_is_one_sentence() -> None:
    with pytest.raises(package.PackageError, match="cannot be imported .*build it from github.com/MoonshotAI/MoonEP"):
        package.load()


def test_a_broken_package_is_reported_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(name: str) -> ModuleType:
        raise OSError("libnvshmem.so: cannot open shared object file")

    monkeypatch.setattr(package.importlib, "import_module", explode)
    with pytest.raises(package.PackageError, match="OSError: libnvshmem.so"):
        package.load()


def test_another_interface_is_refused_by_name() -> None:
    class Older(moonep_stand_in.Buffer):
        def prefetch_weight(self, plan=None, async_finish=False, full_gate_weight=None):
            """The first published interface."""

    moonep_stand_in.install(Buffer=Older)
    with pytest.raises(package.PackageError, match=r"moonep.Buffer.prefetch_weight .* takes no local_gate_weight"):
        package.load()
    del sys.modules["moonep"].Buffer
    with pytest.raises(package.PackageError, match=r"has no moonep.Buffer;"):
        package.load()


@pytest.mark.parametrize(
    "latent,ffn,dtype,words",
    [
        (128, 128, torch.float32, "moves bf16 only"),
        (96, 128, torch.bfloat16, "--moe-latent-size or --hidden-size 96 must be a multiple of 128"),
        (128, 100, torch.bfloat16, "--moe-ffn-hidden-size 100 must be a multiple of 128"),
    ],
)
def test_what_the_kernels_cannot_move_is_refused(latent, ffn, dtype, words) -> None:
    with pytest.raises(package.PackageError, match=words):
        package.check_widths(latent, ffn, dtype)


def test_the_feature_refuses_before_training() -> None:
    args = Namespace(
        spec=None, num_experts=8, moe_router_topk=2, expert_model_parallel_size=2, add_bias_linear=False,
        transformer_impl="local", moe_shared_expert_overlap=False, moe_expert_capacity_factor=None,
        overlap_moe_expert_parallel_comm=False, expert_tensor_parallel_size=1, tensor_model_parallel_size=1, bf16=False,
        moe_latent_size=128, hidden_size=256, moe_ffn_hidden_size=128,
    )  # fmt: skip
    settings = MoonEPConfig(moe_moonep_transport="moonep")
    with pytest.raises(FeatureError, match="moonep package cannot be imported"):
        FEATURE.validate(args, settings)
    moonep_stand_in.install()
    args.spec = None
    with pytest.raises(FeatureError, match="pass --bf16"):
        FEATURE.validate(args, settings)
    args.spec, args.bf16 = None, True
    FEATURE.validate(args, settings)
