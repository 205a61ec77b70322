"""Which features may be named together, and what is said about those that may not."""

import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass

import pytest

from k3_plugins import bootstrap, features
from k3_plugins.activation import Activation
from k3_plugins.arguments import Control
from k3_plugins.feature import FeatureError, Witness, verify
from k3_plugins.features import FeatureEntry, PresetMember
from tests.contract.toys import forget, patch, toy_feature, toy_package


def fault(feature, name="toy"):
    with pytest.raises(FeatureError) as caught:
        verify(feature, registered_as=name, origin="distribution toy 1.0")
    return str(caught.value)


# -- the protocol ------------------------------------------------------------------------------------------------------


def test_a_feature_that_satisfies_the_protocol_passes():
    verify(toy_feature(), registered_as="toy", origin="here")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": None}, "'name' is missing"),
        ({"name": "Toy Feature"}, "lower-case words"),
        ({"name": "other"}, "registered as 'toy'"),
        ({"requires": "kda"}, "'requires' must be a sequence"),
        ({"conflicts": None}, "'conflicts' must be a sequence"),
        ({"config": dict}, "'config' must be a dataclass type"),
        ({"changes_parameters": "yes"}, "'changes_parameters' must be True or False"),
        ({"patches": None}, "method patches() is missing"),
        ({"validate": lambda args: None}, "validate must be callable as validate(args, config)"),
        ({"witness": lambda: None}, "witness must be callable as witness(model_chunks, args)"),
        ({"backends": lambda: []}, "backends must be callable as backends(config)"),
    ],
)
def test_each_deviation_from_the_protocol_is_named(changes, words):
    text = fault(toy_feature(**changes))
    assert words in text and "distribution toy 1.0" in text


def test_all_deviations_are_named_at_once():
    text = fault(object())
    for word in ("name", "requires", "conflicts", "config", "changes_parameters", "patches", "validate", "witness"):
        assert word in text


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def listed(monkeypatch, tmp_path):
    """Replaces the list of features by toys: listed(a={"requires": ("b",)}, ...)."""
    packages = []

    def replace_list(**members):
        entries = []
        for name, changes in members.items():
            package = toy_package(tmp_path, {"feature": ""})
            packages.append(package)
            module = __import__(f"{package}.feature", fromlist=["feature"])
            module.FEATURE = toy_feature(name, **changes)
            entries.append(FeatureEntry(name, module.__name__, "a toy", "toys"))
        monkeypatch.setattr(features, "BUILT_IN", tuple(entries))
        monkeypatch.setattr(features, "third_party", list)
        monkeypatch.setattr(features, "PRESETS", {})
        return entries

    yield replace_list
    for package in packages:
        forget(package)


@pytest.fixture
def activate(monkeypatch):
    """bootstrap.activate in a process that stays as it was: no platform, and a stub instead of Megatron's patches."""
    monkeypatch.setattr(bootstrap, "_opened", None)
    monkeypatch.setattr(bootstrap.activation_module, "_current", None)
    monkeypatch.setattr(bootstrap, "select", lambda name: type("Report", (), {"name": "cpu", "reason": "a test"}))

    class Manager:
        patches = ()

        def check_all(self):
            return []

        def apply_all(self):
            return None

    monkeypatch.setattr(bootstrap, "patch_manager", lambda active, drift: (Manager(), "0.19.2"))

    def run(*words, door="test"):
        return bootstrap.activate(list(words), door)

    return run


def exits(capsys, run, *words):
    """The sentence with which a command line is refused; the exit code must be 2."""
    with pytest.raises(SystemExit) as caught:
        run(*words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("k3_plugins: error: ")
    return error


def test_features_come_in_list_order_whatever_was_typed(listed, activate):
    listed(a={}, b={}, c={})
    active = activate("--k3-plugins", "c,a", "--lr", "1", "--k3-plugins=a")
    assert isinstance(active, Activation) and active.names == ("a", "c") and active.door == "test"


def test_a_feature_comes_after_what_it_requires(listed, activate):
    listed(a={"requires": ("c",)}, b={}, c={})
    assert activate("--k3-plugins", "a,b,c").names == ("c", "a", "b")


def test_an_unknown_name_is_refused_with_the_nearest_one(listed, activate, capsys):
    listed(attnres={}, kda={})
    text = exits(capsys, activate, "--k3-plugins", "kda,atnres")
    assert "no feature 'atnres'. Did you mean 'attnres'?" in text and "attnres, kda" in text


@pytest.mark.parametrize("words", [("--k3-plugins", "a,,b"), ("--k3-plugins", ""), ("--k3-plugins",)])
def test_an_empty_name_is_refused(listed, activate, capsys, words):
    listed(a={}, b={})
    exits(capsys, activate, *words)


def test_a_misspelt_control_flag_is_refused(listed, activate, capsys):
    listed(a={})
    assert "Did you mean --k3-plugins?" in exits(capsys, activate, "--k3-plugin", "a")


def test_an_unmet_requirement_says_what_to_type(listed, activate, capsys):
    listed(moonvit={}, bubble={"requires": ("moonvit",)})
    assert "type --k3-plugins moonvit,bubble" in exits(capsys, activate, "--k3-plugins", "bubble")


def test_a_conflict_says_what_to_type(listed, activate, capsys):
    listed(a={}, b={"conflicts": ("a",)}, c={})
    text = exits(capsys, activate, "--k3-plugins", "a,b,c")
    assert "'b' and 'a' exclude each other" in text
    assert "--k3-plugins b,c" in text and "--k3-plugins a,c" in text


def test_requirements_in_a_circle_are_refused(listed, activate, capsys):
    listed(a={"requires": ("b",)}, b={"requires": ("a",)})
    assert "a -> b -> a" in exits(capsys, activate, "--k3-plugins", "a,b")


def test_a_built_in_feature_that_cannot_be_imported_is_an_error(listed, activate, monkeypatch, capsys):
    listed(a={})
    monkeypatch.setattr(features, "BUILT_IN", (FeatureEntry("a", "k3_plugins.nowhere", "gone", "nowhere"),))
    assert "No module named 'k3_plugins.nowhere'" in exits(capsys, activate, "--k3-plugins", "a")


def test_a_preset_leaves_out_what_does_not_fit_the_layout(listed, activate, monkeypatch, capsys):
    listed(a={}, b={})
    member = PresetMember("b", "--pipeline-model-parallel-size", 2)
    monkeypatch.setattr(features, "PRESETS", {"all": (PresetMember("a"), member)})
    alone = activate("--k3-plugins", "all")
    assert alone.names == ("a",)
    assert alone.left_out == ("b (preset all: needs --pipeline-model-parallel-size >= 2)",)
    monkeypatch.setattr(bootstrap, "_opened", None)
    assert activate("--k3-plugins", "all", "--pipeline-model-parallel-size", "2").names == ("a", "b")
    monkeypatch.setattr(bootstrap, "_opened", None)
    assert activate("--k3-plugins", "all", "--pipeline-model-parallel-size=4").names == ("a", "b")
    monkeypatch.setattr(features, "PRESETS", {"all": (member,)})
    monkeypatch.setattr(bootstrap, "_opened", None)
    assert "leaves no feature" in exits(capsys, activate, "--k3-plugins", "all")


def test_a_preset_looks_at_flags_and_at_the_door(listed, activate, monkeypatch):
    listed(a={}, b={}, c={})
    members = (PresetMember("a"), PresetMember("b", given="--policy"), PresetMember("c", door="pictures"))
    monkeypatch.setattr(features, "PRESETS", {"all": members})
    alone = activate("--k3-plugins", "all")
    assert alone.names == ("a",)
    assert alone.left_out == ("b (preset all: needs --policy)", "c (preset all: needs python -m pictures)")
    monkeypatch.setattr(bootstrap, "_opened", None)
    assert activate("--k3-plugins", "all", "--policy=x", door="pictures").names == ("a", "b", "c")


def test_the_second_door_gets_the_same_activation(listed, activate, capsys):
    listed(a={}, b={})
    first = activate("--k3-plugins", "a", "--lr", "1")
    assert activate("--k3-plugins", "a", "--lr", "1", door="other") is first and first.door == "test"
    assert "cannot change" in exits(capsys, activate, "--k3-plugins", "a,b")
    assert "cannot change" in exits(capsys, activate)


def test_features_cannot_be_added_after_a_start_without_them(listed, activate, capsys):
    listed(a={})
    assert activate("--lr", "1") is None
    assert activate("--lr", "1") is None
    assert "--k3-plugins a, but this process was started with --k3-plugins (none)" in exits(
        capsys, activate, "--k3-plugins", "a"
    )


def test_without_features_the_control_flags_are_taken_off_the_command_line(listed, activate, monkeypatch):
    listed(a={})
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1", "--k3-platform", "cpu", "--seed=3"])
    assert activate(*sys.argv[1:]) is None
    assert sys.argv == ["train.py", "--lr", "1", "--seed=3"]


def test_with_features_the_command_line_stays_for_megatrons_parser(listed, activate, monkeypatch):
    listed(a={})
    words = ["train.py", "--k3-plugins", "a", "--k3-platform", "cpu"]
    monkeypatch.setattr(sys, "argv", list(words))
    activate(*words[1:])
    assert sys.argv == words


@pytest.mark.parametrize("words", [("--k3-allow-drift", "x"), ("--k3-allow-empty-load",)])
def test_flags_that_mean_nothing_without_features_are_refused(listed, activate, capsys, words):
    listed(a={})
    assert "means nothing without --k3-plugins" in exits(capsys, activate, *words)


def test_yaml_configuration_is_refused_with_features(listed, activate, capsys):
    listed(a={})
    assert "--yaml-cfg" in exits(capsys, activate, "--k3-plugins", "a", "--yaml-cfg", "c.yaml")


def test_a_wrong_timeout_is_refused(listed, activate, capsys):
    listed(a={})
    assert "more than 0" in exits(capsys, activate, "--k3-plugins", "a", "--k3-check-timeout", "0")


# -- third parties -----------------------------------------------------------------------------------------------------

SETUP = """
from setuptools import setup
setup(name="k3-installed-toy", version="2.5", py_modules=["k3_installed_toy"],
      entry_points={"k3_plugins.features": ["installed-toy = k3_installed_toy:FEATURE",
                                            "broken-toy = k3_installed_toy_missing:FEATURE",
                                            "kda = k3_installed_toy:FEATURE"]})
"""
MODULE = """
from k3_plugins.feature import Witness

class Toy:
    name = "installed-toy"
    requires = conflicts = ()
    config = None
    changes_parameters = False
    def patches(self): return ()
    def validate(self, args, config): pass
    def witness(self, model_chunks, args): return Witness("ran", True)

FEATURE = Toy()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A distribution installed by pip into a folder of its own."""
    source = tmp_path_factory.mktemp("source")
    (source / "setup.py").write_text(SETUP)
    (source / "k3_installed_toy.py").write_text(MODULE)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--disable-pip-version-check", "--target", str(folder), str(source)], check=True)
    return folder


@pytest.fixture
def third_party(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    yield
    sys.modules.pop("k3_installed_toy", None)


def test_an_installed_plug_in_is_found_and_loaded_by_name(third_party, activate):
    assert "k3_installed_toy" not in sys.modules
    names = [entry.name for entry in features.available()]
    assert "installed-toy" in names and "k3_installed_toy" not in sys.modules  # listing imports nothing
    active = activate("--k3-plugins", "installed-toy")
    assert active.names == ("installed-toy",)
    assert active.features[0].witness([], None) == Witness("ran", True)


def test_a_broken_plug_in_names_its_distribution(third_party, activate, capsys):
    text = exits(capsys, activate, "--k3-plugins", "broken-toy")
    assert "distribution k3-installed-toy 2.5" in text and "No module named 'k3_installed_toy_missing'" in text
    assert "uninstall k3-installed-toy" in text


def test_a_broken_plug_in_that_is_not_named_is_left_alone(third_party, activate):
    assert activate("--k3-plugins", "installed-toy").names == ("installed-toy",)


def test_a_name_with_two_owners_is_refused(third_party, activate, capsys):
    text = exits(capsys, activate, "--k3-plugins", "kda")
    assert "k3_plugins.transformer.kda.feature" in text and "k3-installed-toy 2.5" in text


def test_a_plug_in_against_the_protocol_names_its_distribution(third_party, activate, monkeypatch, capsys):
    import k3_installed_toy

    monkeypatch.delattr(k3_installed_toy.Toy, "witness")
    text = exits(capsys, activate, "--k3-plugins", "installed-toy")
    assert "distribution k3-installed-toy 2.5" in text and "witness(model_chunks, args) is missing" in text


# -- rules for what a feature brings -----------------------------------------------------------------------------------


def test_a_feature_that_imports_torch_or_megatron_is_refused(tmp_path, monkeypatch):
    package = toy_package(tmp_path, {"heavy": "", "feature": "import PACKAGE.heavy\nFEATURE = None"})
    monkeypatch.setattr(features, "_TOO_EARLY", (f"{package}.heavy",))
    with pytest.raises(FeatureError, match=rf"'early' from .* imports {package}.heavy when it is imported"):
        features.load(FeatureEntry("early", f"{package}.feature", "a toy", "toys"))
    forget(package)


def test_patch_ids_carry_the_features_name():
    feature = toy_feature(patches=lambda: [patch("json:dumps", lambda original: original, id="other.dumps")])
    with pytest.raises(FeatureError, match="the id of patch 'other.dumps' must begin with 'toy.'"):
        bootstrap.patch_manager([feature], ())


def test_missing_fingerprints_say_how_they_are_made(tmp_path):
    file = tmp_path / "toy.json"
    with pytest.raises(FeatureError) as caught:
        bootstrap.patch_manager([toy_feature(fingerprints=lambda: file)], ())
    assert f"python -m k3_plugins.patching.record --feature toy --out {file}" in str(caught.value)
    file.write_text("{")
    with pytest.raises(FeatureError, match="its fingerprints cannot be read: JSONDecodeError"):
        bootstrap.patch_manager([toy_feature(fingerprints=lambda: file)], ())


# -- the list ----------------------------------------------------------------------------------------------------------


def test_the_list_of_features_is_consistent():
    names = [entry.name for entry in features.BUILT_IN]
    assert len(names) == len(set(names))
    assert {member.feature for preset in features.PRESETS.values() for member in preset} <= set(names)
    assert not set(features.PRESETS) & set(names)
    for preset in features.PRESETS.values():
        assert len(preset) == len({member.feature for member in preset})
        assert all(member.flag is None or member.flag.startswith("--") for member in preset)


def test_control_flags_have_one_default():
    assert bootstrap.parse_control([])[0] == Control()


def test_importlib_metadata_agrees_about_the_group(third_party):
    points = importlib.metadata.entry_points(group=features.ENTRY_POINT_GROUP)
    assert {"installed-toy", "broken-toy"} <= {point.name for point in points}


# -- config dataclasses ------------------------------------------------------------------------------------------------


@dataclass
class FlagConfig:
    """Flags."""

    toy_width: int = 4
    """Width."""
    toy_names: list[str] | None = None
    """Names."""
    toy_fast: bool = True
    """Fast."""
    toy_loud: bool = False
    """Loud."""


def test_a_config_turns_back_into_the_words_to_type():
    from k3_plugins.arguments import flag_line, option_strings

    assert flag_line(FlagConfig()) == []
    assert flag_line(FlagConfig(8, ["a", "b"], False, True)) == [
        "--toy-width", "8", "--toy-names", "a", "b", "--no-toy-fast", "--toy-loud",
    ]  # fmt: skip
    assert flag_line(FlagConfig(8, toy_loud=True), ["toy_loud"]) == ["--toy-loud"]
    assert option_strings(FlagConfig)["toy_fast"] == ["--no-toy-fast", "--disable-toy-fast"]
