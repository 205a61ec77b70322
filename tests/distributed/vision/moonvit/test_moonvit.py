"""MoonViT-V2 on one process and under tensor parallelism 2, against a literal implementation and ``transformers``.

One start of two ranks serves all tests: `measure` computes everything, the tests below look at it.
"""

import math
import os

import numpy as np
import pytest
import torch

from tests.distributed.vision.moonvit import literal_moonvit
from tests.harness.spawn import spawn

SIZES = {
    "moonvit_num_layers": 2,
    "moonvit_hidden_size": 24,
    "moonvit_num_heads": 2,
    "moonvit_head_dim": 16,
    "moonvit_ffn_size": 20,
    "moonvit_patch_size": 2,
    "moonvit_position_grid": 5,
    "moonvit_norm_eps": 1e-5,
}
TEXT_WIDTH = 10
# An image larger than the table, a video, an image of the table's shape but for one edge, a video of two frames.
CLIPS = [(1, 6, 8), (3, 2, 4), (1, 4, 6), (2, 4, 2)]
FP64 = 1e-11


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return spawn(measure, 2, str(tmp_path_factory.mktemp("moonvit")))


def measure(rank, world, folder):
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    result = {}
    weights = None
    for tp in (1, 2):
        os.makedirs(f"{folder}/tp{tp}", exist_ok=True)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        model_parallel_cuda_manual_seed(123)
        torch.manual_seed(5)
        model = build(tp)
        patches, clips = batch(CLIPS)
        if tp == 1:
            weights = perturbed(model)
            load(model, weights, 0, 1)
            result |= one_process(model, patches, clips, weights)
            result["flops"] = counted_flops(model, patches, clips)
            dist_checkpointing.save(model.sharded_state_dict("vision."), folder + "/tp1")
        else:
            load(model, weights, rank, tp)
            dist_checkpointing.save(model.sharded_state_dict("vision."), folder + "/tp2")
        result[f"tp{tp}"] = output_and_gradients(model, patches, clips, tp)
        result[f"tp{tp} step flops"] = step_flops(rank, tp)
        if tp == 2:
            other = build(tp)
            state = dist_checkpointing.load(other.sharded_state_dict("vision."), folder + "/tp1")
            other.load_state_dict({name.removeprefix("vision."): value for name, value in state.items()})
            result["tp1 into tp2"] = all(
                torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
            )
            images, image_clips = batch([(1, 4, 4), (1, 2, 2)])
            result["tp2 images only"] = output_and_gradients(model, images, image_clips, tp)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    model = build(1)
    state = dist_checkpointing.load(model.sharded_state_dict("vision."), folder + "/tp2")
    result["tp2 into tp1"] = all(torch.equal(state[f"vision.{n}"], weights[n]) for n, _ in model.named_parameters())
    return result


def text_config(tp, dtype=torch.float64):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=TEXT_WIDTH,
        num_attention_heads=2,
        tensor_model_parallel_size=tp,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        transformer_impl="local",
    )


def build(tp, dtype=torch.float64, **changes):
    from k3_plugins.vision.moonvit.config import MoonViTConfig
    from k3_plugins.vision.moonvit.encoder import MoonViT

    return MoonViT(MoonViTConfig(**{**SIZES, **changes}), text_config(tp, dtype))


def batch(clips, seed=3, dtype=torch.float64):
    from k3_plugins.vision.moonvit.geometry import Clip

    generator = torch.Generator().manual_seed(seed)
    count = sum(math.prod(clip) for clip in clips)
    return torch.rand(count, 12, generator=generator, dtype=dtype) * 2 - 1, [Clip(*clip) for clip in clips]


def perturbed(model):
    """Weights of a size at which every part matters, norms different from one."""
    generator = torch.Generator().manual_seed(11)
    weights = {}
    for name, parameter in model.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        one_dimensional = parameter.ndim == 1
        weights[name] = 1 + 0.3 * draw if one_dimensional else draw / parameter.shape[-1] ** 0.5
    return weights


COLUMNS = ("linear_q", "linear_k", "linear_v", "linear_fc1")
ROWS = ("linear_proj", "linear_fc2")


def shard(name, whole, rank, tp):
    module = name.split(".")[-2] if "." in name else ""
    if module in COLUMNS:
        return whole.chunk(tp, 0)[rank]
    return whole.chunk(tp, 1)[rank] if module in ROWS else whole


def load(model, weights, rank, tp):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(shard(name, weights[name], rank, tp))


def output_and_gradients(model, patches, clips, tp):
    """Output, and every gradient gathered to its whole shape; replicated ones as this rank has them."""
    from megatron.core import parallel_state

    model.zero_grad()
    out = model(patches, clips)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)
    (out * weight).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        module = name.split(".")[-2] if "." in name else ""
        if tp > 1 and module in COLUMNS + ROWS:
            parts = [torch.empty_like(grad) for _ in range(tp)]
            group = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.all_gather(parts, grad.contiguous(), group=group)
            grad = torch.cat(parts, dim=0 if module in COLUMNS else 1)
        gradients[name] = grad
    return out.detach(), gradients


def one_process(model, patches, clips, weights):
    """Everything that needs no second rank."""
    result = {}
    out = model(patches, clips)
    result["literal"] = out.detach(), literal(weights, patches, literal_moonvit.bilinear)
    other = build(1, moonvit_interpolation="bicubic", moonvit_projector_norm="pre")
    other_weights = perturbed(other)
    load(other, other_weights, 0, 1)
    result["literal, as K2.5"] = (
        other(patches, clips).detach(), literal(other_weights, patches, literal_moonvit.bicubic)
    )  # fmt: skip

    alone, start = [], 0
    for clip in clips:
        alone.append(model(patches[start : start + clip.patches], [clip]))
        start += clip.patches
    result["alone"] = (out.detach(), torch.cat(alone).detach())

    from k3_plugins.vision.moonvit.geometry import patchify

    pixels = torch.rand(3, 8, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    image, image_clip = patchify(pixels, model.vit)
    video, video_clip = patchify(pixels[None], model.vit)
    result["one frame"] = (model(image, [image_clip]).detach(), model(video, [video_clip]).detach())
    twice, clip = patchify(torch.stack([pixels, pixels.flip(2)]), model.vit)
    swapped, _ = patchify(torch.stack([pixels.flip(2), pixels]), model.vit)
    result["frame order"] = (model(twice, [clip]).detach(), model(swapped, [clip]).detach())

    keep = build(1, moonvit_recompute=True)
    load(keep, weights, 0, 1)
    plain, again = (output_and_gradients(m, patches, clips, 1) for m in (model, keep))
    result["recompute"] = (plain, again)

    half = build(1, torch.bfloat16)
    load(half, weights, 0, 1)
    low, low_gradients = output_and_gradients(half, patches.bfloat16(), clips, 1)
    result["bf16"] = (out.detach(), low.double(), plain[1], {name: g.double() for name, g in low_gradients.items()})
    result["transformers"] = against_transformers(weights)
    result["no clips"] = tuple(model(patches[:0], []).shape)
    try:
        model(patches[:-1], clips)
    except ValueError as error:
        result["mismatch"] = str(error)
    return result


def counted_flops(model, patches, clips):
    """What PyTorch counts in a forward pass, with attention as matrix products, and what the formula says."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from k3_plugins.vision.moonvit.flops import forward_flops

    counts = []
    for number in (len(clips), 1):  # images and videos; one image
        rows = patches[: sum(clip.patches for clip in clips[:number])]
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            model(rows, clips[:number])
        counts.append((counter.get_total_flops(), forward_flops(model.vit, TEXT_WIDTH, clips[:number])))
    return counts


def step_flops(rank, tp):
    """The figure of two steps, over two data-parallel ranks with unlike images, or two tensor-parallel ones with the
    same."""
    from argparse import Namespace

    from k3_plugins.vision.moonvit import flops
    from k3_plugins.vision.moonvit.config import MoonViTConfig
    from k3_plugins.vision.moonvit.flops import StepFlops, add_encoder_flops, forward_flops

    vit, images = MoonViTConfig(**SIZES), [(1, 4, 4 + 4 * (rank if tp == 1 else 0))]
    flops.STEP = StepFlops()
    count = add_encoder_flops(lambda *_: 1000.0)
    figures = []
    for step, trained in ((8, True), (16, False)):
        flops.STEP.add(vit, TEXT_WIDTH, images, trained)
        flops.STEP.add(vit, TEXT_WIDTH, CLIPS, trained)
        figures.append([count(Namespace(consumed_train_samples=step), 2) for _ in range(2)])
    # A log line after two steps, of which the second has no images: asked once after the first, twice after the second.
    flops.STEP.add(vit, TEXT_WIDTH, images, False)
    flops.STEP.add(vit, TEXT_WIDTH, CLIPS, False)
    figures.append([count(Namespace(consumed_train_samples=step), 2) for step in (24, 32, 32)])
    everywhere = [(1, 4, 4), (1, 4, 8)] if tp == 1 else images
    expected = forward_flops(vit, TEXT_WIDTH, [*everywhere, *(CLIPS * (2 if tp == 1 else 1))])
    per_line = [1000 + expected, 1000, 1000 + expected / 2]
    return figures, [[1000 + 3 * expected] * 2, [1000 + expected] * 2, per_line]


def literal(weights, patches, resample):
    arrays = {name: value.numpy() for name, value in weights.items()}
    tokens = literal_moonvit.encode(arrays, patches.numpy().copy(), CLIPS, heads=2, eps=1e-5, resample=resample)
    return torch.from_numpy(literal_moonvit.project(arrays, tokens, 1e-5))


def against_transformers(weights):
    """fp32 outputs, ours and those of transformers' Kimi-K2.5, which loads our weights by their published names."""
    import tempfile
    from pathlib import Path

    from safetensors.torch import save_file
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    from k3_plugins.vision.moonvit.hf_names import from_hf, to_hf

    model = build(
        1, torch.float32, moonvit_head_dim=12, moonvit_interpolation="bicubic", moonvit_projector_norm="pre"
    )
    torch.manual_seed(9)
    ours = {name: value.float() for name, value in perturbed(model).items()}
    load(model, ours, 0, 1)
    published = to_hf(ours, 2)
    back = from_hf(published)
    assert back.keys() == ours.keys() and all(torch.equal(back[name], ours[name]) for name in ours)
    config = Kimi_K25Config(
        text_config={
            "model_type": "deepseek_v3",
            "vocab_size": 64,
            "hidden_size": TEXT_WIDTH,
            "num_hidden_layers": 1,
            "first_k_dense_replace": 1,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 4,
        },
        vision_config={
            "hidden_size": 24,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 20,
            "patch_size": 2,
            "pos_emb_height": 5,
            "pos_emb_width": 5,
        },
        projection_hidden_size=24,
        image_token_id=60,
        video_token_id=61,
        tie_word_embeddings=False,
        architectures=["Kimi_K25ForConditionalGeneration"],
    )
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        save_file(
            {name: value.contiguous() for name, value in published.items()}, Path(directory) / "model.safetensors"
        )
        loaded, report = Kimi_K25ForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
    missing = [name for name in report["missing_keys"] if "vision_tower" in name or "mm_projector" in name]
    rms_instead_of_layer_norms(loaded.model.vision_tower)
    rms_instead_of_layer_norms(loaded.model.mm_projector)
    for name, parameter in loaded.named_parameters():
        if ("vision_tower" in name or "mm_projector" in name) and name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    patches, clips = batch([(1, 6, 8), (1, 4, 2), (1, 4, 6)], dtype=torch.float32)
    with torch.no_grad():
        pixels = patches.reshape(-1, 3, 2, 2)
        tokens = loaded.model.vision_tower(pixels, grid_thw=torch.tensor(clips)).pooler_output
        theirs = loaded.model.mm_projector(tokens).reshape(-1, TEXT_WIDTH)
        return model(patches, clips), theirs, missing, list(report["unexpected_keys"])


def rms_instead_of_layer_norms(module):
    for name, child in module.named_children():
        if isinstance(child, torch.nn.LayerNorm):
            norm = torch.nn.RMSNorm(child.normalized_shape, eps=child.eps)
            norm.weight.data.copy_(child.weight.data)
            setattr(module, name, norm)
        else:
            rms_instead_of_layer_norms(child)


def close(one, two, tolerance):
    assert one.shape == two.shape
    assert float((one - two).abs().max()) <= tolerance * max(1.0, float(two.abs().max()))


@pytest.mark.parametrize("form", ["literal", "literal, as K2.5"])
def test_equals_the_literal_implementation(measured, form):
    close(*measured[0][form], FP64)


def test_images_equal_transformers_kimi_k25(measured):
    """fp32, converted weights, loaded by transformers' own loader from the published names."""
    ours, theirs, missing, unexpected = measured[0]["transformers"]
    # All that transformers has beyond ours are biases.
    assert unexpected == [] and all(name.endswith("bias") for name in missing) and missing
    assert float((ours - theirs).abs().max()) <= 1e-4
    assert float(theirs.abs().max()) > 0.1


def test_packed_equals_one_at_a_time(measured):
    close(*measured[0]["alone"], FP64)


def test_video_of_one_frame_is_the_image(measured):
    image, video = measured[0]["one frame"]
    assert torch.equal(image, video)


def test_the_order_of_frames_matters(measured):
    one, two = measured[0]["frame order"]
    assert float((one - two).abs().max()) > 1e-3


def test_recomputation_changes_no_bit(measured):
    (out, gradients), (again, repeated) = measured[0]["recompute"]
    assert torch.equal(out, again)
    assert all(torch.equal(gradients[name], repeated[name]) for name in gradients)


def test_bf16_follows_fp64(measured):
    """8 bits of mantissa through two blocks and a projector: a few percent of the largest entry."""
    out, low, gradients, low_gradients = measured[0]["bf16"]
    close(low, out, 0.05)
    for name, exact in gradients.items():
        error = (low_gradients[name] - exact).norm() / exact.norm()
        assert error < 0.1, (name, float(error))


@pytest.mark.parametrize("rank", [0, 1])
def test_tensor_parallel_2_equals_1(measured, rank):
    """Output and EVERY gradient, those of replicated parameters on each rank."""
    out, gradients = measured[rank]["tp1"]
    other, other_gradients = measured[rank]["tp2"]
    close(other, out, FP64)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        assert float(gradient.abs().max()) > 0, name
        close(other_gradients[name], gradient, FP64)


def test_every_parameter_has_a_gradient_without_videos(measured):
    _, gradients = measured[0]["tp2 images only"]
    assert all(gradient is not None and bool(gradient.abs().max() > 0) for gradient in gradients.values())


def test_checkpoints_move_between_tensor_parallel_sizes(measured):
    assert measured[0]["tp1 into tp2"] and measured[1]["tp1 into tp2"]
    assert measured[0]["tp2 into tp1"] and measured[1]["tp2 into tp1"]


def test_flops_are_those_that_pytorch_counts(measured):
    for counted, formula in measured[0]["flops"]:
        assert counted == formula > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_flops_of_a_step_are_those_of_all_ranks_images(measured, tp):
    """Once per image, however often Megatron asks; three times the forward for a trained encoder."""
    for rank in (0, 1):
        figures, expected = measured[rank][f"tp{tp} step flops"]
        assert figures == expected


def test_batches_that_do_not_fit(measured):
    assert measured[0]["no clips"] == (0, TEXT_WIDTH)
    count = sum(math.prod(clip) for clip in CLIPS)
    assert measured[0]["mismatch"] == f"4 clips need patches of shape [{count}, 12], and they have [{count - 1}, 12]"


def test_the_literal_rotation_cancels_across_time():
    """The implementation leaves it out there; the literal one has it in."""
    x = np.random.default_rng(0).normal(size=(3, 8))
    y = np.random.default_rng(1).normal(size=(3, 8))
    place = np.array([2, 2, 2]), np.array([5, 5, 5])
    turned = [literal_moonvit._turned(z, *place, 10000.0) for z in (x, y)]
    assert np.allclose((turned[0] @ turned[1].conj().T).real, x @ y.T, atol=1e-12)
