"""Which cases are refused, and in which words: the features and Megatron are asked, nothing is trained.

    sentences = ask(cases)      # {case id: sentence}, for those that are refused

What the doors check between the command line and the first collective is run for every case, in one process: the
relations between features, the parser, the engine's validation around Megatron's own, the model's configuration. What
is refused later, when the model is built, shows when the case runs.
"""

from __future__ import annotations

import argparse
import copy
import io
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout

from k3_plugins.failure import EXIT_BAD_ARGUMENTS, PREFIX
from tests.distributed.matrix.cases import ENTRIES, Case
from tests.harness.spawn import spawn


def ask(cases: Iterable[Case]) -> dict[str, str]:
    """The sentence of every case that is refused, by case id."""
    return spawn(_ask, 1, list(cases))[0]


def _ask(rank: int, world_size: int, cases: list[Case]) -> dict[str, str]:
    from megatron.training.arguments import add_megatron_arguments

    stock = argparse.ArgumentParser(allow_abbrev=False, prog="k3_plugins")
    add_megatron_arguments(stock)
    found = {each.id: _sentence(each, stock) for each in cases}
    return {name: sentence for name, sentence in found.items() if sentence}


def _sentence(case: Case, stock: argparse.ArgumentParser) -> str:
    """"" if everything up to the first collective accepts the case."""
    heard = io.StringIO()
    try:
        with redirect_stderr(heard), redirect_stdout(io.StringIO()):
            _start(case, stock)
    except SystemExit as stop:
        assert stop.code == EXIT_BAD_ARGUMENTS, (case.id, stop.code, heard.getvalue())
        sentences = [line for line in heard.getvalue().splitlines() if line.startswith(PREFIX)]
        assert sentences, (case.id, heard.getvalue())
        return sentences[-1].removeprefix(PREFIX)
    return ""


def _start(case: Case, stock: argparse.ArgumentParser) -> None:
    """A door's way to the first collective, without patching this process."""
    from megatron.training import arguments
    from megatron.training.argument_utils import core_transformer_config_from_args

    from k3_plugins import activation, engine, features, pretrain_vlm
    from k3_plugins.arguments import extend_parser, parse_control
    from k3_plugins.failure import fail
    from k3_plugins.feature import FeatureError

    words = pretrain_vlm.parse(case.words)[1] if case.vision else case.words
    control, words = parse_control(words)
    active = [features.load(ENTRIES[name]) for name in case.features]
    try:
        features.check_relations(active)
    except FeatureError as error:
        fail(str(error))
    before = activation.current()
    activation.set_current(
        activation.Activation(tuple(active), "cpu", "named by --k3-platform", case.door, control, None, "")
    )
    try:
        parser = copy.deepcopy(stock)
        extend_parser(parser, active)
        args = parser.parse_args(words)
        args.rank, args.world_size = 0, case.ranks
        engine._validation(arguments.validate_args)(args)
        engine._config_errors(core_transformer_config_from_args)(args)
    finally:
        activation.set_current(before)
