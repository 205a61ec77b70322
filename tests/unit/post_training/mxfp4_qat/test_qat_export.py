"""From a published folder through quantization-aware training and back: what is exported is what was trained with."""

import json
import re
import shlex

import pytest
import torch
from safetensors.torch import load_file

from k3_plugins.models.kimi_k3 import mxfp4
from tests.harness.k3_model import CPU
from tests.harness.launch import launch
from tests.unit.models.kimi_k3 import small_k3

qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")

CONVERT = "k3_plugins.models.kimi_k3.convert"
LOGITS = "tests.unit.post_training.mxfp4_qat.qat_logits"

TRAINING = """
    --mock-data --split 90,10,0 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2
    --train-iters 2 --eval-iters 0 --eval-interval 1000 --lr 1e-2 --min-lr 1e-2 --lr-decay-style constant
    --clip-grad 1.0 --log-interval 1 --finetune --no-load-optim --no-load-rng --save-interval 2
""".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The published folder (packed), imported, trained for two steps with the feature added, exported twice."""
    root = tmp_path_factory.mktemp("qat")
    published = small_k3.write(root / "hf", vision=False)
    log = launch(CONVERT, ["--from-hf", root / "hf", "--to", root / "imported"], timeout=300).logs[0]
    words = shlex.split(log.split("use:\n")[1].splitlines()[0])
    features = f"{words[words.index('--k3-plugins') + 1]},mxfp4-qat"
    run = [*words, "--k3-plugins", features, "--k3-platform", "cpu", *CPU, *TRAINING, "--save", root / "trained"]
    log = launch("k3_plugins.pretrain_gpt", run, timeout=300).logs[0]
    assert "was saved without mxfp4-qat, which begins with this run" in log
    for target, words in (("packed", []), ("unpacked", ["--unpack-experts"])):
        words = ["--to-hf", root / target, "--from", root / "trained", "--hf-config", root / "hf", *words]
        launch(CONVERT, words, timeout=300)
    launch(LOGITS, [root / "trained", root / "trained.pt"], timeout=300)
    return root, published, torch.load(root / "trained.pt"), load_file(root / "packed" / "model.safetensors")


def test_only_routed_experts_carry_quantizers(trained):
    result = trained[2]
    expected = {
        f"decoder.layers.{layer}.mlp.experts.{linear}_{operand}_quantizer"
        for layer in range(1, small_k3.LAYERS)
        for linear in ("linear_fc1", "linear_fc2")
        for operand in ("input", "weight")
    }
    assert result["quantizers"] == dict.fromkeys(expected, True)
    # What else holds weights is there, and is not named above.
    for part in ("shared_experts", "router", "fc1_latent_proj", "self_attention", "word_embeddings", "output_layer"):
        assert any(part in name for name in result["modules"]), part


def test_export_has_the_published_names_shapes_and_types(trained):
    root, published, _, exported = trained
    assert exported.keys() == published.keys()
    for name, value in published.items():
        assert exported[name].shape == value.shape and exported[name].dtype == value.dtype, name
    assert json.loads((root / "packed" / "config.json").read_text()) == small_k3.TEXT_CONFIG


def test_packed_weights_are_the_training_values_bit_for_bit(trained):
    _, published, result, exported = trained
    changed = 0
    for layer in range(1, small_k3.LAYERS):
        fc1, fc2 = result["weights"][f"decoder.layers.{layer}.mlp.experts"]
        for expert in range(small_k3.EXPERTS):
            gate, up = fc1[expert].chunk(2)
            for matrix, used in (("w1", gate), ("w3", up), ("w2", fc2[expert])):
                name = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"
                packed, scale = exported[f"{name}_packed"], exported[f"{name}_scale"]
                assert torch.equal(mxfp4.dequantize(packed, scale, torch.float32), used), name
                theirs = qtensor.MXFP4QTensor(used.shape, torch.float32, packed)
                assert torch.equal(theirs.dequantize(scale=scale, block_sizes={-1: 32}), used), name
                before = mxfp4.dequantize(published[f"{name}_packed"], published[f"{name}_scale"], torch.float32)
                changed += not torch.equal(before, used)
    assert changed > 0  # or training would not have been seen


def test_unpacked_export_holds_the_same_values(trained):
    root, _, _, exported = trained
    plain = load_file(root / "unpacked" / "model.safetensors")
    assert not any(name.endswith(("_packed", "_scale")) for name in plain)
    for name, value in plain.items():
        if f"{name}_packed" in exported:
            pair = exported[f"{name}_packed"], exported[f"{name}_scale"]
            assert torch.equal(value, mxfp4.dequantize(*pair, torch.float32)), name
        else:
            assert torch.equal(value, exported[name]), name
    assert "quantization_config" not in json.loads((root / "unpacked" / "config.json").read_text())["text_config"]


@pytest.mark.parametrize("export", ["packed", "unpacked"])
def test_what_was_exported_computes_the_same_logits(export, trained):
    """Through our converter, and with the feature that rounds the experts' inputs."""
    root, _, result, _ = trained
    launch(CONVERT, ["--from-hf", root / export, "--to", root / f"{export} again"], timeout=300)
    launch(LOGITS, [root / f"{export} again", root / f"{export}.pt", "mxfp4-qat"], timeout=300)
    again = torch.load(root / f"{export}.pt")
    assert torch.equal(again["logits"], result["logits"]) and result["logits"].std() > 0.1
    for name, weights in result["weights"].items():
        assert all(torch.equal(a, b) for a, b in zip(again["weights"][name], weights, strict=True)), name


def test_a_config_that_is_written_anew_says_how_experts_are_packed(trained, tmp_path):
    root = trained[0]
    launch(CONVERT, ["--to-hf", tmp_path / "hf", "--from", root / "trained"], timeout=300)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    quantization = config.get("text_config", config)["quantization_config"]
    assert quantization["format"] == "mxfp4-pack-quantized" and quantization["quant_method"] == "compressed-tensors"
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["type"], weights["group_size"]) == (4, "float", 32)
    (target,) = quantization["config_groups"]["group_0"]["targets"]
    pattern = re.compile(target.removeprefix("re:"))
    exported = {name.removesuffix("_packed") for name in load_file(tmp_path / "hf" / "model.safetensors")}
    packed = {name for name in exported if pattern.match(name.removesuffix(".weight"))}
    assert len(packed) == 3 * 4 * small_k3.EXPERTS and all(".experts." in name for name in packed)
