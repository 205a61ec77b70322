"""The smallest stock Megatron GPT pre-training script: the wheel's own `pretrain`, nothing of ours but the
platform.

    python -m tests.harness.stock_gpt [Megatron's flags]

Megatron's wheel does not ship pretrain_gpt.py; this provides the four functions `pretrain` wants, for mock
data or an indexed data set, without the branches for SFT, distillation, fill-in-the-middle and packed
sequences. K3_TEST_SETUP names a module:function to call before the model is built (tests use it to hook into Megatron).
K3_TEST_WITHOUT lists optional packages to leave out: where ranks are fresh interpreters, importing packages that a run
does not use takes longer than the training.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial

from k3_plugins import platform

sys.modules.update(dict.fromkeys(filter(None, os.environ.get("K3_TEST_WITHOUT", "").split(","))))
platform.select("cpu")

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import (  # noqa: E402
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank  # noqa: E402
from megatron.training import get_args, pretrain  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage  # noqa: E402


def datasets(num_samples, vp_stage=None):
    """Train, validation and test sets, built on tensor-parallel rank 0 of the first and last stage."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def on_this_rank() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    # Megatron's 100 000 mock documents are indexed anew by every run, which takes longer than it trains.
    MockGPTLowLevelDataset.size = int(os.environ.get("K3_TEST_MOCK_DOCUMENTS", "500"))
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, on_this_rank, config).build()


datasets.is_distributed = True


def batch_of(data_iterator, vp_stage):
    """The micro-batch of this rank, or {} on a stage that needs none."""
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return {}
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        batch = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items()}
        batch.setdefault("attention_mask", None)
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


def loss_of(loss_mask, output):
    """Sum of the token losses, the number of tokens, and both as the report, as Megatron's loop wants them."""
    loss_mask = loss_mask.view(-1).float()
    loss = (output.view(-1).float() * loss_mask).sum()
    tokens = loss_mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    """One micro-batch through this stage."""
    batch = batch_of(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
    )
    return output, partial(loss_of, batch.get("loss_mask"))


def main() -> None:
    args = parse_and_validate_args()
    if setup := os.environ.get("K3_TEST_SETUP"):
        module, function = setup.split(":")
        getattr(importlib.import_module(module), function)()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
