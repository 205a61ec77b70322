"""Megatron's hooks for fine-tuning: data sets from the files, and a micro-batch through the model.

Every rank reads the rows of its data-parallel rank, on every pipeline stage: the stages between the first and the last
need to know which tokens are padding, since no expert may count or compute them.

Shapes: b micro-batch, s sequence (s/CP under context parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, print_rank_0
from torch import Tensor

from k3_plugins.failure import fail_together
from k3_plugins.feature import FeatureError
from k3_plugins.post_training.sft.dataset import ConversationDataset
from k3_plugins.post_training.sft.samples import Samples, TooLong, read
from k3_plugins.post_training.sft.tokens import TemplateTokenizer, template_tokenizer
from k3_plugins.training.forward_step import loss_func
from k3_plugins.training.provider import on_every_rank

_SEQUENCES = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask", "attention_mask")


@dataclass(frozen=True)
class ChatFiles:
    """What the door's own flags name."""

    train: tuple[str, ...]
    valid: tuple[str, ...] = ()
    too_long: TooLong = "error"


def dataset_provider(files: ChatFiles) -> Callable[..., tuple]:
    """Megatron's ``train_valid_test_dataset_provider``; ends all ranks with exit code 2 if one cannot read the data."""

    @cache  # with virtual pipelines it is called for every chunk
    def conversations() -> tuple[TemplateTokenizer, Samples, Samples | None]:
        args = get_args()
        tokenizer = template_tokenizer(args)
        train = read(files.train, tokenizer, args.seq_length, files.too_long)
        valid = read(files.valid, tokenizer, args.seq_length, files.too_long) if files.valid else None
        return tokenizer, train, valid

    @on_every_rank
    def datasets(sizes: Sequence[int], vp_stage: int | None = None) -> tuple:
        del vp_stage
        args = get_args()
        problem = None
        try:
            tokenizer, train, valid = conversations()
        except FeatureError as error:
            problem = str(error)
        fail_together(problem)
        trained = sum(int(sample.train.sum()) for sample in train.samples)
        total = sum(len(sample.ids) for sample in train.samples)
        print_rank_0(
            f"> {len(train.samples)} conversations to train on, {train.dropped} too long and left out; {trained} of "
            f"{total} ids have a loss"
        )

        def rows(samples: Samples | None, count: int | None, seed: int | None) -> ConversationDataset | None:
            if samples is None:
                return None
            mask = args.create_attention_mask_in_dataloader
            return ConversationDataset(
                samples.samples, count or len(samples.samples), args.seq_length, tokenizer.padding, seed, mask
            )

        return rows(train, sizes[0], args.seed), rows(valid, sizes[1], None), None

    return datasets


def get_batch(data_iterator: Iterator, model: GPTModel) -> dict[str, Tensor | None]:
    """This rank's part of the next micro-batch.

    Returns:
        tokens, labels, position_ids int64 and loss_mask fp32 ``[b, s]``, attention_mask or None, and padding_mask bool
        ``[b, s]`` (cut over tensor-parallel ranks where the hidden states are and the model would not do it).
    """
    rows = next(data_iterator)
    batch: dict[str, Tensor | None] = {
        key: rows[key].cuda(non_blocking=True) if key in rows else None for key in _SEQUENCES
    }
    batch = get_batch_on_this_cp_rank(
        {**batch, "cu_seqlens": None}, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    if get_args().sequence_parallel and not get_attr_wrapped_model(model, "pre_process"):
        ranks, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
        padding = batch["padding_mask"]
        assert padding is not None, "every row of a conversation has one"
        batch["padding_mask"] = padding.chunk(ranks, dim=1)[rank].contiguous()
    return batch


def forward_step(data_iterator: Iterator, model: GPTModel) -> tuple[Tensor, partial]:
    """Megatron's ``forward_step_func``: the stage's output, and the loss over what the model is to write."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, model)
    timers("batch-generator").stop()
    # Dense models route nothing; without experts the mask would be an argument that nobody reads.
    padding = batch["padding_mask"] if get_args().num_experts is not None else None
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        padding_mask=padding,
    )
    return output, partial(loss_func, batch["loss_mask"], model=model)
