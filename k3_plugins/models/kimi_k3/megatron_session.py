"""A Megatron of one process for tools: conversion and generation use the product's own door, parser and model builder.

    activation = open_door(features, platform="cpu", door=...)   # once in a process; Megatron is not imported before
    args = initialize(activation, values)
    layout = expected_layout(args)                               # what a checkpoint of this model holds; no memory
    model = build(args)
"""

from __future__ import annotations

import argparse
import io
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from k3_plugins.activation import Activation, active
from k3_plugins.feature import FeatureError

CPU_WORDS = """--transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --distributed-backend gloo""".split()
"""What Megatron needs where neither apex nor Transformer Engine is installed."""

ONE_PROCESS_WORDS = "--micro-batch-size 1 --global-batch-size 1 --ckpt-format torch_dist".split()


def open_door(features: Sequence[str], platform: str | None, door: str) -> Activation:
    """Activate the features.

    Args:
        features: for ``--k3-plugins``.
        platform: for ``--k3-platform``; None chooses.
        door: for messages.

    Raises:
        SystemExit: with code 2 and a sentence, if the features cannot be had.
    """
    from k3_plugins.bootstrap import activate

    sys.argv[1:] = ["--k3-plugins", ",".join(features), *(["--k3-platform", platform] if platform else [])]
    activate(sys.argv[1:], door)
    return active()


def initialize(activation: Activation, values: Mapping[str, Any], extra: Sequence[str] = ()) -> Namespace:
    """Parse and validate the arguments, and set up process groups of one.

    Args:
        activation: what ``open_door`` returned.
        values: values by argparse destination, as ``ModelDescription.arguments`` gives them.
        extra: further words for the command line.

    Returns:
        Megatron's validated arguments.

    Raises:
        SystemExit: with code 2 and a sentence, if Megatron or a feature refuses the arguments.
    """
    on_cpu = activation.platform == "cpu"
    sys.argv[1:] += [*ONE_PROCESS_WORDS, *(CPU_WORDS if on_cpu else []), *words(values), *extra]

    import torch
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    with quiet():
        args = parse_and_validate_args()
        torch.distributed.init_process_group(
            "gloo" if on_cpu else "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        initialize_megatron()
    return args


@contextmanager
def quiet() -> Iterator[None]:
    """Megatron prints every argument at the start of a training; a tool's output is its result."""
    with redirect_stdout(io.StringIO()):
        yield


def words(values: Mapping[str, Any]) -> list[str]:
    """The command-line words that give Megatron's parser these values; defaults are left out.

    Args:
        values: by argparse destination. None stands for a flag that is not given.

    Raises:
        FeatureError: for a destination that no flag of the active features sets to that value.
    """
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, []).append(action)
    result = []
    for dest, value in values.items():
        if value is None or (dest in actions and value == parser.get_default(dest)):
            continue
        if dest not in actions:
            raise FeatureError(f"this model needs a flag that sets {dest}, and the active features have none")
        result += _flag(actions[dest], dest, value)
    return result


def _flag(actions: Sequence[argparse.Action], dest: str, value: Any) -> list[str]:
    for action in actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        if isinstance(action, argparse.BooleanOptionalAction):
            negative = [flag for flag in flags if flag.startswith("--no-")]
            return [negative[0] if value is False else next(flag for flag in flags if flag not in negative)]
        if action.nargs == 0:
            if action.const == value:
                return [flags[0]]
            continue
        if isinstance(value, (list, tuple)) and action.nargs in (None, "?"):
            return [flags[0], str(list(value)).replace(" ", "")]
        if isinstance(value, (list, tuple)):
            return [flags[0], *map(str, value)]
        return [flags[0], str(value)]
    raise FeatureError(f"no flag sets {dest} to {value!r}")


def build(args: Namespace) -> Any:
    """The whole model on this process, by Megatron's builder; with ``moonvit`` its vision encoder too."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    config = gpt_config_from_args(args)
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    vision = active().configs.get("moonvit")
    if vision is not None:
        from k3_plugins.vision.training.step import attach_encoder

        attach_encoder(vision)([model])
    return model


@dataclass(frozen=True)
class Layout:
    """What a checkpoint of a model holds."""

    tensors: dict[str, tuple[int, ...]]
    """Key -> global shape."""
    objects: dict[str, Any]
    """Unique key -> value of what is no tensor (empty extra states of linear layers)."""
    metadata: dict[str, Any]
    """Megatron's content metadata."""


def expected_layout(args: Namespace) -> Layout:
    """Keys and shapes, from the model itself, built with tensors that have no memory."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.utils import _clean_metadata_for_serialization
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata
    from torch._subclasses.fake_tensor import FakeTensorMode

    metadata = _build_sharded_state_dict_metadata(args)
    with FakeTensorMode():
        state = {"model": build(args).sharded_state_dict(metadata=metadata)}
        apply_factories(state)
    tensors, objects = {}, {}
    for item in nested_values(state):
        if isinstance(item, ShardedTensor):
            tensors[item.key] = tuple(item.global_shape)
        elif isinstance(item, ShardedObject):
            objects[item.unique_key] = item.data
    return Layout(tensors, objects, _clean_metadata_for_serialization(metadata))
