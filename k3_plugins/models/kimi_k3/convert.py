"""Convert Kimi-Linear and Kimi-K3 checkpoints between Hugging Face and Megatron.

    python -m k3_plugins.models.kimi_k3.convert --from-hf HF_FOLDER --to CHECKPOINT
    python -m k3_plugins.models.kimi_k3.convert --to-hf HF_FOLDER --from CHECKPOINT

The Megatron checkpoint is a ``release`` checkpoint in the ``torch_dist`` format, so ``--load CHECKPOINT`` with the
printed flags trains on from it under any parallel layout; they are printed as words of a shell, to be pasted or read
with ``shlex.split``. Nothing is dropped or made up: a missing, unexpected or misshapen tensor, a config field that is
not understood, or a damaged file ends the conversion with a list, before the target appears. Tensors pass through one
by one.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from k3_plugins.failure import fail
from k3_plugins.feature import FeatureError
from k3_plugins.models.kimi_k3.hf_config import ConversionError

DOOR = "k3_plugins.models.kimi_k3.convert"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def size(text: str) -> int:
    """Bytes of ``5GB``, ``300MB`` or a plain number."""
    unit = _UNITS.get(text[-2:].upper(), 1)
    number = text[:-2] if unit > 1 else text
    if not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; type a number of bytes, or one like 5GB")
    return int(number) * unit


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exactly one direction is asked for."""
    parser = argparse.ArgumentParser(prog=f"python -m {DOOR}", description=__doc__.splitlines()[0])
    parser.add_argument("--from-hf", type=Path, metavar="DIR", help="Hugging Face folder to read")
    parser.add_argument("--to", type=Path, metavar="DIR", help="Megatron checkpoint folder to write; must not exist")
    parser.add_argument("--to-hf", type=Path, metavar="DIR", help="Hugging Face folder to write; must not exist")
    parser.add_argument("--from", type=Path, dest="source", metavar="DIR", help="Megatron checkpoint folder to read")
    parser.add_argument("--ckpt-step", type=int, help="with --from: this iteration instead of the latest")
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="with --to-hf: take config.json, tokenizer and the layout of names from this Hugging Face folder; by "
        "default from the conversion that the checkpoint came from, else config.json is written anew",
    )
    parser.add_argument("--max-shard-size", type=size, default=size("5GB"), help="with --to-hf: bytes of a shard (5GB)")
    parser.add_argument(
        "--unpack-experts",
        action="store_true",
        help="with --to-hf: write the experts of quantization-aware training (mxfp4-qat) as ordinary tensors that hold "
        "their MXFP4 values, instead of packed",
    )
    parser.add_argument(
        "--without-vision",
        action="store_true",
        help="with --from-hf: the language model alone; the vision tower and its projector are left out",
    )
    parser.add_argument(
        "--ignore-config-field",
        action="append",
        default=[],
        metavar="NAME",
        help="an unknown field of the Hugging Face config.json that does not change what the model computes",
    )
    args = parser.parse_args(argv)
    if (args.from_hf is None) == (args.to_hf is None):
        parser.error("give either --from-hf DIR --to DIR or --to-hf DIR --from DIR")
    if args.from_hf is not None and args.to is None:
        parser.error("--from-hf needs --to DIR")
    if args.to_hf is not None and args.source is None:
        parser.error("--to-hf needs --from DIR")
    if args.from_hf is not None and args.unpack_experts:
        parser.error("--unpack-experts belongs to --to-hf; packed experts are always unpacked on import")
    if args.to_hf is not None and args.without_vision:
        parser.error("--without-vision belongs to --from-hf; an export holds what the checkpoint holds")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one conversion; returns the exit code (2, with a message, if it cannot be done)."""
    args = arguments(argv)
    try:
        if args.from_hf is not None:
            from k3_plugins.models.kimi_k3.import_hf import import_checkpoint

            flags = import_checkpoint(args.from_hf, args.to, args.ignore_config_field, not args.without_vision)
            # A pattern like [1,0] and a folder with a space would not survive bash or zsh as they are.
            print(f"converted {args.from_hf} to {args.to}. To train on from it, use:\n  {shlex.join(flags)}")
        else:
            from k3_plugins.models.kimi_k3.export_hf import export_checkpoint

            export_checkpoint(
                args.source,
                args.to_hf,
                args.ckpt_step,
                args.hf_config,
                args.max_shard_size,
                args.ignore_config_field,
                args.unpack_experts,
            )
            print(f"converted {args.source} to {args.to_hf}")
    except (ConversionError, FeatureError) as error:
        fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
