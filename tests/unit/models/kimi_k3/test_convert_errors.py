"""What does not fit ends a conversion with a list, before the target exists. No Megatron is needed to find it."""

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from k3_plugins.models.kimi_k3 import convert, hf_names, import_hf
from k3_plugins.models.kimi_k3.hf_config import ConversionError
from k3_plugins.models.kimi_k3.import_hf import import_checkpoint
from tests.unit.models.kimi_k3 import small_k3

LAYER = "language_model.model.layers.1."


def refused(folder, target, *, ignore=()):
    """The message of a conversion that must fail and leave nothing behind."""
    before = sorted(os.listdir(target.parent))
    with pytest.raises(ConversionError) as error:
        import_checkpoint(folder, target, ignore)
    assert sorted(os.listdir(target.parent)) == before
    return str(error.value)


def with_values(tmp_path, change):
    values = small_k3.tensors()
    change(values)
    small_k3.write(tmp_path / "hf", values)
    return tmp_path / "hf"


def test_missing_tensors_are_listed(tmp_path):
    gone = [f"{LAYER}block_sparse_moe.routed_expert_norm.weight", f"{LAYER}self_attn.dt_bias"]
    message = refused(with_values(tmp_path, lambda v: [v.pop(name) for name in gone]), tmp_path / "out")
    assert "missing from the checkpoint (2)" in message and all(name in message for name in gone)


def test_unexpected_tensors_are_listed(tmp_path):
    extra = f"{LAYER}self_attn.q_norm.weight"
    message = refused(with_values(tmp_path, lambda v: v.update({extra: torch.ones(4)})), tmp_path / "out")
    assert "not part of the model (1)" in message and extra in message


def test_vision_tensors_are_checked_name_by_name(tmp_path):
    extra, gone = "vision_tower.encoder.blocks.0.wqkv.bias", "mm_projector.post_norm.weight"

    def change(values):
        values[extra] = torch.ones(4)
        del values[gone]

    message = refused(with_values(tmp_path, change), tmp_path / "out")
    assert "missing from the checkpoint (1)" in message and gone in message
    assert "not part of the model (1)" in message and extra in message


def test_a_vision_tower_without_its_config_is_refused(tmp_path):
    small_k3.write(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    del config["vision_config"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    message = refused(tmp_path / "hf", tmp_path / "out")
    assert "tensors of a vision encoder are there that config.json, in its vision_config, does not describe" in message


def test_missing_features_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(import_hf.feature_list, "available", lambda: list(import_hf.feature_list.BUILT_IN[:2]))
    small_k3.write(tmp_path / "hf")
    message = refused(tmp_path / "hf", tmp_path / "out")
    assert "attnres, latent-moe" in message


def test_padding_of_a_log_must_be_zero(tmp_path):
    def change(values):
        values[f"{LAYER}self_attn.A_log"][-1] = 0.5

    message = refused(with_values(tmp_path, change), tmp_path / "out")
    assert f"{LAYER}self_attn.A_log has 4 entries for 3 heads, and 1 of the 1" in message


def test_half_of_a_packed_pair_is_refused(tmp_path):
    name = f"{LAYER}block_sparse_moe.experts.0.w1.weight"
    folder = with_values(tmp_path, lambda v: v.pop(f"{name}_packed"))
    assert f"{name}_scale" in refused(folder, tmp_path / "out")


def test_unknown_config_fields_are_refused(tmp_path):
    small_k3.write(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["text_config"]["qk_norm"] = True
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert "qk_norm" in refused(tmp_path / "hf", tmp_path / "out")


def test_truncated_file_is_named(tmp_path):
    small_k3.write(tmp_path / "hf")
    file = tmp_path / "hf" / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refused(tmp_path / "hf", tmp_path / "out")
    assert file.name in message and "damaged or incomplete" in message


def test_index_must_fit_the_files(tmp_path):
    small_k3.write(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    lost = sorted(index["weight_map"])[0]
    del index["weight_map"][lost]
    path.write_text(json.dumps(index))
    assert f"holds {lost}, which the index does not name" in refused(tmp_path / "hf", tmp_path / "out")
    (tmp_path / "hf" / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors is missing" in refused(tmp_path / "hf", tmp_path / "out")


def test_names_of_a_module_in_memory_are_explained(tmp_path):
    def change(values):
        for x in "qkv":
            del values[f"{LAYER}self_attn.{x}_conv1d.weight"]
        values[f"{LAYER}self_attn.conv1d.weight"] = torch.ones(288, 1, 4)

    assert "save_pretrained" in refused(with_values(tmp_path, change), tmp_path / "out")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors.index.json"])
def test_incomplete_folder(tmp_path, missing):
    small_k3.write(tmp_path / "hf")
    (tmp_path / "hf" / missing).unlink()
    assert missing in refused(tmp_path / "hf", tmp_path / "out")


def test_target_must_not_exist(tmp_path):
    small_k3.write(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    assert "exists already" in refused(tmp_path / "hf", tmp_path / "out")


@pytest.mark.parametrize(
    "words",
    [
        *([], ["--from-hf", "a"], ["--to-hf", "a"], ["--from-hf", "a", "--to-hf", "b"]),
        ["--to-hf", "a", "--from", "b", "--without-vision"],
    ],
)
def test_one_direction_must_be_asked_for(words, capsys):
    with pytest.raises(SystemExit) as stop:
        convert.arguments(words)
    assert stop.value.code == 2


def test_sizes_of_shards():
    assert convert.size("5GB") == 5 * 10**9 and convert.size("300MB") == 3 * 10**8 and convert.size("17") == 17


def test_printed_flags_can_be_pasted(tmp_path, monkeypatch, capsys):
    """bash and zsh give back every word, in a folder with files that a bare pattern would match."""
    words = ["--k3-plugins", "kda", "--linear-attention-freq", "[1,1,0,0]", "--load", "/my checkpoints/it's $1"]
    monkeypatch.setattr(import_hf, "import_checkpoint", lambda *_: words)
    assert convert.main(["--from-hf", "a", "--to", "b"]) == 0
    printed = capsys.readouterr().out.split("use:\n")[1].strip()
    assert shlex.split(printed) == words
    (tmp_path / "1").touch()
    for shell in filter(shutil.which, ("bash", "zsh")):
        command = [shell, "-c", f"printf '%s\\n' {printed}"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert ended.stdout.splitlines() == words, shell


def test_a_nonsense_size_ends_with_code_2(tmp_path, capsys):
    small_k3.write(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["text_config"]["hidden_size"] = -72
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as stop:
        convert.main(["--from-hf", str(tmp_path / "hf"), "--to", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "hidden_size is -72, not a whole number of at least 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_errors_end_with_code_2_and_without_a_traceback(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        convert.main(["--from-hf", str(tmp_path), "--to", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "config.json is missing" in capsys.readouterr().err


def _k3():
    from k3_plugins.models.kimi_k3 import hf_config

    return hf_config.read(small_k3.CONFIG)[0]


def test_every_tensor_has_one_box_and_no_two_overlap():
    """Parts of a Hugging Face tensor are disjoint, and so are the boxes of one Megatron tensor."""
    places = list(hf_names.places(_k3(), hf_names.MULTIMODAL_PREFIX))
    assert len({(place.hf, place.entry.part) for place in places}) == len(places)
    boxes = [(place.key, place.expert, place.entry.block) for place in places]
    assert len(set(boxes)) == len(boxes)
    logical = {name.removesuffix("_packed").removesuffix("_scale") for name in small_k3.tensors()}
    assert {place.hf for place in places} == logical


def test_converter_is_light():
    """The checks of a folder need no Megatron."""
    code = (
        "import sys, k3_plugins.models.kimi_k3.import_hf, k3_plugins.models.kimi_k3.hf_config as c;"
        "assert 'megatron' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_are_read_one_at_a_time(tmp_path):
    from k3_plugins.models.kimi_k3.safetensors_files import ShardWriter, Weights

    values = {f"t{i}": torch.full((100,), float(i)) for i in range(7)}
    writer = ShardWriter(tmp_path, max_bytes=900)  # two tensors of 400 bytes a shard
    for name, value in values.items():
        writer.add(name, value)
    writer.close()
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    weights = Weights(tmp_path, torch.float32)
    assert weights.names == values.keys()
    assert all(torch.equal(weights.read(name), value) for name, value in values.items())
    save_file({"t0": torch.ones(1, dtype=torch.int64)}, tmp_path / "model-00001-of-00004.safetensors")
    with pytest.raises(ConversionError):
        Weights(tmp_path, torch.float32)


def test_shards_can_be_read_by_whom_the_umask_lets(tmp_path):
    from k3_plugins.models.kimi_k3.safetensors_files import ShardWriter

    before = os.umask(0o027)
    try:
        writer = ShardWriter(tmp_path, 8)
        writer.add("a", torch.zeros(2))
        writer.add("b", torch.ones(2))
        writer.close()
    finally:
        os.umask(before)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 2 and {stat.S_IMODE(shard.stat().st_mode) for shard in shards} == {0o640}
