"""A K3 checkpoint in the published form: packed experts, padded A_log, latent experts, attention residuals."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from k3_plugins import features
from k3_plugins.models.kimi_k3 import hf_names
from k3_plugins.vision.moonvit.hf_names import from_hf
from tests.distributed.vision.moonvit import literal_moonvit
from tests.harness.launch import launch
from tests.unit.models.kimi_k3 import converted_model, small_k3

MISSING = {"attnres", "latent-moe"} - {entry.name for entry in features.available()}
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"features that this version does not have: {sorted(MISSING)}")

CONVERT = "k3_plugins.models.kimi_k3.convert"

# fp64, but for the router, which computes its scores in fp32 whatever the model's precision; measured 6e-7.
STEPS = 1e-5


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    root = tmp_path_factory.mktemp("k3")
    values = small_k3.write(root / "hf")
    words = [root / "hf", root / "checkpoint", root / "count.json"]
    launch("tests.unit.models.kimi_k3.counted_conversion", words, timeout=300)
    return root, values, json.loads((root / "count.json").read_text())


def test_weights_pass_through_one_by_one(case):
    count = case[2]
    assert count["largest"] * 10 < count["total"]  # or the next line would say nothing
    assert count["peak"] <= 2 * count["largest"]  # the next one is read before the last one is dropped


def test_converted_back_it_is_bit_equal_and_unpacked(case):
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor.mxfp4_tensor")
    root, values, _ = case
    launch(CONVERT, ["--to-hf", root / "back", "--from", root / "checkpoint"], timeout=300)
    again = load_file(root / "back" / "model.safetensors")
    packed = {name.removesuffix("_packed") for name in values if name.endswith("_packed")}
    plain = {name for name in values if not name.endswith(("_packed", "_scale"))}
    assert again.keys() == plain | packed and len(packed) == 3 * 4 * 4
    for name in plain:
        assert torch.equal(again[name], values[name]), name
    for name in packed:
        bytes_, scale = values[f"{name}_packed"], values[f"{name}_scale"]
        tensor = qtensor.MXFP4QTensor(torch.Size((bytes_.shape[0], bytes_.shape[1] * 2)), torch.float32, bytes_)
        assert torch.equal(again[name], tensor.dequantize(scale=scale, block_sizes={-1: 32})), name
    config = json.loads((root / "back" / "config.json").read_text())
    assert config["text_config"].pop("quantization_config", None) is None
    expected = json.loads((root / "hf" / "config.json").read_text())
    del expected["text_config"]["quantization_config"]
    assert config == expected
    assert (root / "back" / "chat_template.jinja").is_file()


@pytest.fixture(scope="module")
def computed(case):
    """What the converted model computes."""
    root = case[0]
    ids = torch.randint(3, small_k3.VOCAB, (2, 70), generator=torch.Generator().manual_seed(5))
    torch.save(ids, root / "ids.pt")
    files = [root / "checkpoint", root / "ids.pt", root / "out.pt"]
    launch("tests.unit.models.kimi_k3.converted_model", files, timeout=300)
    return torch.load(root / "out.pt")


def test_the_vision_tower_encodes_as_published(case, computed):
    """An image through the converted tower, in fp32, and through NumPy in fp64 with the published tensors."""
    weights = {
        name: value.double().numpy()
        for name, value in from_hf({n: v for n, v in case[1].items() if n.startswith(hf_names.VISION)}).items()
    }
    patches = converted_model.random_patches(3 * small_k3.PATCH**2).double().numpy()
    heads, eps = small_k3.VISION_HEADS, 2.0**-23
    tokens = literal_moonvit.encode(
        weights, patches, [converted_model.GRID], heads=heads, eps=eps, resample=literal_moonvit.bilinear
    )
    expected = torch.from_numpy(literal_moonvit.project(weights, tokens, 1e-5))
    assert computed["image"].shape == expected.shape == (6, small_k3.D) and float(expected.abs().max()) > 1
    assert float((computed["image"] - expected).abs().max()) <= 1e-5  # fp32; measured 1.5e-6


def test_generation_equals_the_whole_forward(computed):
    ours, found = computed, computed["generation"]
    assert found["reference"].std() > 0.1
    for way in ("one chunk", "chunks", "tokens"):
        assert (found[way] - found["reference"]).abs().max() <= STEPS, way
    assert (found["last"] - found["reference"][:, -1:]).abs().max() <= STEPS
    assert found["greedy"] == found["greedy by the whole forward"]
    assert len(set(found["kda_bytes"])) == 1
    # Every named tensor is part of the model: each has a gradient.
    assert all(bool(torch.isfinite(gradient).all()) for gradient in ours["gradients"].values())
    # Experts may get no token, and the first aggregation has one source only, hence no choice and no gradient.
    without = (".experts.", "layers.0.self_attention_res_")
    idle = [
        name
        for name, gradient in ours["gradients"].items()
        if not gradient.any() and not any(part in name for part in without)
    ]
    assert idle == []


@pytest.mark.slow
def test_the_language_model_alone(case, tmp_path):
    root, values, _ = case
    launch(CONVERT, ["--from-hf", root / "hf", "--to", tmp_path / "text", "--without-vision"], timeout=300)
    launch(CONVERT, ["--to-hf", tmp_path / "back", "--from", tmp_path / "text"], timeout=300)
    words = ["--to-hf", tmp_path / "named", "--from", tmp_path / "text", "--hf-config", root / "hf"]
    launch(CONVERT, words, timeout=300)
    for folder in ("back", "named"):
        again = load_file(tmp_path / folder / "model.safetensors")
        plain = {name for name in values if name.startswith("language_model.") and not name.endswith("_scale")}
        assert again.keys() == {name.removesuffix("_packed") for name in plain}
        assert all(torch.equal(again[name], values[name]) for name in plain if not name.endswith("_packed"))
        assert "vision_config" not in json.loads((tmp_path / folder / "config.json").read_text())


def test_wrong_shape_is_named(case, tmp_path):
    values = dict(case[1])
    wrong = "language_model.model.layers.3.self_attn.kv_b_proj.weight"
    values[wrong] = values[wrong][:-1].contiguous()
    small_k3.write(tmp_path / "hf", values)
    result = launch(CONVERT, ["--from-hf", tmp_path / "hf", "--to", tmp_path / "out"], timeout=300, check=False)
    assert result.rc == 2
    assert f"{wrong} has shape (31, 24), the config asks for (32, 24)" in result.logs[0]
    assert not (tmp_path / "out").exists()


def test_files_that_a_checkpoint_lost_are_named(case, tmp_path):
    shutil.copytree(case[0] / "checkpoint", tmp_path / "checkpoint")
    (file,) = (tmp_path / "checkpoint" / "release").glob("*.distcp")
    whole = file.stat().st_size
    with open(file, "r+b") as stream:
        stream.truncate(whole - 100)
    words = ["--to-hf", tmp_path / "back", "--from", tmp_path / "checkpoint"]
    result = launch(CONVERT, words, timeout=300, check=False)
    assert result.rc == 2 and f"{file.name} has {whole - 100} of {whole} bytes" in result.logs[0]
    assert not (tmp_path / "back").exists()
    file.unlink()
    words = ["--load", tmp_path / "checkpoint", "--prompt-ids", "1,2", "--k3-platform", "cpu"]
    result = launch("k3_plugins.models.kimi_k3.generate", words, timeout=300, check=False)
    assert result.rc == 2 and f"{file.name} is missing" in result.logs[0] and "Traceback" not in result.logs[0]
