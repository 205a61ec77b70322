"""``python -m k3_plugins.pretrain_vlm --vision-data DIR ...``: pre-train on images and text from the first step.

    --vision-data DIR          webdataset shards with KEY.png and a text each (k3_plugins.data.render makes some);
                               an animated PNG is a video
    --vision-valid-data DIR    the same for validation
    --vision-text SUFFIX       the text: txt (captions) or svg (the drawing's code) [txt]
    --vision-text-alone        take texts without an image too; otherwise they are refused as damaged pairs
    --vision-skip-bad          leave out samples that cannot be trained on and count them, instead of ending the job;
                               decodes every image once before training
    --vision-reader READER     shards: every tar shard of DIR, by Megatron's own samplers; energon: a prepared
                               Megatron-Energon data set (captions), in Energon's order [shards]
    --dataloader-save DIR      where Energon's place in its stream is kept with every checkpoint; needed to resume

and every flag of ``k3_plugins.pretrain_gpt`` but those of its data. Needs ``--k3-plugins ...,moonvit``. Image tokens
are masked from the next-token loss; texts are bytes (``--tokenizer-type NullTokenizer --vocab-size 258``).
"""

from __future__ import annotations

import argparse
import sys
import time
from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3_plugins.activation import Activation

_PROGRAM_START = time.time()  # before the heavy imports, for Megatron's start-up report

DOOR = "k3_plugins.pretrain_vlm"


def main(argv: list[str] | None = None) -> int:
    """Run the training; returns the exit code.

    Args:
        argv: command line without the program name; ``sys.argv[1:]`` when None.
    """
    if argv is not None:
        sys.argv[1:] = argv
    from k3_plugins.bootstrap import activate

    own, sys.argv[1:] = parse(sys.argv[1:])  # Megatron parses sys.argv itself, more than once
    activation = activate(sys.argv[1:], door=DOOR)
    train(own, activation)
    return 0


def parse(argv: list[str]) -> tuple[Namespace, list[str]]:
    """The door's own flags, and the command line without them."""
    parser = argparse.ArgumentParser(prog=f"python -m {DOOR}", add_help=False, allow_abbrev=False)
    parser.add_argument("--vision-data", metavar="DIR")
    parser.add_argument("--vision-valid-data", metavar="DIR")
    parser.add_argument("--vision-text", default="txt", metavar="SUFFIX")
    parser.add_argument("--vision-text-alone", action="store_true")
    parser.add_argument("--vision-skip-bad", action="store_true")
    parser.add_argument("--vision-reader", choices=("shards", "energon"), default="shards")
    parser.add_argument("--dataloader-save", metavar="DIR")
    if {"-h", "--help"} & set(argv):
        print(__doc__)
    return parser.parse_known_args(argv)


def train(own: Namespace, activation: Activation | None) -> None:
    """Megatron's ``pretrain`` over pairs, then the run's report on the last rank."""
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from k3_plugins.pretrain_gpt import embedding_ranks, write_report

    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    args = parse_and_validate_args()
    check(own, args, activation)
    from k3_plugins.vision.training.step import attach_encoder, dataset_provider, forward_step
    from k3_plugins.vision.training.usable import PairSource

    if own.vision_reader == "energon":
        args.dataloader_type, args.dataloader_save = "external", own.dataloader_save
    source = PairSource(own.vision_text, own.vision_text_alone, own.vision_skip_bad, own.vision_reader)
    assert activation is not None, "check() asks for moonvit"
    vit = activation.configs["moonvit"]
    model = gpt_config_from_args(args)
    model.pre_wrap_hooks.append(attach_encoder(vit))
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        dataset_provider(own.vision_data, own.vision_valid_data, source, vit),
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=embedding_ranks,
    )
    write_report(get_args())


def check(own: Namespace, args: Namespace, activation: Activation | None) -> None:
    """End with exit code 2 if the encoder or the data is not named, or flags ask for what this door does not do."""
    from k3_plugins.agreement import end_every_rank
    from k3_plugins.training.inputs import DATA_ARGUMENTS
    from k3_plugins.vision.training.tokens import SIZE

    packing = ("dataloader_inter_document_masking", "reset_position_ids", "reset_attention_mask")
    problems = [
        (activation is None or "moonvit" not in activation.names, "add moonvit to --k3-plugins"),
        (not own.vision_data, "no images are named: give --vision-data DIR"),
        (
            args.eval_iters > 0 and not own.vision_valid_data,
            f"--eval-iters {args.eval_iters} needs --vision-valid-data DIR; give it, or --eval-iters 0",
        ),
        *(
            (bool(getattr(args, name)), f"--{name.replace('_', '-')} belongs to k3_plugins.pretrain_gpt; drop it")
            for name in (*DATA_ARGUMENTS, "mock_data", "sft")
        ),
        *(
            (getattr(args, name), f"--{name.replace('_', '-')}: rows of pairs are read as one text; drop it")
            for name in packing
        ),
        (
            args.tokenizer_type != "NullTokenizer",
            f"--tokenizer-type {args.tokenizer_type}: texts are bytes here; give --tokenizer-type NullTokenizer",
        ),
        (
            (args.vocab_size or 0) < SIZE,
            f"--vocab-size {args.vocab_size} must be at least {SIZE}: 256 bytes, the end and the image token",
        ),
        (
            own.vision_text_alone and args.overlap_grad_reduce,
            "--overlap-grad-reduce waits for the encoder's gradients in every step's last micro-batch, and with"
            " --vision-text-alone it may have no image; drop one of the two",
        ),
        *energon_problems(own, args, activation),
        (
            args.hybrid_context_parallel,
            "--hybrid-context-parallel packs texts of several lengths, and rows of pairs have one; drop it",
        ),
        (args.full_validation, "--full-validation is not supported here; give --eval-iters"),
        (args.dataloader_type == "external", "--dataloader-type external is not supported here; drop it"),
    ]
    for wrong, text in problems:
        if wrong:
            end_every_rank(text)


def energon_problems(own: Namespace, args: Namespace, activation: Activation | None) -> list[tuple[bool, str]]:
    """What does not go with ``--vision-reader energon``."""
    from k3_plugins.compat.optional import require
    from k3_plugins.feature import FeatureError

    if own.vision_reader != "energon":
        text = f"--dataloader-save {own.dataloader_save}: Megatron's samplers need no state of their own; drop it"
        return [(own.dataloader_save is not None, text)]
    try:
        require("megatron.energon", "--vision-reader energon")
    except FeatureError as error:
        return [(True, str(error))]
    reader = "--vision-reader energon"
    return [
        (
            own.vision_text != "txt",
            f"--vision-text {own.vision_text}: with {reader} the text is what .nv-meta/dataset.yaml names as caption;"
            " drop it",
        ),
        (own.vision_text_alone, f"--vision-text-alone: with {reader} every sample has an image; drop it"),
        (
            activation is not None and "vision-bubble" in activation.names,
            f"vision-bubble reads images in its own order, which {reader} cannot; give --vision-reader shards",
        ),
        (
            bool(own.dataloader_save) and args.context_parallel_size > 1,
            f"--dataloader-save {own.dataloader_save}: Megatron would write a file from several context-parallel"
            " ranks at once; drop it, or --context-parallel-size",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
