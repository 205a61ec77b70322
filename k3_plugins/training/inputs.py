"""What a command line names and Megatron would only miss later: sizes, modules, tokenizers, data files.

Checked before anything is built, so that a wrong name is a sentence with exit code 2 and not a traceback, or a silent
default, in the middle of the set-up.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from argparse import Namespace

from k3_plugins.feature import FeatureError

_POSITIVE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "train_samples",
)
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")


def check_sizes(args: Namespace) -> None:
    """Numbers without which, or with which, nothing can be computed.

    Raises:
        FeatureError: naming the flag and its value.
    """
    for name in _NEEDED:
        if getattr(args, name) is None:
            model = "" if name in ("seq_length", "micro_batch_size") else ", or choose a model with --k3-model"
            raise FeatureError(f"{_flag(name)} is missing; give it{model}")
    skipped = {"train_iters", "train_samples"} if args.skip_train else set()
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and value < 1 and name not in skipped:
            raise FeatureError(f"{_flag(name)} {value} must be at least 1")
    for name in ("lr", "min_lr", "weight_decay", "clip_grad"):
        value = getattr(args, name)
        if value is not None and not math.isfinite(value):
            raise FeatureError(f"{_flag(name)} {value} must be a finite number")


def check_evaluation(args: Namespace) -> None:
    """For training: what Megatron divides by when it counts validation samples.

    Raises:
        FeatureError: naming the flag and its value.
    """
    counted = not (args.skip_train or args.full_validation or args.perform_rl_step)
    if counted and not (args.eval_interval or 0) > 0:
        raise FeatureError(
            f"--eval-interval {args.eval_interval}: give a number of steps; Megatron counts validation samples by it,"
            " with --eval-iters 0 too"
        )


def check_layout(args: Namespace) -> None:
    """What Megatron refuses with a traceback in the first forward pass only, or with names that nobody typed.

    Raises:
        FeatureError: naming the flag to give.
    """
    tensor = args.tensor_model_parallel_size
    if args.num_experts is not None and tensor > 1 and not args.sequence_parallel and not args.skip_train:
        raise FeatureError(
            f"--num-experts {args.num_experts} with --tensor-model-parallel-size {tensor}: Megatron trains MoE layers"
            " under tensor parallelism with sequence parallelism only; add --sequence-parallel"
        )
    data, rest = divmod(args.world_size, tensor * args.pipeline_model_parallel_size * args.context_parallel_size)
    same = args.eval_global_batch_size is None and args.eval_micro_batch_size is None
    if same and not rest and (args.global_batch_size or 0) % (args.micro_batch_size * max(data, 1)):
        raise FeatureError(
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size"
            f" {args.micro_batch_size} x {data} data-parallel ranks"
        )


def check_derived_sizes(args: Namespace) -> None:
    """Sizes that Megatron's validation has derived and does not look at again.

    Raises:
        FeatureError: naming the flag to give.
    """
    if args.ffn_hidden_size < 1:
        raise FeatureError(
            f"--ffn-hidden-size would be {args.ffn_hidden_size}: under --swiglu Megatron rounds two thirds of 4 x"
            f" --hidden-size {args.hidden_size} down to a multiple of 64; give --ffn-hidden-size"
        )


def check_spec(args: Namespace) -> None:
    """A ``--spec`` that cannot be imported; Megatron logs it and builds the default model.

    Raises:
        FeatureError: naming the module.
    """
    if args.spec is None or len(args.spec) != 2:
        return
    module, name = args.spec
    try:
        found = hasattr(importlib.import_module(module), name)
    except Exception as error:  # a module of the user's can fail in any way
        raise FeatureError(
            f"--spec {module} {name}: the module cannot be imported ({type(error).__name__}: {error}); correct the "
            "name or put its folder on PYTHONPATH"
        ) from error
    if not found:
        raise FeatureError(f"--spec {module} {name}: the module has no {name!r}; name a function or ModuleSpec in it")


def check_tokenizer(args: Namespace) -> None:
    """A tokenizer that is a path must exist; the default one needs files or a package to fetch them.

    Raises:
        FeatureError: naming the flag.
    """
    model = args.tokenizer_model
    if model is not None and str(model).startswith(("/", "./", "../", "~")) and not os.path.exists(model):
        raise FeatureError(f"--tokenizer-model {model} does not exist; correct the path")
    if args.tokenizer_type == "GPT2BPETokenizer" and args.vocab_file is None and _missing("wget"):
        raise FeatureError(
            "no tokenizer is named, and Megatron's default, GPT2BPETokenizer, needs --vocab-file and --merge-file; "
            "use the flags that k3_plugins.data.prepare prints for the data set, or name --tokenizer-type"
        )


DATA_ARGUMENTS = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
)
"""Megatron's arguments that name data; ``mock_data`` needs none."""


def check_data_named(args: Namespace) -> None:
    """Some data must be named.

    Raises:
        FeatureError: if none is.
    """
    if not args.mock_data and all(getattr(args, name) is None for name in DATA_ARGUMENTS):
        raise FeatureError(
            "no data is named: give --train-data-path and --valid-data-path (python -m k3_plugins.data.prepare makes a "
            "data set from text and prints its flags), or --data-path, or --mock-data"
        )


def check_data_files(args: Namespace) -> None:
    """The indexed data sets that the flags name are there. For ranks that read data.

    Raises:
        FeatureError: naming the flag and the missing file.
    """
    if args.mock_data or args.sft:
        return
    for name in ("data_args_path", "per_split_data_args_path"):
        path = getattr(args, name)
        if path is not None and "://" not in path and not os.path.isfile(path):
            raise FeatureError(f"{_flag(name)} {path} does not exist; correct the path")
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in _prefixes(getattr(args, name)):
            for suffix in (".idx", ".bin"):
                if not os.path.isfile(prefix + suffix):
                    raise FeatureError(
                        f"{_flag(name)} {prefix}: there is no {prefix}{suffix}; name a data set without its suffix, as "
                        "python -m k3_plugins.data.prepare prints it"
                    )


def _prefixes(words: list[str] | None) -> list[str]:
    """Local data sets of a blend: either prefixes alone, or a weight before each."""
    words = list(words or ())
    if len(words) > 1 and len(words) % 2 == 0 and all(map(_is_number, words[::2])):
        words = words[1::2]
    return [word for word in words if "://" not in word]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
