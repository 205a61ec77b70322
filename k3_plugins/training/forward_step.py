"""One micro-batch of a GPT: from the data iterator to the loss, under every parallelism of Megatron.

Shapes: b micro-batch, s sequence (s/CP under context parallelism), t packed tokens (b = 1).
"""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial

import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from torch import Tensor

from k3_plugins.training.datasets import holds_tokens, predicts_further_tokens, reads_cu_seqlens

BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)

SPIKY_LOSS_FACTOR = 10
"""A loss this many times the largest one seen so far is reported as spiky (Megatron's own threshold)."""

straggler = StragglerDetector()


def get_batch(data_iterator: Iterator, vp_stage: int | None = None) -> dict[str, Tensor | None]:
    """This rank's part of the next micro-batch; entries a stage does not use are None.

    Returns:
        tokens, labels, position_ids ``[b, s]`` int64, loss_mask ``[b, s]`` fp32, attention_mask, and for packed
        sequences cu_seqlens ``[1, N+1]`` over the whole (not the rank's) packed sequence.
    """
    args = get_args()
    has_tokens = holds_tokens(args, vp_stage)
    if not has_tokens and not reads_cu_seqlens(args):
        return dict.fromkeys(BATCH_KEYS)

    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        batch = {
            key: sample[key].cuda(non_blocking=True) if sample.get(key) is not None else None for key in BATCH_KEYS
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=reads_cu_seqlens(args),
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_further_tokens(args, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if has_tokens:
        batch = get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=args.hybrid_context_parallel,
            cp_group=mpu.get_context_parallel_group(),
            hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
            use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
        )
    return {key: batch.get(key) for key in BATCH_KEYS}


def packed_sequence_params(batch: dict[str, Tensor | None], args: Namespace) -> PackedSeqParams | None:
    """Megatron's description of packed sequences, or None for one sequence per row."""
    if batch["cu_seqlens"] is None:
        return None
    assert batch["max_seqlen"] is not None, "it comes with the boundaries"
    real = batch["cu_seqlens"].squeeze(0)
    padded = None if batch["cu_seqlens_padded"] is None else batch["cu_seqlens_padded"].squeeze(0)
    update_seqlen_stats_from_cu_seqlens(real)  # FLOPs are counted for real tokens
    boundaries = real if padded is None else padded
    longest = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if batch["local_cp_size"] is None else int(batch["local_cp_size"].item()),
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=args.seq_length,
    )


def loss_func(loss_mask: Tensor | None, losses: Tensor, model: GPTModel | None = None) -> tuple[Tensor, Tensor, dict]:
    """Sum of the unmasked token losses and their number; Megatron divides after summing over ranks.

    Args:
        loss_mask: ``[b, s]``, 1 for a token that counts.
        losses: ``[b, s]`` cross-entropy per token.

    Returns:
        summed loss, number of tokens (int32), and ``{"lm loss": [sum, tokens]}`` for the log.
    """
    assert loss_mask is not None, "Megatron calls this on the last stage, where the mask is"
    args = get_args()
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)

    checks = []
    if args.check_for_nan_in_loss_and_grad:
        checks += [(torch.isnan, "found NaN in local forward loss calculation", True)]
        checks += [(torch.isinf, "found Inf in local forward loss calculation", True)]
    if args.check_for_spiky_loss:
        spiky = partial(get_rerun_state_machine().is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss")
        checks += [(spiky, "Spiky loss", False)]
    for rejects, message, fatal in checks:
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=rejects, message=message, tolerance=0.0, fatal=fatal
        )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def forward_step(
    data_iterator: Iterator, model: GPTModel, return_schedule_plan: bool = False
) -> tuple[Tensor, partial]:
    """Megatron's ``forward_step_func`` for GPT.

    Args:
        data_iterator: yields collated samples.
        model: this (virtual) stage's model, wrapped or not.
        return_schedule_plan: build the plan for overlapped expert-parallel communication instead of running.

    Returns:
        the stage's output (``[s, b, d]``, or token losses on the last stage) and the loss function.
    """
    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    with straggler(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
        packed = packed_sequence_params(batch, args)
    timers("batch-generator").stop()

    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    loss = partial(loss_func, batch["loss_mask"], model=model)
    with straggler:
        if return_schedule_plan:
            return model.build_schedule_plan(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"]), loss
        output = model(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"], packed_seq_params=packed)
    return output, loss
