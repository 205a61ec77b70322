"""The engine's own patches: present when at least one feature is on, and listed with the others.

Each is a WRAP that calls the original with the arguments it was given.
"""

from __future__ import annotations

import functools
import os
import re
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from k3_plugins import activation_report, manifest
from k3_plugins.activation import Activation, current
from k3_plugins.agreement import AbortChannel, Disagreement, compare, end_every_rank, layout
from k3_plugins.arguments import config_from_args, described_model, extend_parser
from k3_plugins.failure import fail, place_of
from k3_plugins.feature import FeatureError, Witness
from k3_plugins.patching import Patch, PatchError, PatchKind
from k3_plugins.training.inputs import (
    check_data_files,
    check_derived_sizes,
    check_evaluation,
    check_layout,
    check_sizes,
    check_spec,
    check_tokenizer,
)
from k3_plugins.training.throughput import add_tokens_per_second


def _activation() -> Activation:
    activation = current()
    assert activation is not None, "engine patches are applied during activation only"
    return activation


# -- arguments ---------------------------------------------------------------------------------------------------------


@contextmanager
def argument_errors(where: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """What is raised inside is an argument error: a sentence and exit code 2 instead of a traceback.

    Args:
        where: the subject of the sentence.
        kinds: exceptions that count, besides the engine's own; the rest is a fault in the code and keeps its traceback.
    """
    try:
        yield
    except (FeatureError, PatchError) as error:
        end_every_rank(str(error))
    except kinds as error:
        text = str(error) or _wordless(error)
        end_every_rank(
            f"{where} does not accept these arguments: {text} ({place_of(error)}). Change the flags named there."
            f"{_flags_of_fields(text)}"
        )


_flags: dict[str, str] = {}
"""Argument -> its flag, where one does not follow from the other."""


def _flags_of_fields(text: str) -> str:
    """Megatron's configurations name fields; some flags are called otherwise (apply_rope_fusion: --no-rope-fusion)."""
    named = [f"{word} is set by {_flags[word]}" for word in dict.fromkeys(re.findall(r"\w+", text)) if word in _flags]
    return f" ({'; '.join(named)})" if named else ""


def _wordless(error: Exception) -> str:
    """An exception without a text, such as a bare assertion: the line that raised it."""
    return f"{type(error).__name__} at `{traceback.extract_tb(error.__traceback__)[-1].line}`"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else _wordless(error)


def _arguments(original: Callable[..., ArgumentParser]) -> Callable[..., ArgumentParser]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
        parser = original(parser)
        with argument_errors("k3_plugins", ()):
            extend_parser(parser, _activation().features, _activation().control.model)
        for action in parser._actions:
            called = [flag.lstrip("-").replace("-", "_") for flag in action.option_strings]
            if called and action.dest not in called:
                _flags[action.dest] = action.option_strings[0]
        return parser

    return add_megatron_arguments


def _validation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Namespace, defaults: dict[str, Any] | None = None) -> Any:
        activation = _activation()
        with argument_errors("k3_plugins", (AssertionError, ValueError)):
            if activation.control.model is not None:
                described_model(activation.control.model, activation.names).derive_patterns(args)
            check_sizes(args)
            check_spec(args)
            check_tokenizer(args)
            for feature in activation.features:
                activation.configs[feature.name] = config_from_args(feature, args)
            for feature in activation.features:
                feature.validate(args, activation.configs[feature.name])
            check_spec(args)
            check_layout(args)
            notes = manifest.check_load(args, activation)
        with argument_errors("Megatron"):
            result = original(args, defaults or {})
        with argument_errors("k3_plugins", ()):
            check_derived_sizes(args)
            activation.model = manifest.model_sizes(args)
            activation.layout = layout(args)
            manifest.check_model(args, activation)
        if args.rank == 0:
            for note in notes:
                print(f"k3_plugins: {note}", flush=True)
        return result

    return validate_args


def _spec_import(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def import_module(module_path: tuple[str, ...]) -> Any:
        with argument_errors("Megatron's spec import"):
            found = original(module_path)
            if found is None:
                check_spec(Namespace(spec=list(module_path)))
                raise FeatureError(f"{' '.join(module_path)} could not be imported; see Megatron's log above")
            return found

    return import_module


def _config_errors(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def core_transformer_config_from_args(args: Namespace, config_class: type | None = None) -> Any:
        with argument_errors("Megatron's model configuration"):
            return original(args, config_class)

    return core_transformer_config_from_args


def _container_errors(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pretrain_cfg_container_from_args(*arguments: Any, **keywords: Any) -> Any:
        with argument_errors("Megatron's training configuration"):
            return original(*arguments, **keywords)

    return pretrain_cfg_container_from_args


def _pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pretrain(*arguments: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        try:
            check_evaluation(get_args())
            return original(*arguments, **keywords)
        except Exception as error:
            activation = _activation()
            if activation.witnesses:  # the first step is done; the ranks no longer watch the channel
                raise
            if isinstance(error, (FeatureError, PatchError)):
                end_every_rank(str(error))
            if activation.abort_channel is not None:
                # this rank ends with a traceback; the others must not wait for it in a collective
                message = f"failed before the first training step was done: {_words(error)}"
                activation.abort_channel.publish(message, code=1)
            raise

    return pretrain


# -- start-up ----------------------------------------------------------------------------------------------------------


def _agreement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _initialize_distributed(
        get_embedding_ranks: Any,
        get_position_embedding_ranks: Any,
        store: Any,
        skip_model_parallel_init: bool = False,
    ) -> Any:
        store = _agree(_activation(), store)
        return original(
            get_embedding_ranks, get_position_embedding_ranks, store, skip_model_parallel_init=skip_model_parallel_init
        )

    return _initialize_distributed


def _agree(activation: Activation, store: Any) -> Any:
    """Compare the ranks before the first collective; returns the store that Megatron is to use."""
    import torch.distributed as dist
    from megatron.training import get_args

    args = get_args()
    if args.world_size == 1 or args.fake_process_group:
        return store
    if dist.is_initialized():
        shared = dist.distributed_c10d._get_default_store()
    elif store is not None:
        shared = store
    else:
        # What init_process_group would do itself; done here so that the comparison comes before it.
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        shared, _, _ = next(dist.rendezvous("env://", args.rank, args.world_size, timeout=timeout))
        shared.set_timeout(timeout)
        store = dist.PrefixStore("default_pg", shared)
    try:
        compare(shared, args.rank, args.world_size, activation.as_dict(), activation.control.check_timeout)
    except Disagreement as error:
        fail(str(error), at_once=True)
    activation.abort_channel = AbortChannel(shared, args.rank, args.world_size)
    activation.abort_channel.start()
    return store


def _set_up(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def setup_model_and_optimizer(*arguments: Any, **keywords: Any) -> Any:
        activation = _activation()
        try:
            _check_data()
            built = original(*arguments, **keywords)
            activation.manager.recheck()
        except (AssertionError, ValueError) as error:
            traceback.print_exception(error)
            text = _words(error)
            end_every_rank(
                f"the model cannot be set up with these arguments: {text}; see the traceback above{_advice(text)}"
            )
        _report_once(activation)
        return built

    return setup_model_and_optimizer


def _check_data() -> None:
    """On ranks that read data, as Megatron's own scripts decide it."""
    from megatron.core import mpu
    from megatron.training import get_args

    if mpu.get_tensor_model_parallel_rank() == 0 and (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        check_data_files(get_args())


def _advice(text: str) -> str:
    """What to type, for faults of Megatron's whose text does not say it."""
    if "OptimizerParamScheduler" in text:
        return (
            ". The checkpoint was saved with another learning-rate schedule: add --override-opt-param-scheduler to "
            "follow this command line, or --use-checkpoint-opt-param-scheduler to follow the checkpoint"
        )
    return ""


def _report_once(activation: Activation) -> None:
    import torch.distributed as dist
    from megatron.training import get_args

    if not dist.is_initialized() or dist.get_rank() == 0:
        activation_report.print_activation(activation)
    if get_args().skip_train and activation.abort_channel is not None:
        activation.abort_channel.stop()  # no first step will do it
        activation.abort_channel = None


# -- first step --------------------------------------------------------------------------------------------------------


def _first_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_step(forward_step_func: Any, data_iterator: Any, model: Any, *arguments: Any, **keywords: Any) -> Any:
        activation = _activation()
        if activation.witnesses:
            return original(forward_step_func, data_iterator, model, *arguments, **keywords)
        result = original(forward_step_func, data_iterator, model, *arguments, **keywords)
        should_exit = result[3]
        if not should_exit:
            activation.witnesses = hear_witnesses(activation, model)
        return result

    return train_step


def hear_witnesses(activation: Activation, model: Any) -> dict[str, Witness]:
    """Ask every feature for its proof, share the answers, and end all ranks if one of them is bad."""
    import torch.distributed as dist
    from megatron.training import get_args

    args = get_args()
    witnesses = {feature.name: _witness(feature, model, args) for feature in activation.features}
    try:
        activation.manager.recheck()
    except PatchError as error:
        witnesses["engine"] = Witness(str(error), ok=False)
    by_rank = [witnesses]
    if dist.is_initialized():
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, {name: (item.summary, item.ok) for name, item in witnesses.items()})
        by_rank = [{name: Witness(*item) for name, item in answers.items()} for answers in gathered]
    if activation.abort_channel is not None:
        activation.abort_channel.stop()
        activation.abort_channel = None
    bad = [
        f"{name} on rank {rank}: {item.summary}"
        for rank, answers in enumerate(by_rank)
        for name, item in answers.items()
        if not item.ok
    ]
    if bad:
        listing = "\n".join(f"  - {line}" for line in bad[:20])
        more = f"\n  - and {len(bad) - 20} more" if len(bad) > 20 else ""
        fail(
            f"after the first training step a feature that was asked for did not run as it should:\n{listing}{more}\n"
            "python -m k3_plugins.doctor shows its patches and backends; to train without it, leave it out of "
            "--k3-plugins.",
            at_once=dist.is_initialized(),
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        activation_report.print_witnesses(activation.names, by_rank)
    return witnesses


def _witness(feature: Any, model: Any, args: Namespace) -> Witness:
    try:
        witness = feature.witness(model, args)
    except Exception as error:  # a witness that breaks proves nothing; the other ranks must learn about it
        traceback.print_exception(error)
        return Witness(f"its witness raised {type(error).__name__}: {error}", ok=False)
    if not isinstance(witness, Witness):
        return Witness(f"its witness returned {type(witness).__name__} instead of Witness", ok=False)
    return witness


# -- checkpoints -------------------------------------------------------------------------------------------------------

_saving: tuple[int, bool] | None = None
"""(iteration, release) while Megatron's save_checkpoint runs."""


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint(iteration: int, *arguments: Any, **keywords: Any) -> Any:
        global _saving
        _saving = (iteration, bool(keywords.get("release", False)))
        try:
            return original(iteration, *arguments, **keywords)
        finally:
            _saving = None

    return save_checkpoint


def _publish(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
        if _saving is not None:
            iteration, release = _saving
            folder = os.path.join(str(checkpoints_path), "release" if release else f"iter_{iteration:07d}")
            _write_manifest(folder, iteration)
        return original(checkpoints_path)

    return get_checkpoint_tracker_filename


def _write_manifest(folder: str, iteration: int) -> None:
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if os.path.isdir(folder) or "://" in folder:  # node-local checkpoints have no such folder
        manifest.write(folder, _activation(), iteration)


FIRST_STEP = Patch(
    id="engine.first-step",
    target="megatron.training.training:train_step",
    kind=PatchKind.WRAP,
    implementation=_first_step,
    feature="engine",
    reason="post_training_step_callbacks is a fixed function without user callbacks",
    remove_when="train takes user callbacks",
)

ENGINE_PATCHES: tuple[Patch, ...] = (
    Patch(
        id="engine.arguments",
        target="megatron.training.arguments:add_megatron_arguments",
        kind=PatchKind.WRAP,
        implementation=_arguments,
        feature="engine",
        reason="extra_args_provider reaches one parser only; ft_integration.setup parses the command line again with "
        "the stock parser and would refuse the flags of the features",
        remove_when="ft_integration.setup takes the parsed arguments instead of parsing again",
    ),
    Patch(
        id="engine.validate",
        target="megatron.training.arguments:validate_args",
        kind=PatchKind.WRAP,
        implementation=_validation,
        feature="engine",
        reason="nothing is called between parsing and validation; argument errors would be tracebacks with exit code 1",
        remove_when="Megatron calls a hook after parsing, before validate_args",
    ),
    Patch(
        id="engine.spec-import",
        target="megatron.core.transformer.spec_utils:import_module",
        kind=PatchKind.WRAP,
        implementation=_spec_import,
        feature="engine",
        reason="an ImportError is logged and None is returned, so a broken --spec silently builds the default model",
        remove_when="import_module raises",
    ),
    Patch(
        id="engine.model-config",
        target="megatron.training.argument_utils:core_transformer_config_from_args",
        kind=PatchKind.WRAP,
        implementation=_config_errors,
        feature="engine",
        reason="the model configuration checks flags once more, outside validate_args, and raises tracebacks with exit "
        "code 1",
        remove_when="Megatron ends with exit code 2 on argument errors",
    ),
    Patch(
        id="engine.training-config",
        target="megatron.training.argument_utils:pretrain_cfg_container_from_args",
        kind=PatchKind.WRAP,
        implementation=_container_errors,
        feature="engine",
        reason="the optimizer's, the data-parallel and the checkpoint configuration check flags as well, and raise "
        "tracebacks with exit code 1",
        remove_when="Megatron ends with exit code 2 on argument errors",
    ),
    Patch(
        id="engine.pretrain",
        target="megatron.training.training:pretrain",
        kind=PatchKind.WRAP,
        implementation=_pretrain,
        feature="engine",
        reason="a rank that fails alone, in building its model, its data or in the first step, leaves the others "
        "waiting in a collective; no hook is called with the exception",
        remove_when="pretrain calls a hook with the exception that ends it",
    ),
    Patch(
        id="engine.agreement",
        target="megatron.training.initialize:_initialize_distributed",
        kind=PatchKind.WRAP,
        implementation=_agreement,
        feature="engine",
        reason="the ranks must be compared before the first collective, and initialize_megatron has no hook there",
        remove_when="initialize_megatron calls a hook after the rendezvous",
    ),
    Patch(
        id="engine.set-up",
        target="megatron.training.training:setup_model_and_optimizer",
        kind=PatchKind.WRAP,
        implementation=_set_up,
        feature="engine",
        reason="pre_wrap_hooks run before the wrappers and the checkpoint are there, and cannot catch an error of one "
        "rank",
        remove_when="pretrain takes a callback that is called once the model is built and loaded",
    ),
    FIRST_STEP,
    Patch(
        id="engine.save",
        target="megatron.training.checkpointing:save_checkpoint",
        kind=PatchKind.WRAP,
        implementation=_save,
        feature="engine",
        reason="a checkpoint holds no user data, and the iteration being saved is known to this function only",
        remove_when="save_checkpoint takes files or a callback to run before the tracker file is written",
    ),
    Patch(
        id="engine.publish",
        target="megatron.training.checkpointing:get_checkpoint_tracker_filename",
        kind=PatchKind.WRAP,
        implementation=_publish,
        feature="engine",
        reason="save_checkpoint calls it on rank 0 when the data is there and before the tracker file moves on: the "
        "one moment to write the manifest for every checkpoint format, synchronous or not",
        remove_when="save_checkpoint takes files or a callback to run before the tracker file is written",
    ),
    Patch(
        id="engine.tokens-per-second",
        target="megatron.training.utils.common_utils:print_rank_last",
        kind=PatchKind.WRAP,
        implementation=add_tokens_per_second,
        feature="engine",
        reason="training_log builds its line inside one long function; the line can only be completed where it is "
        "printed",
        remove_when="training_log reports tokens per second",
    ),
)
"""Applied in this order, before the features' own patches; only FIRST_STEP comes after them."""
