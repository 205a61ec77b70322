"""The measured source weights: their entropy, their dtype, and the picture's errors."""

import math

import pytest
import torch


@pytest.fixture
def module():
    from megatron.core.transformer import TransformerConfig

    from k3_plugins.transformer.attention_residuals.aggregator import AttentionResidual

    config = TransformerConfig(num_layers=2, hidden_size=4, num_attention_heads=2, use_cpu_initialization=True)
    return AttentionResidual(config, 3)


def sources(count):
    return [torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(index)) for index in range(count)]


def test_a_zero_query_has_relative_entropy_one(module):
    module(sources(3), measure=True)
    assert module.relative_entropy.item() == pytest.approx(1.0, abs=1e-6)
    assert module.measured.tolist() == pytest.approx([1 / 3] * 3)


def test_entropy_of_known_weights(module):
    """Sources along one axis: RMSNorm makes both keys (2, 0, 0, 0) and (-2, 0, 0, 0), so the logits are 2w and -2w."""
    axis = torch.zeros(5, 2, 4)
    axis[..., 0] = 3.0
    with torch.no_grad():
        module.query[0] = 0.5 * math.log(3) / 2
    module([axis, -axis], measure=True)
    p = 3 / 4  # exp(log 3 / 2) : exp(-log 3 / 2) = 3 : 1
    expected = -(p * math.log(p) + (1 - p) * math.log(1 - p)) / math.log(2)
    assert module.relative_entropy.item() == pytest.approx(expected, abs=1e-5)
    assert module.measured.tolist() == pytest.approx([p, 1 - p, 0], abs=1e-5)


def test_one_source_has_no_entropy_and_nothing_is_measured_unasked(module):
    module(sources(1), measure=True)
    assert module.relative_entropy is None and module.measured.tolist() == [1, 0, 0]
    module.measured = None
    module(sources(2))
    assert module.measured is None


def test_statistics_stay_fp32_when_the_model_is_cast(module):
    module.source_weights.copy_(torch.tensor([0.1, 0.2, 0.7]))
    module.bfloat16()
    assert module.query.dtype == torch.bfloat16
    assert module.source_weights.dtype == torch.float32
    assert torch.equal(module.source_weights, torch.tensor([0.1, 0.2, 0.7]))
    assert list(module.state_dict()) == ["query", "key_norm_weight", "source_weights"]


def plot(capsys, *words):
    from k3_plugins.transformer.attention_residuals.plot import main

    code = main([str(word) for word in words])
    return code, capsys.readouterr().err


def save(folder, **tensors):
    from torch.distributed.checkpoint import FileSystemWriter, save

    save(dict(tensors), storage_writer=FileSystemWriter(str(folder)), no_dist=True)


def test_the_picture_of_a_damaged_checkpoint_is_one_sentence(tmp_path, capsys):
    code, error = plot(capsys, tmp_path)
    assert code == 2 and "no checkpoint in the torch_dist format" in error
    save(tmp_path / "other", weight=torch.zeros(2))
    code, error = plot(capsys, tmp_path / "other")
    assert code == 2 and "holds no source weights" in error
    key = "decoder.output_res.source_weights"
    save(tmp_path / "new", **{key: torch.zeros(2)})
    code, error = plot(capsys, tmp_path / "new")
    assert code == 2 and "before any source weight was measured" in error
    save(tmp_path / "good", **{key: torch.tensor([0.25, 0.75])})
    code, error = plot(capsys, tmp_path / "good", "--output", tmp_path / "good.png")
    assert (code, error) == (0, "") and (tmp_path / "good.png").read_bytes().startswith(b"\x89PNG")

    (data,) = (tmp_path / "good").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    code, error = plot(capsys, tmp_path / "good", "--output", tmp_path / "bad.png")
    assert code == 2 and "cannot be read, is it damaged" in error and error.count("\n") == 1
    (tmp_path / "good" / ".metadata").write_bytes(b"nonsense")
    code, error = plot(capsys, tmp_path / "good", "--output", tmp_path / "bad.png")
    assert code == 2 and ".metadata cannot be read, is it damaged" in error
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("ten\n")
    code, error = plot(capsys, tmp_path)
    assert code == 2 and "'ten' instead of an iteration" in error
    assert not (tmp_path / "bad.png").exists()
