"""Continue token ids with a K3-style model: chunked prefill, then one token at a time from the layers' states.

    with GenerationState(model) as state:
        logits = state.advance(prompt_ids)          # [s, V], in one or several chunks
        for id in continuation(state, logits, ...): ...

Every attention layer gets a cache (KDA: constant size; MLA: latents) for as long as the state is open; everything
between the attention layers is the model's own forward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3_plugins.transformer.gated_mla.generation import LatentCache
from k3_plugins.transformer.gated_mla.layer import GatedMLASelfAttention
from k3_plugins.transformer.kda.generation import KDACache
from k3_plugins.transformer.kda.layer import KimiDeltaAttention

PREFILL_CHUNK = 512
"""Tokens that are read at once: attention scores of a chunk over everything before it are held in memory."""

_CACHES = {KimiDeltaAttention: KDACache, GatedMLASelfAttention: LatentCache}


class GenerationState:
    """What a model remembers of a batch of texts of equal length.

    Args:
        model: Megatron's ``GPTModel``, whole, in evaluation mode.
        batch: number of texts.

    Raises:
        ValueError: for a model that is split over processes, or that has attention layers of another kind.
    """

    def __init__(self, model: Any, batch: int = 1) -> None:
        self.model, self.batch = model, batch
        self.length = 0
        """Tokens so far."""
        layers = [layer.self_attention for layer in model.decoder.layers]
        foreign = {type(layer).__name__ for layer in layers if type(layer) not in _CACHES}
        if foreign:
            raise ValueError(f"layers of type {', '.join(sorted(foreign))} have no cache to generate with")
        if not (model.pre_process and model.post_process) or any(layer.tp_group.size() > 1 for layer in layers):
            raise ValueError("generation runs in one process: load the checkpoint without model parallelism")
        self._layers = layers
        self.caches = [_CACHES[type(layer)](layer, batch) for layer in layers]

    def __enter__(self) -> GenerationState:
        for layer, cache in zip(self._layers, self.caches, strict=True):
            layer.generation_cache = cache
        return self

    def __exit__(self, *error: object) -> None:
        for layer in self._layers:
            layer.generation_cache = None

    @property
    def kda_bytes(self) -> int:
        """Memory of all KDA states; it does not depend on the length."""
        return sum(cache.bytes for cache in self.caches if isinstance(cache, KDACache))

    @property
    def latent_bytes(self) -> int:
        """Memory of all MLA latents; it is proportional to the length."""
        return sum(cache.bytes for cache in self.caches if isinstance(cache, LatentCache))

    @torch.no_grad()
    def advance(self, ids: Tensor, chunk: int = PREFILL_CHUNK) -> Tensor:
        """Read the next tokens.

        Args:
            ids: int64 ``[b, s]``.
            chunk: tokens read at once.

        Returns:
            logits ``[b, s, V]`` of the token after each of them.
        """
        parts = [self._forward(part) for part in ids.split(chunk, dim=1)]
        return torch.cat(parts, dim=1)

    def _forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(self.length, self.length + ids.shape[1], device=ids.device).expand_as(ids)
        logits = self.model(ids, positions, None)
        self.length += ids.shape[1]
        return logits


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Only the so many most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"--temperature {self.temperature} must not be negative; 0 takes the most likely token")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k} must not be negative; 0 allows every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p} must be above 0 and at most 1")


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> int:
    """The next token.

    Args:
        logits: ``[V]``, real tokens only.
        sampling: see there; top-k is applied before top-p.
        generator: on the CPU; for sampling.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores, ids = (logits.float().cpu() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        scores, ids = scores[: sampling.top_k], ids[: sampling.top_k]
    probabilities = scores.softmax(-1)
    if sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)  # the first one always stays
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def continuation(
    state: GenerationState,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    vocab_size: int,
    sampling: Sampling,
    stop: Collection[int] = (),
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[int]:
    """Ids that follow a prompt, one by one, until a stop id (which is not returned) or the limit.

    Args:
        state: open, of one text.
        prompt: at least one id.
        max_new_tokens: limit.
        vocab_size: V; the padding of the vocabulary is never chosen.
        sampling: how ids are chosen.
        stop: ids that end the text.
        seed: of the sampling.
        device: where the model is.

    Raises:
        ValueError: an empty prompt, or ids outside the vocabulary.
    """
    if not prompt or not all(0 <= id < vocab_size for id in prompt):
        raise ValueError(f"the prompt must hold at least one id, each from 0 to {vocab_size - 1}")
    generator = torch.Generator().manual_seed(seed)
    new = torch.tensor([list(prompt)], device=device)
    for _ in range(max_new_tokens):
        logits = state.advance(new)[0, -1, :vocab_size]
        chosen = choose(logits, sampling, generator)
        if chosen in stop:
            return
        yield chosen
        new = torch.tensor([[chosen]], device=device)
