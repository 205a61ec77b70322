"""Flags: the engine's own ``--k3-*`` flags, and config dataclasses <-> command line.

    parse_control(argv) -> (Control, rest)   # before anything is imported; rest is argv without the control flags
    extend_parser(parser, features, model)   # control flags and one group per feature, into Megatron's parser
    config_from_args(feature, args)          # the typed config of a feature
    flag_line(config, names) -> list[str]    # back to the words to type

A config field ``kda_head_dim`` becomes ``--kda-head-dim``; a boolean that is True by default becomes ``--no-...``. The
parsing itself is done by Megatron's ``ArgumentGroupFactory``, which takes the help texts from the field docstrings.
This module imports neither torch nor megatron.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from k3_plugins.failure import fail
from k3_plugins.feature import Feature, FeatureError
from k3_plugins.features import CommandLine

if TYPE_CHECKING:
    from k3_plugins.models.kimi_k3.config import KimiK3Config

CONTROL_PREFIX = "--k3-"


@dataclass(frozen=True)
class Control:
    """The values of the ``--k3-*`` flags."""

    plugins: tuple[str, ...] = ()
    platform: str | None = None
    allow_drift: tuple[str, ...] = ()
    allow_empty_load: bool = False
    check_timeout: float = 300.0
    model: str | None = None


def add_control_arguments(parser: Any) -> None:
    """Add the control flags to a parser or an argument group."""
    parser.add_argument(
        "--k3-plugins",
        action="append",
        metavar="NAME[,NAME...]",
        help="Features and presets to turn on, separated by commas; may be repeated. "
        "python -m k3_plugins.doctor lists them.",
    )
    parser.add_argument(
        "--k3-platform",
        choices=("cpu", "cuda", "auto"),
        help="Where to compute. auto (the default) takes CUDA, and the CPU with gloo if there is no GPU.",
    )
    parser.add_argument(
        "--k3-allow-drift",
        action="append",
        metavar="PATCH[,PATCH...]",
        help="Patches that may be applied although the body of their target is not the recorded one.",
    )
    parser.add_argument(
        "--k3-allow-empty-load",
        action="store_true",
        help="Start from scratch, with a note, if --load names a folder without a checkpoint; otherwise that is an "
        "error. For scripts that give --save and --load the same folder from the first run on.",
    )
    parser.add_argument(
        "--k3-check-timeout",
        type=float,
        default=Control.check_timeout,
        metavar="SECONDS",
        help="How long a rank waits at the start for the other ranks to report which features they run.",
    )
    parser.add_argument(
        "--k3-model",
        metavar="PRESET",
        help="Take the sizes of a named model as the defaults of Megatron's and the features' flags; flags on the "
        "command line win. kimi_k3, kimi_linear, or a small proxy: kimi_k3_tiny, kimi_k3_small, kimi_k3_moe_tiny, "
        "kimi_linear_tiny.",
    )


class _ControlParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FeatureError(message)


def parse_control(argv: Sequence[str]) -> tuple[Control, list[str]]:
    """Read the control flags; also returns the command line without them.

    Raises:
        FeatureError: for a missing or wrong value, or a misspelt ``--k3-*`` flag.
    """
    parser = _ControlParser(add_help=False, allow_abbrev=False)
    add_control_arguments(parser)
    values, rest = parser.parse_known_args(list(argv))
    for word in rest:
        flag = word.partition("=")[0]
        meant = difflib.get_close_matches(flag, parser._option_string_actions, n=1, cutoff=0.85)
        if flag.startswith(CONTROL_PREFIX) and meant:
            raise FeatureError(f"there is no flag {flag}. Did you mean {meant[0]}?")
    if not 0 < values.k3_check_timeout < math.inf:
        raise FeatureError(f"--k3-check-timeout {values.k3_check_timeout:g} must be a number of seconds, more than 0")
    control = Control(
        plugins=_words(values.k3_plugins, "--k3-plugins"),
        platform=values.k3_platform,
        allow_drift=_words(values.k3_allow_drift, "--k3-allow-drift"),
        allow_empty_load=values.k3_allow_empty_load,
        check_timeout=values.k3_check_timeout,
        model=values.k3_model,
    )
    return control, rest


def _words(values: Iterable[str] | None, flag: str) -> tuple[str, ...]:
    words: list[str] = []
    for value in values or ():
        parts = [part.strip() for part in value.split(",")]
        if not all(parts):
            raise FeatureError(f"{flag} {value!r} holds an empty name; type the names separated by single commas")
        words += [part for part in parts if part not in words]
    return tuple(words)


def integer_flags(argv: Sequence[str]) -> dict[str, int]:
    """Flags with an integer value, as written, for the presets' layout conditions."""
    values = {}
    for position, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            continue
        if not equals and position + 1 < len(argv):
            value = argv[position + 1]
        if re.fullmatch(r"\d+", value):
            values[flag] = int(value)
    return values


def model_flags(model: str | None) -> dict[str, int]:
    """What ``--k3-model`` sets among the flags that presets of features look at.

    Raises:
        FeatureError: if there is no such model.
    """
    if model is None:
        return {}
    from k3_plugins.models.kimi_k3.config import preset

    try:
        description = preset(model)
    except ValueError as error:
        raise FeatureError(str(error)) from error
    return {"--num-experts": description.num_experts} if description.num_experts else {}


def command_line(argv: Sequence[str], model: str | None, door: str | None = None) -> CommandLine:
    """What presets of features look at.

    Args:
        argv: the command line, without the program.
        model: of ``--k3-model``.
        door: the program, as after ``python -m``.
    """
    given = frozenset(word.partition("=")[0] for word in argv if word.startswith("--"))
    return CommandLine({**model_flags(model), **integer_flags(argv)}, given, door)


def flag_value(argv: Sequence[str], flag: str) -> str | None:
    """The last value of a string flag on a command line, or None."""
    found = None
    for position, word in enumerate(argv):
        if word == flag and position + 1 < len(argv):
            found = argv[position + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


# -- into Megatron's parser --------------------------------------------------------------------------------------------


def extend_parser(parser: argparse.ArgumentParser, features: Sequence[Feature], model: str | None = None) -> None:
    """Add the control flags and one group per feature, and make the parser's errors say what to type.

    Args:
        parser: Megatron's.
        features: the active ones.
        model: the value of ``--k3-model``; its sizes become the defaults of the flags.

    Raises:
        FeatureError: if a field's flag is taken already, or a field's type cannot be parsed from a command line.
    """
    from k3_plugins.argument_groups import FeatureArgumentGroupFactory

    add_control_arguments(parser.add_argument_group("k3_plugins", "Control of the plug-ins."))
    for feature in features:
        if feature.config is None:
            continue
        try:
            FeatureArgumentGroupFactory(feature.config).build_group(parser, title=f"k3_plugins: {feature.name}")
        except Exception as error:
            raise FeatureError(
                f"the flags of feature {feature.name!r} ({feature.config.__name__}) cannot be added to Megatron's "
                f"parser: {type(error).__name__}: {error}"
            ) from error
    _explain_values(parser)
    _repair_help(parser)
    active = [feature.name for feature in features]
    parser.error = functools.partial(_explain, parser, active)  # type: ignore[method-assign]  # of this parser alone
    for feature in features:
        if hasattr(feature, "argument_defaults"):
            _set_defaults(parser, feature.argument_defaults(), f"feature {feature.name!r}")
    if model is not None:
        _set_defaults(parser, described_model(model, active).argument_defaults(active), f"--k3-model {model}")


def _explain_values(parser: argparse.ArgumentParser) -> None:
    """Megatron evaluates some values as Python; what they raise then becomes a sentence that names flag and value."""
    for action in parser._actions:
        if inspect.isfunction(action.type):
            action.type = _explained(action.type)


def _repair_help(parser: argparse.ArgumentParser) -> None:
    """Some of Megatron's help texts hold a bare percent sign, with which argparse cannot show any of them."""
    for action in parser._actions:
        try:
            str(action.help) % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")


def _explained(read: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(read)
    def explained(value: str) -> Any:
        try:
            return read(value)
        except (argparse.ArgumentTypeError, TypeError, ValueError):
            raise  # argparse's own affair
        except Exception as error:
            raise argparse.ArgumentTypeError(f"{value!r} cannot be read ({type(error).__name__}: {error})") from error

    return explained


def _set_defaults(parser: argparse.ArgumentParser, defaults: Mapping[str, Any], owner: str) -> None:
    """Change defaults of flags; argparse itself accepts any name and would drop one whose flag is gone without a word.

    Raises:
        FeatureError: if a flag does not exist.
    """
    unknown = defaults.keys() - {action.dest for action in parser._actions}
    if unknown:
        raise FeatureError(f"{owner} sets flags that this Megatron does not have: {sorted(unknown)}")
    parser.set_defaults(**defaults)


def described_model(name: str, active: Sequence[str]) -> KimiK3Config:
    """The description that ``--k3-model`` names.

    Raises:
        FeatureError: if there is no such model, or the active features cannot build it.
    """
    from k3_plugins.models.kimi_k3.config import preset

    try:
        description = preset(name)
    except ValueError as error:
        raise FeatureError(str(error)) from error
    missing = [feature for feature in description.required_features if feature not in active]
    if missing:
        raise FeatureError(
            f"--k3-model {name} needs the feature{'s' if len(missing) > 1 else ''} {', '.join(missing)}: type "
            f"--k3-plugins {','.join([*active, *missing])}"
        )
    return description


def _explain(parser: argparse.ArgumentParser, active: Sequence[str], message: str) -> NoReturn:
    """Megatron's usage text is hundreds of lines long; print the message and the nearest way out instead."""
    fail(message + hint(message.split(), active, list(parser._option_string_actions)))


def hint(words: Iterable[str], active: Sequence[str], known_flags: Sequence[str]) -> str:
    """Which feature an unknown flag belongs to, or which flag may have been meant; empty if neither is known."""
    flags = [word.partition("=")[0].rstrip(".,:") for word in words if word.startswith("--")]
    unknown = [flag for flag in flags if flag not in known_flags]
    owners = _owners(set(unknown), active) if unknown else {}
    hints = [f" {flag} belongs to feature {name!r}: add {name} to --k3-plugins." for flag, name in owners.items()]
    hints += [_did_you_mean(flag, known_flags) for flag in unknown if flag not in owners]
    return "".join(hints)


def _owners(flags: set[str], active: Sequence[str]) -> dict[str, str]:
    """Flag -> inactive feature. Only called on the way out, so importing the inactive features does no harm."""
    from k3_plugins.features import available, load

    owners = {}
    for entry in available():
        if entry.name in active:
            continue
        try:
            config = load(entry).config
        except FeatureError:
            continue  # it was not asked for; its own error must not hide the one being explained
        for options in option_strings(config).values() if config else ():
            owners.update({flag: entry.name for flag in flags.intersection(options)})
    return owners


def _did_you_mean(flag: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
    return f" Did you mean {near[0]}?" if near else ""


# -- between a config dataclass and the command line -------------------------------------------------------------------


def config_fields(config: type | Any) -> list[dataclasses.Field]:
    """The fields that are flags."""
    return [item for item in dataclasses.fields(config) if item.init]


def default_of(item: dataclasses.Field) -> Any:
    """A field's default value."""
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def option_strings(config: type) -> dict[str, list[str]]:
    """Field name -> the flags that set it, by the rules of Megatron's ArgumentGroupFactory."""
    options = {}
    for item in config_fields(config):
        given = item.metadata.get("argparse_meta", {}).get("arg_names")
        kebab = item.name.replace("_", "-")
        if given:
            options[item.name] = list(given)
        elif item.type in (bool, "bool") and default_of(item) is not False:
            options[item.name] = [f"--no-{kebab}", f"--disable-{kebab}"]
        else:
            options[item.name] = [f"--{kebab}"]
    return options


def config_from_args(feature: Feature, args: argparse.Namespace) -> Any:
    """Build the typed config of a feature from parsed arguments; None for a feature without flags.

    Raises:
        FeatureError: if the dataclass refuses the values, or the namespace was parsed without the feature's flags.
    """
    if feature.config is None:
        return None
    names = [item.name for item in config_fields(feature.config)]
    absent = [name for name in names if not hasattr(args, name)]
    if absent:
        raise FeatureError(
            f"the arguments were parsed without the flags of feature {feature.name!r} ({', '.join(absent)}); parse "
            "them with megatron.training.arguments.parse_args after k3_plugins.bootstrap.activate"
        )
    try:
        return feature.config(**{name: getattr(args, name) for name in names})
    except (ValueError, TypeError, AssertionError) as error:
        raise FeatureError(f"feature {feature.name!r}: {error}") from error


def flag_line(config: Any, names: Iterable[str] | None = None) -> list[str]:
    """The words that set a config's non-default values on a command line.

    Args:
        config: a config instance.
        names: only these fields; all by default.
    """
    options = option_strings(type(config))
    words: list[str] = []
    for item in config_fields(config):
        value = getattr(config, item.name)
        if (names is not None and item.name not in names) or value == default_of(item) or value is None:
            continue
        words += flag_words(options[item.name][0], value)
    return words


def flag_words(flag: str, value: Any) -> list[str]:
    """One flag and its value; a boolean flag stands alone."""
    if isinstance(value, bool):
        return [flag]
    if isinstance(value, (list, tuple)):
        return [flag, *(str(plain(item)) for item in value)]
    return [flag, str(plain(value))]


def plain(value: Any) -> Any:
    """A JSON value for a config value: enum members by name, tuples as lists, anything unknown as its text."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def plain_config(config: Any) -> dict[str, Any]:
    """A config as JSON values."""
    return {} if config is None else {item.name: plain(getattr(config, item.name)) for item in config_fields(config)}
