"""``python -m k3_plugins.finetune_gpt --chat-data FILE.jsonl ...``: supervised fine-tuning of a GPT on conversations.

    --chat-data FILE [FILE ...]          conversations to train on, one JSON object a line
    --chat-valid-data FILE [FILE ...]    conversations for validation
    --chat-too-long error|drop           what happens to conversations that do not fit --seq-length [error]

and every flag of ``k3_plugins.pretrain_gpt`` but those of its data. Conversations go through the XTML template; the
loss is on what the assistant writes. ``--k3-plugins ...,mxfp4-qat`` trains the experts in MXFP4 from the first step on.
"""

import argparse
import sys
import time
from argparse import Namespace

_PROGRAM_START = time.time()  # before the heavy imports, for Megatron's start-up report

DOOR = "k3_plugins.finetune_gpt"

K3_SPEC = ["k3_plugins.models.kimi_k3.layer_specs", "gpt"]

PER_TOKEN = "--calculate-per-token-loss"
"""Rows hold different numbers of ids with a loss. Megatron's default, the mean of the micro-batches' means, would weigh
them by how they happen to be grouped, and under context parallelism by how they are cut."""


def main(argv: list[str] | None = None) -> int:
    """Run the training; returns the exit code.

    Args:
        argv: command line without the program name; ``sys.argv[1:]`` when None.
    """
    if argv is not None:
        sys.argv[1:] = argv
    from k3_plugins.bootstrap import activate, explained_exit

    own, rest = parse(sys.argv[1:])
    sys.argv[1:] = [*rest, PER_TOKEN]  # Megatron parses sys.argv itself, more than once
    activate(sys.argv[1:], door=DOOR)
    with explained_exit(rest):
        train(own)
    return 0


def parse(argv: list[str]) -> tuple[Namespace, list[str]]:
    """The door's own flags, and the command line without them."""
    parser = argparse.ArgumentParser(prog=f"python -m {DOOR}", add_help=False, allow_abbrev=False)
    parser.add_argument("--chat-data", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--chat-valid-data", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--chat-too-long", choices=("error", "drop"), default="error")
    if {"-h", "--help"} & set(argv):
        print(__doc__)
    return parser.parse_known_args(argv)


def train(own: Namespace) -> None:
    """Megatron's ``pretrain`` over conversations, then the run's report on the last rank."""
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from k3_plugins.post_training.sft.training import ChatFiles, dataset_provider, forward_step
    from k3_plugins.pretrain_gpt import embedding_ranks, write_report

    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    args = parse_and_validate_args()
    check(own, args)
    files = ChatFiles(tuple(own.chat_data), tuple(own.chat_valid_data), own.chat_too_long)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        config,
        dataset_provider(files),
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=embedding_ranks,
    )
    write_report(get_args())


def check(own: Namespace, args: Namespace) -> None:
    """End with exit code 2 if no conversations are named, or flags ask for what this door does not do."""
    from k3_plugins import activation, bootstrap, manifest
    from k3_plugins.agreement import end_every_rank
    from k3_plugins.feature import FeatureError
    from k3_plugins.training.inputs import DATA_ARGUMENTS, check_spec

    problems = [
        (not own.chat_data, "no conversations are named: give --chat-data FILE.jsonl"),
        *(
            (bool(getattr(args, name)), f"--{name.replace('_', '-')} belongs to k3_plugins.pretrain_gpt; drop it")
            for name in (*DATA_ARGUMENTS, "mock_data", "sft")
        ),
        (
            args.dataloader_inter_document_masking or args.reset_position_ids or args.reset_attention_mask,
            "a row holds one conversation, so there are no documents to keep apart; drop "
            "--dataloader-inter-document-masking, --reset-position-ids and --reset-attention-mask",
        ),
        (args.hybrid_context_parallel, "--hybrid-context-parallel packs sequences, fine-tuning does not; drop it"),
        (
            args.moe_router_enable_expert_bias and list(args.spec or ()) != K3_SPEC,
            "--moe-router-enable-expert-bias: Megatron's router cannot leave padding out of its counts; use the K3 "
            f"layers (--spec {' '.join(K3_SPEC)}), whose router can",
        ),
        (args.full_validation, "--full-validation is not supported here; give --eval-iters"),
        (args.overlap_moe_expert_parallel_comm, "--overlap-moe-expert-parallel-comm is not supported here; drop it"),
    ]
    try:
        for wrong, text in problems:
            if wrong:
                raise FeatureError(text)
        if activation.current() is None:
            check_spec(args)
            if not bootstrap.opened().allow_empty_load:
                manifest.require_checkpoint(args)
    except FeatureError as error:
        end_every_rank(str(error))


if __name__ == "__main__":
    sys.exit(main())
