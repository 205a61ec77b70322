"""A randomly initialised `transformers` Kimi-Linear: the outside oracle of conversion, and the folders it writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VOCAB = 120  # not a multiple of 64: the embedding is padded on our side
LAYERS = 8
FULL = (3, 5, 7)  # full attention at irregular places
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    moe_intermediate_size=24,
    num_hidden_layers=LAYERS,
    num_attention_heads=3,
    num_key_value_heads=3,
    kv_lora_rank=20,
    qk_nope_head_dim=12,
    qk_rope_head_dim=6,
    v_head_dim=10,
    num_local_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=2,
    linear_head_dim=32,
    linear_num_heads=2,
    layer_types=["full_attention" if i in FULL else "linear_attention" for i in range(LAYERS)],
    mlp_layer_types=["dense"] + ["sparse"] * (LAYERS - 1),
    routed_scaling_factor=2.446,
    rms_norm_eps=1e-5,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def model(seed: int, **changes):
    """The model, with every vector (norms, A_log, dt_bias, router bias) made random so that nothing hides behind ones
    and zeros, and larger matrices than the initial ones so that attention and routing are not uniform."""
    with hidden("fla", "causal_conv1d"):
        from transformers import KimiLinearConfig, KimiLinearForCausalLM

    torch.manual_seed(seed)
    built = KimiLinearForCausalLM(KimiLinearConfig(**{**SIZES, **changes})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*built.named_parameters(), *built.named_buffers()]:
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                value.copy_(0.2 * noise)
            elif value.squeeze().dim() <= 1:
                value.add_(0.3 * noise)
            elif "conv1d" not in name:
                value.copy_(noise * value.shape[-1] ** -0.5)
    return built


@contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """transformers takes these packages' kernels where they can be imported, and they need a GPU; its own code is the
    oracle. (mock.patch.dict would forget everything imported meanwhile.)"""
    missing = object()
    before = {name: sys.modules.get(name, missing) for name in packages}
    sys.modules.update(dict.fromkeys(packages))
    try:
        yield
    finally:
        for name, module in before.items():
            if module is missing:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def logits_and_gradients(built, ids: torch.Tensor, folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of the mean cross-entropy of the next token under the published names.

    The gradients are put in the parameters' place and written by save_pretrained, so that the names and the splitting
    of fused weights are transformers' own.
    """
    logits = built(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    values = {name: parameter.data for name, parameter in built.named_parameters()}
    for parameter in built.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    built.save_pretrained(folder)
    for name, parameter in built.named_parameters():
        parameter.data = values[name]
    gradients = load_file(folder / "model.safetensors")
    return logits.detach(), {k: v for k, v in gradients.items() if not k.endswith("e_score_correction_bias")}


def rewrite(folder: Path, change) -> None:
    """Apply ``change`` to the dict of tensors in a folder's single file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
