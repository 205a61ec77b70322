"""``python -m k3_plugins.pretrain_gpt ...``: pre-train a GPT with Megatron's own loop, from the wheel alone.

Takes every flag of Megatron's ``pretrain_gpt.py``. The plug-in is activated before torch or Megatron is imported;
without ``--k3-plugins`` nothing is patched.
"""

import sys
import time
from argparse import Namespace

_PROGRAM_START = time.time()  # before the heavy imports, for Megatron's start-up report


def main(argv: list[str] | None = None) -> int:
    """Run the training; returns the exit code.

    Args:
        argv: command line without the program name; ``sys.argv[1:]`` when None.
    """
    if argv is not None:
        sys.argv[1:] = argv  # Megatron parses sys.argv itself, more than once
    from k3_plugins.bootstrap import OWN_DOOR, activate, explained_exit

    words = sys.argv[1:]
    activate(words, door=OWN_DOOR)
    with explained_exit(words):
        train()
    return 0


def train() -> None:
    """Megatron's ``pretrain`` on this process's command line, then the run's report on the last rank."""
    from megatron.core.enums import ModelType
    from megatron.training import get_args, inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from k3_plugins.training.datasets import train_valid_test_datasets
    from k3_plugins.training.forward_step import forward_step

    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    restartable_pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    check_named(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    restartable_pretrain(
        config,
        train_valid_test_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=embedding_ranks,
    )
    write_report(get_args())


def check_named(args: Namespace) -> None:
    """End with exit code 2 if the command line names no data, or names a module or checkpoint that is not there.

    With a feature on, the engine has checked the last two already. Megatron would go on without them: with the default
    model, from scratch.
    """
    from k3_plugins import activation, bootstrap, manifest
    from k3_plugins.agreement import end_every_rank
    from k3_plugins.feature import FeatureError
    from k3_plugins.training.inputs import check_data_named, check_spec

    try:
        check_data_named(args)
        if activation.current() is None:
            check_spec(args)
            if not bootstrap.opened().allow_empty_load:
                manifest.require_checkpoint(args)
    except FeatureError as error:
        end_every_rank(str(error))


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Pipeline ranks that hold word embeddings: the first, and with tied weights the last and MTP's."""
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def write_report(args: Namespace) -> None:
    """Draw the loss curves and write the JSON summary beside the TensorBoard files, where Megatron wrote them.

    Megatron's writer lives on the last rank, so that rank knows the scalars are flushed.
    """
    from megatron.training.global_vars import get_tensorboard_writer

    writer = get_tensorboard_writer()
    if writer is None:
        return
    writer.flush()
    from k3_plugins.report import write_report as write

    write(args.tensorboard_dir)


if __name__ == "__main__":
    sys.exit(main())
