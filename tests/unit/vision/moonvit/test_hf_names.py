"""Published names: both directions, and every tensor that does not belong."""

import pytest
import torch

from k3_plugins.vision.moonvit.hf_names import VisionNameError, from_hf, to_hf


def published():
    tensors = {
        "vision_tower.patch_embed.proj.weight": torch.randn(8, 3, 2, 2),
        "vision_tower.patch_embed.pos_emb.weight": torch.randn(4, 4, 8),
        "vision_tower.encoder.final_layernorm.weight": torch.randn(8),
        "mm_projector.pre_norm.weight": torch.randn(8),
        "mm_projector.proj.0.weight": torch.randn(32, 32),
        "mm_projector.proj.2.weight": torch.randn(6, 32),
    }
    for number in (0, 11):
        block = f"vision_tower.encoder.blocks.{number}."
        tensors |= {
            f"{block}norm0.weight": torch.randn(8),
            f"{block}norm1.weight": torch.randn(8),
            f"{block}wqkv.weight": torch.randn(48, 8),
            f"{block}wo.weight": torch.randn(8, 16),
            f"{block}mlp.fc0.weight": torch.randn(20, 8),
            f"{block}mlp.fc1.weight": torch.randn(8, 20),
        }
    return tensors


def test_there_and_back():
    tensors = published()
    state = from_hf(tensors)
    assert len(state) == 6 + 2 * 8
    assert torch.equal(state["blocks.11.linear_k.weight"], tensors["vision_tower.encoder.blocks.11.wqkv.weight"][16:32])
    back = to_hf(state, patch_size=2)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("vision_tower.encoder.blocks.0.wqkv.bias", (48,), "wqkv.bias: MoonViT-V2 has no biases"),
        ("mm_projector.proj.1.weight", (4,), "mm_projector.proj.1.weight: MoonViT-V2 has no such tensor"),
        ("vision_tower.encoder.blocks.0.wqkv.weight", (47, 8), "has 47 rows, which are not three equal parts"),
    ],
)
def test_foreign_tensors_are_named(name, shape, sentence):
    with pytest.raises(VisionNameError, match=sentence):
        from_hf({**published(), name: torch.zeros(shape)})


def test_incomplete_states_are_named():
    state = from_hf(published())
    del state["blocks.0.linear_k.weight"]
    with pytest.raises(VisionNameError, match="blocks.0: only linear_q.weight, linear_v.weight"):
        to_hf(state, 2)
    with pytest.raises(VisionNameError, match="other: no parameter"):
        to_hf({"other": torch.zeros(1)}, 2)
