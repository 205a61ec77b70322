"""A converted `transformers` Kimi-Linear computes the same: logits, every gradient, and it converts back bit by bit."""

import json
import shlex
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.harness import k3_model
from tests.harness.launch import launch
from tests.unit.models.kimi_k3 import oracle

SEEDS = (0, 1, pytest.param(2, marks=pytest.mark.slow))
ONE_SEED = pytest.mark.parametrize("case", [0], indirect=True)
CONVERT = "k3_plugins.models.kimi_k3.convert"

# fp32 forward through 8 layers, logits of size about 1 to 5: rounding is about 5e-6. The contract is 1e-4.
LOGITS = 1e-4
# Largest error over largest entry of a gradient; measured about 1e-5. The contract is 1e-3.
GRADIENTS = 1e-3
# fp64, but for the router, which computes its scores in fp32 whatever the model's precision; measured 6e-7.
STEPS = 1e-5


@pytest.fixture(scope="module", params=SEEDS)
def case(request, tmp_path_factory):
    """One seed: the oracle's folder, logits and gradients, the converted checkpoint, and what it computes."""
    root = tmp_path_factory.mktemp(f"seed{request.param}")
    built = oracle.model(request.param)
    built.save_pretrained(root / "hf")
    ids = torch.randint(3, oracle.VOCAB, (2, 70), generator=torch.Generator().manual_seed(request.param))
    torch.save(ids, root / "ids.pt")
    logits, gradients = oracle.logits_and_gradients(built, ids, root / "gradients")
    result = launch(CONVERT, ["--from-hf", root / "hf", "--to", root / "checkpoint"], timeout=300)
    (root / "flags.txt").write_text(result.logs[0].split("To train on from it, use:\n")[1].splitlines()[0])
    files = [root / "checkpoint", root / "ids.pt", root / "out.pt"]
    launch("tests.unit.models.kimi_k3.converted_model", files, timeout=300)
    return root, logits, gradients, torch.load(root / "out.pt")


def test_logits_are_those_of_transformers(case):
    _, logits, _, ours = case
    assert logits.abs().max() > 0.5
    assert (ours["logits"] - logits).abs().max() <= LOGITS


def test_every_gradient_is_that_of_transformers(case):
    _, _, expected, ours = case
    assert ours["gradients"].keys() == expected.keys()
    errors = {}
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0 or ".experts." in name, f"{name} has no gradient: it is not tested"
        scale = gradient.abs().max().clamp(min=1e-6)
        errors[name] = float((ours["gradients"][name].view_as(gradient) - gradient).abs().max() / scale)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= GRADIENTS, f"{worst}: {errors[worst]:.1e}"


def test_generation_equals_the_whole_forward(case):
    found = case[3]["generation"]
    for way in ("one chunk", "chunks", "tokens"):
        assert (found[way] - found["reference"]).abs().max() <= STEPS, way
    assert (found["last"] - found["reference"][:, -1:]).abs().max() <= STEPS
    # A prompt in four chunks: the output layer computes one position of each text, once.
    assert found["output layer"] == [(1, 2)] and found["last"].shape == (2, 1, oracle.VOCAB)
    assert found["greedy"] == found["greedy by the whole forward"]
    assert found["sampled"][0] == found["sampled"][1] != found["sampled"][2]


def test_state_is_bounded(case):
    """KDA's state is the same size after every token; MLA's grows by the latent alone, whatever the heads."""
    found = case[3]["generation"]
    assert len(set(found["kda_bytes"])) == 1
    width = oracle.SIZES["kv_lora_rank"] + oracle.SIZES["qk_rope_head_dim"]
    per_token = len(oracle.FULL) * 2 * width * 8  # batch 2, fp64
    assert found["latent_bytes"] == [per_token * (i + 1) for i in range(len(found["latent_bytes"]))]


def test_converted_back_it_is_bit_equal(case):
    root = case[0]
    back = root / "back"
    launch(CONVERT, ["--to-hf", back, "--from", root / "checkpoint"], timeout=300)
    original, again = load_file(root / "hf" / "model.safetensors"), load_file(back / "model.safetensors")
    assert again.keys() == original.keys()
    for name, tensor in original.items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor), name
    assert json.loads((back / "config.json").read_text()) == json.loads((root / "hf" / "config.json").read_text())
    shutil.rmtree(back)


@ONE_SEED
def test_transformers_reads_what_is_written_without_a_sidecar(case, tmp_path):
    """A trained checkpoint has no original folder: names and config are then the published ones."""
    root = case[0]
    plain = tmp_path / "plain"
    shutil.copytree(root / "checkpoint", plain)
    shutil.rmtree(plain / "release" / "hf")
    launch(CONVERT, ["--to-hf", tmp_path / "back", "--from", plain, "--max-shard-size", "200KB"], timeout=300)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 3
    from transformers import KimiLinearForCausalLM

    read, report = KimiLinearForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = read(torch.load(root / "ids.pt")).logits
    assert (logits - case[1]).abs().max() <= LOGITS
    names = set()
    for file in (tmp_path / "back").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    assert "model.layers.0.mlp.gate_proj.weight" in names  # the published spelling


@ONE_SEED
def test_printed_flags_train_on_and_the_result_is_exported(case, tmp_path):
    """``--load`` under another layout, a step that changes nothing, a checkpoint of Megatron's own, and back."""
    root = case[0]
    flags = shlex.split((root / "flags.txt").read_text())
    once = """--pipeline-model-parallel-size 2 --seq-length 32 --max-position-embeddings 32 --train-iters 1
        --lr 0 --min-lr 0 --lr-warmup-iters 0 --weight-decay 0 --moe-router-bias-update-rate 0
        --save-interval 1 --no-save-optim --no-save-rng --k3-platform cpu""".split()
    command = [*k3_model.TRAINING, *k3_model.CPU, *flags, *once, "--save", tmp_path / "trained"]
    launch(k3_model.DOOR, command, nprocs=2, timeout=400)
    files = ["--from", tmp_path / "trained", "--hf-config", root / "hf"]
    launch(CONVERT, ["--to-hf", tmp_path / "back", *files], timeout=300)
    original, again = load_file(root / "hf" / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert again.keys() == original.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in original.items())


@ONE_SEED
def test_command_continues_ids(case):
    root, _, _, ours = case
    prompt = torch.load(root / "ids.pt")[0, :9].tolist()
    words = ["--load", root / "checkpoint", "--prompt-ids", ",".join(map(str, prompt)), "--max-new-tokens", 24]
    result = launch("k3_plugins.models.kimi_k3.generate", [*words, "--k3-platform", "cpu"], timeout=300)
    whole = [*prompt, *ours["generation"]["greedy"]]
    assert ",".join(map(str, whole)) in result.logs[0]


@ONE_SEED
def test_text_needs_a_tokenizer(case):
    root = case[0]
    words = ["--load", root / "checkpoint", "--prompt", "Once", "--k3-platform", "cpu"]
    result = launch("k3_plugins.models.kimi_k3.generate", words, timeout=300, check=False)
    assert result.rc == 2 and "--tokenizer byte" in result.logs[0]
