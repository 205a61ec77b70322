"""Megatron's hooks for training with images: the encoder beside the embedding, the data sets, one micro-batch.

Under a pipeline the first stage reads the images, the last one the labels, the others nothing.

Letters: b micro-batch (1), s sequence (of this rank under sequence parallelism), d width of the language model, M image
tokens of the micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.utils import unwrap_model
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.utils import is_first_or_last_pipeline_stage
from torch import Tensor

from k3_plugins.activation import active, current
from k3_plugins.failure import fail_together
from k3_plugins.training.forward_step import loss_func
from k3_plugins.training.provider import on_every_rank
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.encoder import MoonViT
from k3_plugins.vision.moonvit.flops import STEP
from k3_plugins.vision.training.context import cut, encode_images, loss_of, on_device
from k3_plugins.vision.training.pairs import Pair
from k3_plugins.vision.training.rows import PairRows
from k3_plugins.vision.training.usable import PairSource, in_words, named_failures, usable_pairs

if TYPE_CHECKING:
    from k3_plugins.vision.training.energon_rows import EnergonRows

ENCODER = "vision_model"
"""The encoder's name in the model, and so in checkpoints."""

images_seen = 0
"""Images that this rank's rows held so far."""


def attach_encoder(config: MoonViTConfig) -> Callable[[list[Any]], list[Any]]:
    """A pre-wrap hook for Megatron's model builder: the first stage gets the encoder as a submodule.

    With ``vision-bubble`` the other pipeline ranks build one beside the model, which takes the first stage's weights;
    with ``pipeline-zero2``, whose gradients have no place between backward passes, the first stage does so too.
    """

    def attach(models: list[Any]) -> list[Any]:
        encoder = None
        for model in models:
            if model.pre_process:
                encoder = MoonViT(config, model.config)
                encoder.requires_grad_(not config.moonvit_frozen)
                setattr(model, ENCODER, encoder)
        if _in_bubbles():
            from k3_plugins.pipeline_parallel.vision_bubble.runtime import RUNTIME

            RUNTIME.source = encoder
            if encoder is None or ("pipeline-zero2" in active().names and not config.moonvit_frozen):
                text = copy.copy(models[0].config)
                text.perform_initialization = False  # nor draw random numbers that the text's dropout would get
                encoder = MoonViT(config, text)
            RUNTIME.encoder = encoder
        return models

    return attach


def encoder_beside() -> MoonViT | None:
    """What this rank encodes with in pipeline bubbles; the model's own, or one beside the model."""
    if not _in_bubbles():
        return None
    from k3_plugins.pipeline_parallel.vision_bubble.runtime import RUNTIME

    return RUNTIME.encoder


def _in_bubbles() -> bool:
    activation = current()
    return activation is not None and "vision-bubble" in activation.names


def dataset_provider(train: str, valid: str | None, source: PairSource, config: MoonViTConfig) -> Callable[..., tuple]:
    """Megatron's ``train_valid_test_dataset_provider``; every rank reads the headers and ends with 2 if one is bad."""

    @cache  # with virtual pipelines the provider is called for every chunk
    def pairs_of(folder: str, flag: str) -> list[Pair]:
        return usable_pairs(folder, flag, source, config, get_args().seq_length)

    @on_every_rank
    def datasets(sizes: Sequence[int], vp_stage: int | None = None) -> tuple:
        args = get_args()
        first = mpu.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
        needed = is_first_or_last_pipeline_stage(vp_stage)
        in_bubbles = _in_bubbles()
        if in_bubbles:  # one reader for all chunks of every rank; images are read where they are encoded
            needed = vp_stage in (None, 0)

        def rows(folder: str | None, flag: str, count: int | None, seed: int | None) -> PairRows | None:
            if folder is None or not count:
                return None
            pairs = pairs_of(folder, flag)
            data = PairRows(pairs, count, args.seq_length, config, seed, images=first and not in_bubbles)
            if first:
                print_rank_0(f"> {flag} {folder}: {len(pairs)} pairs, {len(data)} rows of {args.seq_length} tokens")
            return data if needed else None

        if source.reader == "energon":
            return _streams(train, valid if sizes[1] else None, source, config, needed, images=first)
        training = rows(train, "--vision-data", sizes[0], args.seed)
        validation = rows(valid, "--vision-valid-data", sizes[1], None)
        if in_bubbles and needed:
            from k3_plugins.pipeline_parallel.vision_bubble.runtime import RUNTIME

            by_mode = {False: training, True: validation}
            RUNTIME.sources = {evaluates: data for evaluates, data in by_mode.items() if data is not None}
        return training, validation, None

    return datasets


def _streams(
    train: str, valid: str | None, source: PairSource, config: MoonViTConfig, needed: bool, images: bool
) -> tuple:
    """Energon's streams where rows are needed; every rank ends if one cannot open them."""
    found: tuple[EnergonRows | None, EnergonRows | None] = (None, None)
    problem = None
    try:
        if needed:
            from k3_plugins.vision.training.energon_rows import energon_rows

            found = energon_rows(train, valid, config, source.skip_bad, images)
    except Exception as error:
        problem = in_words(error, f"opening the streams of --vision-data {train}")
    fail_together(problem)
    return (*found, None)


def embed(model: GPTModel, tokens: Tensor, positions: Tensor, images: Tensor, image_positions: Tensor) -> Tensor:
    """Text embeddings with the images' tokens in their places.

    Args:
        tokens, positions: ``[1, S]`` with S the whole sequence.
        images: ``[M, d]`` from the encoder, the same on every tensor-parallel rank.
        image_positions: ``[M]`` places in the sequence.

    Returns:
        ``[s, 1, d]``.
    """
    text = model.embedding(input_ids=tokens, position_ids=positions)
    if model.config.sequence_parallel:
        # A rank holds a slice of the sequence, so it sees the gradient of the image tokens in it alone.
        images = copy_to_tensor_model_parallel_region(images)
        image_positions = image_positions - mpu.get_tensor_model_parallel_rank() * len(text)
        here = (image_positions >= 0) & (image_positions < len(text))
        images, image_positions = images[here], image_positions[here]
    return text.index_copy(0, image_positions, images[:, None].to(text.dtype))


def forward_step(data_iterator: Iterator | None, model: GPTModel) -> tuple[Tensor, partial]:
    """Megatron's ``forward_step_func``: the encoder inside the first stage's forward, then the language model."""
    global images_seen
    gpt = unwrap_model(model)
    if not (gpt.pre_process or gpt.post_process):
        return model(None, None, None), partial(loss_func, None, model=model)
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    assert data_iterator is not None, "Megatron gives one to the first and the last stage"
    with named_failures():
        row = on_device(next(data_iterator))
    timers("batch-generator").stop()
    decoder_input = None
    if gpt.pre_process:
        images_seen += row["clips"].shape[1]
        encoder = getattr(gpt, ENCODER)
        if gpt.training:
            clips = row["clips"][0].tolist()
            STEP.add(encoder.vit, gpt.config.hidden_size, clips, trained=not encoder.vit.moonvit_frozen)
        images, places = encode_images(encoder, row)
    row = cut(row)
    if gpt.pre_process:
        decoder_input = embed(gpt, row["tokens"], row["position_ids"], images, places)
    output = model(
        row["tokens"],
        row["position_ids"],
        None,
        decoder_input=decoder_input,
        labels=row["labels"] if gpt.post_process else None,
        loss_mask=row["loss_mask"] if gpt.post_process else None,
    )
    return output, loss_of(row["loss_mask"], model)
