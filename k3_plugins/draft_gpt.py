"""``python -m k3_plugins.draft_gpt --load TARGET --finetune ...``: train a draft model for speculative decoding.

    --draft-steps K        steps that the draft is unrolled in training [7]

and every flag of ``k3_plugins.pretrain_gpt``, with ``--k3-plugins ...,attnres`` and ``--mtp-num-layers 1``. The
pre-trained multi-token-prediction layer becomes the draft; the model itself is the target and does not change.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from argparse import Namespace
from typing import TYPE_CHECKING

from k3_plugins.finetune_gpt import PER_TOKEN

if TYPE_CHECKING:
    from k3_plugins.activation import Activation

_PROGRAM_START = time.time()  # before the heavy imports, for Megatron's start-up report

DOOR = "k3_plugins.draft_gpt"

FEATURES = {"kda", "gated-mla", "attnres", "latent-moe", "quantile-balancing", "moonep", "mxfp4-qat"}
"""Features under which a draft can be trained."""

BLOCKS = 4
"""The draft reads the outputs of Attention Residual blocks 1, 4 and the last."""


def main(argv: list[str] | None = None) -> int:
    """Run the training; returns the exit code.

    Args:
        argv: command line without the program name; ``sys.argv[1:]`` when None.
    """
    if argv is not None:
        sys.argv[1:] = argv
    from k3_plugins.bootstrap import activate

    own, rest = parse(sys.argv[1:])
    sys.argv[1:] = [*rest, PER_TOKEN]  # Megatron parses sys.argv itself, more than once
    activation = activate(sys.argv[1:], door=DOOR)
    train(own, activation)
    return 0


def parse(argv: list[str]) -> tuple[Namespace, list[str]]:
    """The door's own flags, and the command line without them."""
    parser = argparse.ArgumentParser(prog=f"python -m {DOOR}", add_help=False, allow_abbrev=False)
    parser.add_argument("--draft-steps", type=int, default=7, metavar="K")
    if {"-h", "--help"} & set(argv):
        print(__doc__)
    return parser.parse_known_args(argv)


def train(own: Namespace, activation: Activation | None) -> None:
    """Megatron's ``pretrain`` on the draft, then the check of the target."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, print_rank_0, set_startup_timestamps
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from k3_plugins.pretrain_gpt import embedding_ranks

    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    args = parse_and_validate_args()
    saved = check(own, args, activation)
    from k3_plugins.post_training.draft.model import attach
    from k3_plugins.post_training.draft.training import Watch, forward_step
    from k3_plugins.training.datasets import train_valid_test_datasets

    watch = Watch()
    model = gpt_config_from_args(args)
    model.pre_wrap_hooks.append(attach(own.draft_steps, saved))
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        train_valid_test_datasets,
        ModelType.encoder_or_decoder,
        functools.partial(forward_step, watch),
        get_embedding_ranks=embedding_ranks,
    )
    line = watch.end()
    if line is not None:
        print_rank_0(line)


def check(own: Namespace, args: Namespace, activation: Activation | None) -> bool:
    """End with exit code 2 if there is no target or no layer to train, or flags ask for what this door does not do.

    Returns:
        Whether the checkpoint to be loaded is a draft's, with the fusion matrix in it.
    """
    from k3_plugins.agreement import end_every_rank
    from k3_plugins.feature import FeatureError
    from k3_plugins.training.inputs import check_data_named

    names = set() if activation is None else set(activation.names)
    blocks = None
    if activation is not None and "attnres" in names:
        from k3_plugins.transformer.attention_residuals.config import max_sources

        size = activation.configs["attnres"].attn_res_block_size
        blocks = max_sources(args.num_layers, size) - 1
    other = sorted(names - FEATURES)
    packing = ("dataloader_inter_document_masking", "reset_position_ids", "reset_attention_mask")
    layout = ("pipeline", "tensor", "context")
    problems = [
        (
            blocks is None,
            "the draft reads the outputs of Attention Residual blocks: add attnres to --k3-plugins",
        ),
        (bool(other), f"a draft cannot be trained under {', '.join(other)}; drop it from --k3-plugins"),
        (
            args.mtp_num_layers != 1,
            f"--mtp-num-layers {args.mtp_num_layers}: the pre-trained multi-token-prediction layer becomes the draft, "
            "so the model must have exactly one; pre-train with --mtp-num-layers 1 and pass it here too",
        ),
        (
            blocks is not None and blocks < BLOCKS,
            f"the model has {blocks} Attention Residual blocks ({args.num_layers} layers, --attn-res-block-size), and "
            f"the draft reads the outputs of blocks 1, {BLOCKS} and the last one: it needs at least {BLOCKS}",
        ),
        (own.draft_steps < 1, f"--draft-steps {own.draft_steps} must be at least 1"),
        (
            own.draft_steps >= args.seq_length,
            f"--draft-steps {own.draft_steps} looks further ahead than --seq-length {args.seq_length}; lower it",
        ),
        *(
            (
                getattr(args, f"{kind}_model_parallel_size" if kind != "context" else "context_parallel_size") > 1,
                f"a draft cannot be trained under {kind} parallelism; leave it at 1 and use data or expert parallelism",
            )
            for kind in layout
        ),
        *(
            (getattr(args, name), f"--{name.replace('_', '-')}: documents are not kept apart here; drop it")
            for name in packing
        ),
        (
            args.load is None,
            "there is no target: give --load DIR, a model pre-trained with --mtp-num-layers 1, and --finetune",
        ),
        (args.ckpt_format != "torch_dist", f"--ckpt-format {args.ckpt_format}: only torch_dist is supported here"),
        (args.mtp_detach_heads, "--mtp-detach-heads belongs to pre-training; drop it"),
        (args.full_validation, "--full-validation is not supported here; give --eval-iters"),
        (args.overlap_moe_expert_parallel_comm, "--overlap-moe-expert-parallel-comm is not supported here; drop it"),
    ]
    try:
        for wrong, text in problems:
            if wrong:
                raise FeatureError(text)
        check_data_named(args)
        return _holds_draft(args)
    except FeatureError as error:
        end_every_rank(str(error))


def _holds_draft(args: Namespace) -> bool:
    """Whether ``--load`` leads to a draft's checkpoint; a target's must be loaded with --finetune."""
    from torch.distributed.checkpoint import FileSystemReader

    from k3_plugins import manifest
    from k3_plugins.feature import FeatureError
    from k3_plugins.post_training.draft.model import FUSION

    found = manifest.find(args.load, args.ckpt_step)
    if found is None:
        raise FeatureError(f"--load {args.load} holds no checkpoint; correct the path")
    try:
        names = FileSystemReader(found.folder).read_metadata().state_dict_metadata
    except Exception as error:  # a missing file, or whatever unpickling another one raises
        raise FeatureError(
            f"--load {args.load}: {found.folder} is no torch_dist checkpoint ({type(error).__name__}: {error}); give "
            "one that was saved with --ckpt-format torch_dist"
        ) from error
    if any(name.endswith(f"{FUSION}.weight") for name in names):
        return True
    if not args.finetune:
        raise FeatureError(
            f"--load {args.load} holds a target and no draft yet: pass --finetune, so that the draft's training begins "
            "at iteration 0 with an optimizer of its own"
        )
    return False


if __name__ == "__main__":
    sys.exit(main())
