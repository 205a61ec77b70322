"""Train, validation and test data sets of a GPT, from Megatron's command line.

Every option of Megatron's own GPT data path is passed on: blends, splits, caches, fill-in-the-middle, SFT, mock data.
"""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from k3_plugins.training.provider import on_every_rank


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Megatron's data-set config for the parsed command line."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = args.per_dataset_sequences_path
    options = dict(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=json.loads(Path(sequences).read_text()) if sequences is not None else None,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
        hybrid_context_parallel=args.hybrid_context_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    if not args.fim_data:
        return GPTDatasetConfig(**options)
    special = {name: getattr(args, f"fim_{name}_token") for name in ("prefix", "middle", "suffix", "pad", "eod")}
    return GPTFIMDatasetConfig(
        **options,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_extra_tokens=special,
        fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate,
        fim_no_prefix=args.fim_no_prefix,
    )


def needs_data(args: Namespace, vp_stage: int | None = None) -> bool:
    """Whether this rank reads samples: tensor-parallel rank 0 of a stage that embeds, predicts, or cuts documents."""
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    return reads_cu_seqlens(args) or holds_tokens(args, vp_stage)


def holds_tokens(args: Namespace, vp_stage: int | None = None) -> bool:
    """Whether this stage embeds tokens or predicts them."""
    return is_first_or_last_pipeline_stage(vp_stage) or predicts_further_tokens(args, vp_stage)


def predicts_further_tokens(args: Namespace, vp_stage: int | None = None) -> bool:
    """Whether this stage holds multi-token-prediction layers."""
    if args.mtp_num_layers is None:
        return False
    config = core_transformer_config_from_args(args)
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def reads_cu_seqlens(args: Namespace) -> bool:
    """Whether every stage needs the boundaries of packed sequences."""
    return args.sft or args.dataloader_inter_document_masking


@on_every_rank
def train_valid_test_datasets(sizes: list[int], vp_stage: int | None = None) -> tuple:
    """Megatron's ``train_valid_test_dataset_provider`` for GPT.

    Args:
        sizes: number of train, validation and test samples.
        vp_stage: virtual pipeline stage.
    """
    args = get_args()
    if args.sft:
        dataset = SFTDataset
    elif args.mock_data:
        dataset = MockGPTDataset
    elif args.fim_data:
        dataset = GPTFIMDataset
    else:
        dataset = GPTDataset
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    built = BlendedMegatronDatasetBuilder(
        dataset, sizes, partial(needs_data, args, vp_stage), dataset_config(args)
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    return built
