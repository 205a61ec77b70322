"""What the tests run in a process of its own: a converted checkpoint through the product's loader.

    python -m tests.unit.models.kimi_k3.converted_model CHECKPOINT IDS.pt OUT.pt

Writes the logits, the gradients of the mean cross-entropy under the published names (taken through the model's own
distributed-checkpoint description and the table of names), and what generation says about the same ids.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

CHUNKS = (7, 1, 20)
GRID = (1, 4, 6)
"""Frames, rows and columns of patches of an image."""
DOOR = "k3_plugins.models.kimi_k3.generate"


def main() -> None:
    checkpoint, ids_file, out = sys.argv[1:]
    from k3_plugins.models.kimi_k3 import checkpoint_model

    loaded = checkpoint_model.load(Path(checkpoint), platform="cpu", door=DOOR)
    ids = torch.load(ids_file)
    vocab = loaded.args.vocab_size
    logits = forward(loaded.model, ids)[..., :vocab]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    image = encoded_image(loaded.model)
    weight = torch.randn(image.shape, generator=torch.Generator().manual_seed(4))  # all of the encoder gets gradients
    (loss + (image * weight).sum()).backward()
    gradients = published_gradients(loaded)
    result = {
        "image": image.detach(),
        "logits": logits.detach(),
        "gradients": gradients,
        "generation": generation(loaded.model, ids, vocab),
    }
    torch.save(result, out)


def encoded_image(model) -> torch.Tensor:
    """Tokens of an image, ``[M, D]``; none if the model has no encoder."""
    if not hasattr(model, "vision_model"):
        return torch.zeros(0)
    from k3_plugins.vision.moonvit.geometry import Clip

    return model.vision_model(random_patches(3 * model.vision_model.vit.moonvit_patch_size**2), [Clip(*GRID)])


def random_patches(width) -> torch.Tensor:
    """``[N, width]`` in [-1, 1]."""
    return torch.rand(math.prod(GRID), width, generator=torch.Generator().manual_seed(3)) * 2 - 1


def forward(model, ids):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model(ids, positions, None)


def published_gradients(loaded) -> dict[str, torch.Tensor]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from k3_plugins import manifest
    from k3_plugins.models.kimi_k3 import export_hf, hf_folder, hf_names

    for parameter in loaded.model.parameters():
        parameter.data = parameter.grad if parameter.grad is not None else torch.full_like(parameter, float("nan"))
    state = {"model": loaded.model.sharded_state_dict()}
    apply_factories(state)
    whole: dict[str, torch.Tensor] = {}
    for item in nested_values(state):
        if isinstance(item, ShardedTensor):
            target = whole.setdefault(item.key, torch.full(item.global_shape, float("nan")))
            local = (1,) * item.prepend_axis_num + tuple(item.local_shape)
            box = tuple(slice(o, o + n) for o, n in zip(item.global_offset, local, strict=True))
            target[box] = item.data.detach().view(local)
    description = export_hf.describe(loaded.saved, manifest.find(str(loaded.iteration.parent)).manifest)
    _, spelling = hf_folder.read_sidecar(loaded.iteration)
    gradients: dict[str, torch.Tensor] = {}
    for place in hf_names.places(description, spelling.prefix):
        if place.key.endswith("expert_bias"):
            continue  # not trained by gradients
        name = place.others[0] if place.entry.hf in spelling.also else place.hf
        offset, shape = place.box(whole[place.key].shape, description.config.vocab_size)
        box = whole[place.key][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        part = export_hf.from_megatron(place, name, box, spelling).clone()
        gradients[name] = torch.cat([gradients[name], part]) if name in gradients else part
    return gradients


def generation(model, ids, vocab) -> dict:
    """Logits by one chunk, by several and token by token, sizes of the state, and greedy against the whole forward.

    In fp64, where a wrong state cannot pass for rounding: the fp32 forward of a random model with attention residuals
    is itself 6e-5 away from fp64.
    """
    from k3_plugins.models.kimi_k3 import checkpoint_model
    from k3_plugins.models.kimi_k3 import generation as product

    checkpoint_model.fill(model)  # the parameters hold gradients
    for value in [*model.parameters(), *model.buffers()]:
        if value.is_floating_point():
            value.data = value.data.double()  # model.double() keeps A_log and dt_bias in fp32
    found = {"reference": forward(model, ids)[..., :vocab].detach(), "kda_bytes": [], "latent_bytes": []}
    with product.GenerationState(model, ids.shape[0]) as state:
        found["one chunk"] = state.advance(ids, every=True)[..., :vocab]
    with product.GenerationState(model, ids.shape[0]) as state:
        sizes = [*CHUNKS, ids.shape[1] - sum(CHUNKS)]
        found["chunks"] = torch.cat([state.advance(p, every=True) for p in ids.split(sizes, dim=1)], 1)[..., :vocab]
    found["output layer"] = []  # shapes of what it computes
    hook = model.output_layer.register_forward_hook(
        lambda *call: found["output layer"].append(tuple(call[2][0].shape[:2]))
    )
    with product.GenerationState(model, ids.shape[0]) as state:
        found["last"] = state.advance(ids, chunk=20)[..., :vocab]
    hook.remove()
    steps = []
    with product.GenerationState(model, ids.shape[0]) as state:
        for token in ids.split(1, dim=1):
            steps.append(state.advance(token))
            found["kda_bytes"].append(state.kda_bytes)
            found["latent_bytes"].append(state.latent_bytes)
    found["tokens"] = torch.cat(steps, dim=1)[..., :vocab]

    prompt = ids[0, :9].tolist()
    with product.GenerationState(model) as state:
        found["greedy"] = list(product.continuation(state, prompt, 24, vocab_size=vocab, sampling=product.Sampling()))
    whole = list(prompt)
    with torch.no_grad():
        for _ in range(24):
            whole.append(int(forward(model, torch.tensor([whole]))[0, -1, :vocab].argmax()))
    found["greedy by the whole forward"] = whole[len(prompt) :]
    found["sampled"] = []
    for seed in (1, 1, 2):
        sampled = product.Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=seed)
        with product.GenerationState(model) as state:
            found["sampled"].append(list(product.continuation(state, prompt, 12, vocab_size=vocab, sampling=sampled)))
    return found


if __name__ == "__main__":
    main()
