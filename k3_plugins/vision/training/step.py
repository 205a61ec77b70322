"""Megatron's hooks for training with images: the encoder beside the embedding, the data sets, one micro-batch.

Letters: b micro-batch (1), s sequence, d width of the language model, M image tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from megatron.training import get_args, get_timers, print_rank_0
from torch import Tensor

from k3_plugins.failure import fail
from k3_plugins.feature import FeatureError
from k3_plugins.training.forward_step import loss_func
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.encoder import MoonViT
from k3_plugins.vision.moonvit.geometry import Clip
from k3_plugins.vision.training.pairs import find_pairs
from k3_plugins.vision.training.rows import PairRows

ENCODER = "vision_model"
"""The encoder's name in the model, and so in checkpoints."""


def attach_encoder(config: MoonViTConfig) -> Callable[[list[Any]], list[Any]]:
    """A pre-wrap hook for Megatron's model builder: the first stage gets the encoder as a submodule."""

    def attach(models: list[Any]) -> list[Any]:
        for model in models:
            if model.pre_process:
                setattr(model, ENCODER, MoonViT(config, model.config))
        return models

    return attach


def dataset_provider(train: str, valid: str | None, suffix: str, config: MoonViTConfig) -> Callable[..., tuple]:
    """Megatron's ``train_valid_test_dataset_provider``; every rank reads the headers and ends with 2 if one is bad."""

    def datasets(sizes: Sequence[int], vp_stage: int | None = None) -> tuple:
        del vp_stage
        args = get_args()

        def rows(folder: str | None, flag: str, count: int | None, seed: int | None) -> PairRows | None:
            if folder is None or not count:
                return None
            pairs = find_pairs(folder, config, suffix, flag)
            data = PairRows(pairs, count, args.seq_length, config, seed)
            print_rank_0(f"> {flag} {folder}: {len(pairs)} pairs, {len(data)} rows of {args.seq_length} tokens")
            return data

        try:
            return (
                rows(train, "--vision-data", sizes[0], args.seed),
                rows(valid, "--vision-valid-data", sizes[1], None),
                None,
            )
        except FeatureError as error:
            fail(str(error), at_once=args.world_size > 1)

    datasets.is_distributed = True  # Megatron then calls it on every rank
    return datasets


def embed(model: GPTModel, tokens: Tensor, positions: Tensor, images: Tensor, image_positions: Tensor) -> Tensor:
    """Text embeddings with the images' tokens in their places.

    Args:
        tokens, positions: ``[1, s]``.
        images: ``[M, d]`` from the encoder.
        image_positions: ``[M]`` places in the sequence.

    Returns:
        ``[s, 1, d]``.
    """
    text = model.embedding(input_ids=tokens, position_ids=positions)
    return text.index_copy(0, image_positions, images[:, None].to(text.dtype))


def forward_step(data_iterator: Iterator, model: GPTModel) -> tuple[Tensor, partial]:
    """Megatron's ``forward_step_func``: the encoder inside the first stage's forward, then the language model."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    row = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items()}
    timers("batch-generator").stop()
    gpt = unwrap_model(model)
    clips = [Clip(*clip) for clip in row["clips"][0].tolist()]
    images = getattr(gpt, ENCODER)(row["patches"][0], clips)
    decoder_input = embed(gpt, row["tokens"], row["position_ids"], images, row["image_positions"][0])
    output = model(
        row["tokens"],
        row["position_ids"],
        None,
        decoder_input=decoder_input,
        labels=row["labels"],
        loss_mask=row["loss_mask"],
    )
    return output, partial(loss_func, row["loss_mask"], model=model)
