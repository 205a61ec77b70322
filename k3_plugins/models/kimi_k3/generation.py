"""Continue token ids with a K3-style model: chunked prefill, then one token at a time from the layers' states.

    with GenerationState(model) as state:
        for id in continuation(state, prompt_ids, 100, vocab_size=V, sampling=Sampling()): ...

    with GenerationState(model, batch) as state:
        logits = state.advance(ids)                 # [b, 1, V]: of the token after the last one

Every attention layer gets a cache (KDA: constant size; MLA: latents) for as long as the state is open; everything
between the attention layers is the model's own forward pass.

Letters: b texts, s tokens, h hidden size, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from k3_plugins.models.kimi_k3.sampling import Sampling, choose
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
    def advance(self, ids: Tensor, chunk: int = PREFILL_CHUNK, every: bool = False) -> Tensor:
        """Read the next tokens.

        Args:
            ids: int64 ``[b, s]``, at least one token.
            chunk: tokens read at once.
            every: also give the logits of the tokens before the last one; they take ``b s V`` numbers of memory.

        Returns:
            logits of the token after the last one, ``[b, 1, V]``; with ``every``, after each one, ``[b, s, V]``.
        """
        parts = ids.split(chunk, dim=1)
        results = [self._forward(part, every, part is parts[-1]) for part in parts]
        logits = [result for result in results if result is not None]
        return torch.cat(logits, dim=1) if every else logits[-1]

    def _forward(self, ids: Tensor, every: bool, last: bool) -> Tensor | None:
        positions = torch.arange(self.length, self.length + ids.shape[1], device=ids.device).expand_as(ids)
        process = None if every else _last_logits if last else _no_logits
        logits = self.model(ids, positions, None, output_processor=process)
        self.length += ids.shape[1]
        return logits


def _last_logits(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, scale_logits: Any, **rest: Any
) -> Tensor:
    """What Megatron's model does after its last layer, for the last position alone.

    Megatron calls it in the place of its own output step (``output_processor``), with ``hidden_states`` ``[s, b, h]``.
    """
    logits, _ = output_layer(hidden_states[-1:], weight=output_weight)
    return scale_logits(logits).transpose(0, 1).contiguous()


def _no_logits(**rest: Any) -> None:
    """For a chunk that another one follows: only the layers' states are wanted."""


def continuation(
    state: GenerationState,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    vocab_size: int,
    sampling: Sampling,
    stop: Collection[int] = (),
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
        device: where the model is.

    Raises:
        ValueError: an empty prompt, or ids outside the vocabulary.
    """
    if not prompt or not all(0 <= id < vocab_size for id in prompt):
        raise ValueError(f"the prompt must hold at least one id, each from 0 to {vocab_size - 1}")
    generator = torch.Generator().manual_seed(sampling.seed)
    new = torch.tensor([list(prompt)], device=device)
    for _ in range(max_new_tokens):
        logits = state.advance(new)[0, -1, :vocab_size]
        chosen = choose(logits, sampling, generator)
        if chosen in stop:
            return
        yield chosen
        new = torch.tensor([[chosen]], device=device)
