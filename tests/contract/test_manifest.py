"""What a checkpoint knows about features: written in time, compared on loading, explained with the flags to use."""

import json
import os
from argparse import Namespace
from types import SimpleNamespace

import pytest

from k3_plugins import engine, manifest
from k3_plugins.activation import Activation
from k3_plugins.arguments import Control
from k3_plugins.feature import FeatureError
from k3_plugins.patching import PatchManager
from k3_plugins.patching.fingerprint import FingerprintStore
from tests.contract.toys import TINY_GPT, TOYS, run_ranks, toy_feature

DOOR = "k3_plugins.pretrain_gpt"


@pytest.fixture
def toy_config(monkeypatch):
    monkeypatch.syspath_prepend(str(TOYS))
    import k3_toy_plugin

    return k3_toy_plugin.ToyConfig


@pytest.fixture
def activation(toy_config):
    """activation(width=..., probe=True): what is active now."""

    def make(width=4, backend="auto", toy=True, probe=False, **control):
        features, configs = [], {}
        if toy:
            features.append(toy_feature("toy", config=toy_config, changes_parameters=True))
            configs["toy"] = toy_config(width, backend)
        if probe:
            features.append(toy_feature("probe"))
            configs["probe"] = None
        return Activation(
            features=tuple(features),
            platform="cpu",
            platform_reason="a test",
            door="test",
            control=Control(**control),
            manager=PatchManager([], FingerprintStore({}, "1.0")),
            megatron_version="0.19.2",
            configs=configs,
        )

    return make


@pytest.fixture
def saved(tmp_path):
    """saved(activation, iteration): a checkpoint folder; None for one that stock Megatron saved."""

    def make(activation, iteration=10, tracker=True):
        folder = tmp_path / "ckpt" / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        if activation is not None:
            manifest.write(folder, activation, iteration)
        if tracker:
            (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return str(tmp_path / "ckpt")

    return make


def arguments(load, **changes):
    values = dict(
        load=load,
        ckpt_step=None,
        non_persistent_ckpt_type=None,
        non_persistent_global_ckpt_dir=None,
        pretrained_checkpoint=None,
        no_load_optim=False,
        finetune=False,
    )
    return Namespace(**{**values, **changes})


def refused(args, activation):
    with pytest.raises(FeatureError) as caught:
        manifest.check_load(args, activation)
    return str(caught.value)


# -- comparing ---------------------------------------------------------------------------------------------------------


def test_the_same_features_load_without_a_word(saved, activation):
    assert manifest.check_load(arguments(saved(activation(8))), activation(8)) == []


def test_a_changed_parameter_field_prints_the_flags_of_the_checkpoint(saved, activation):
    text = refused(arguments(saved(activation(8, "fast"))), activation(4))
    assert "toy: --toy-width was 8 when it was saved, now it is 4" in text
    assert text.splitlines()[-1].strip() == "--k3-plugins toy --toy-width 8"


def test_a_value_that_was_the_default_is_among_the_flags_to_use(saved, activation):
    """Flags at their default are not recorded; the printed line must still bring back the checkpoint's value."""
    text = refused(arguments(saved(activation(4))), activation(8))
    assert text.splitlines()[-1].strip() == "--k3-plugins toy --toy-width 4"


def test_the_flags_to_use_keep_the_active_features_that_are_harmless(saved, activation):
    text = refused(arguments(saved(activation(8))), activation(4, probe=True))
    assert text.splitlines()[-1].strip() == "--k3-plugins toy,probe --toy-width 8"


def test_a_field_that_does_not_touch_parameters_may_change(saved, activation):
    assert manifest.check_load(arguments(saved(activation(8, "fast"))), activation(8, "slow")) == []


def test_a_missing_feature_is_refused(saved, activation):
    text = refused(arguments(saved(activation(8, probe=True))), activation(toy=False, probe=True))
    assert "saved with feature 'toy', which is off" in text and "--k3-plugins toy,probe --toy-width 8" in text


def test_an_extra_feature_is_refused(saved, activation):
    text = refused(arguments(saved(activation(toy=False, probe=True))), activation())
    assert "saved without feature 'toy', which is on" in text and "(no --k3-plugins)" in text


def test_toggles_that_do_not_change_parameters_are_noted(saved, activation):
    notes = manifest.check_load(arguments(saved(activation(probe=True))), activation())
    assert len(notes) == 1 and "probe was toggled" in notes[0]


def test_a_checkpoint_of_stock_megatron_is_refused_for_features_that_change_parameters(saved, activation):
    load = saved(None)
    text = refused(arguments(load), activation())
    assert "saved without k3_plugins" in text and "toy changes the parameters" in text
    assert "saved without k3_plugins" in manifest.check_load(arguments(load), activation(toy=False, probe=True))[0]


def test_a_start_without_features_refuses_a_checkpoint_that_needs_them(saved, activation, tmp_path):
    load = saved(activation(8))
    with pytest.raises(FeatureError, match="no feature is on(.|\n)*--k3-plugins toy --toy-width 8"):
        manifest.refuse_without_features(load, None)
    manifest.refuse_without_features(str(tmp_path / "nowhere"), None)  # Megatron's business


def test_a_start_without_features_loads_what_no_feature_changed(saved, activation):
    manifest.refuse_without_features(saved(activation(toy=False, probe=True)), None)
    manifest.refuse_without_features(saved(None, iteration=20), None)


def test_optimizer_state_of_a_feature_needs_the_feature_or_no_optimizer(saved, activation, tmp_path):
    """Megatron's AdamW reports a KeyError with a tuple of learning rates for it."""
    with_state = activation(toy=False, probe=True)
    with_state.features[0].changes_optimizer = True
    load = saved(with_state)
    text = refused(arguments(load), activation(toy=False))
    assert "holds the optimizer state of probe" in text
    assert "add probe to --k3-plugins" in text and "--no-load-optim" in text
    assert manifest.check_load(arguments(load), with_state) == []
    for words in ({"no_load_optim": True}, {"finetune": True}):
        assert "probe was toggled" in manifest.check_load(arguments(load, **words), activation(toy=False))[0]
    weights = arguments(str(tmp_path / "nothing yet"), pretrained_checkpoint=load)
    assert "probe was toggled" in manifest.check_load(weights, activation(toy=False))[0]
    with pytest.raises(FeatureError, match="holds the optimizer state of probe"):
        manifest.refuse_without_features(load, None)
    manifest.refuse_without_features(load, None, optimizer=False)


def layout(expert=1, expert_tensor=1, tensor=1):
    return {
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor,
        "tensor_model_parallel_size": tensor,
    }


@pytest.mark.parametrize(
    ("before", "after", "flag"),
    [
        (layout(), layout(expert=2), "--expert-model-parallel-size 2 (saved with 1)"),
        (layout(expert=4), layout(), "--expert-model-parallel-size 1 (saved with 4)"),
        (layout(), layout(tensor=2), "--tensor-model-parallel-size 2 (saved with 1)"),
        (layout(expert=4), layout(expert=2), None),
        (layout(tensor=2, expert_tensor=2), layout(), None),
    ],
)
def test_experts_with_an_optimizer_of_their_own(before, after, flag, saved, activation):
    """Megatron chains it to the other one, and its loading counts the links: a traceback on every rank."""
    first, now = activation(8), activation(8)
    first.layout, now.layout = before, after
    args = arguments(saved(first), num_experts=8, moe_use_upcycling=False)
    if flag is None:
        manifest.check_model(args, now)
        return
    with pytest.raises(FeatureError) as caught:
        manifest.check_model(args, now)
    assert str(caught.value).startswith(flag) and "--no-load-optim" in str(caught.value)
    for way_out in ({"no_load_optim": True}, {"finetune": True}, {"num_experts": None}):
        manifest.check_model(Namespace(**{**vars(args), **way_out}), now)


def test_another_model_is_named_with_what_to_type_and_what_to_leave_out(saved, activation):
    first, now = activation(8), activation(8)
    first.model = {"num_layers": 4, "swiglu": False, "num_experts": None, "add_bias_linear": False}
    now.model = {"num_layers": 2, "swiglu": True, "num_experts": 8, "add_bias_linear": True}
    args = arguments(saved(first), num_experts=8, moe_use_upcycling=False, no_load_optim=True)
    with pytest.raises(FeatureError, match="holds another model") as caught:
        manifest.check_model(args, now)
    told = str(caught.value).rpartition("To load it, use:")[2]
    words = ("--num-layers 4", "(without --swiglu)", "(without --num-experts)", "--disable-bias-linear")
    assert all(word in told for word in words) and "(without --disable" not in told


# -- finding -----------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_checkpoint_is_an_error_unless_allowed(tmp_path, activation):
    assert "holds no checkpoint" in refused(arguments(str(tmp_path)), activation())
    assert "holds no checkpoint" in refused(arguments(str(tmp_path / "gone")), activation())
    notes = manifest.check_load(arguments(str(tmp_path)), activation(allow_empty_load=True))
    assert "starting from scratch" in notes[0]


def test_the_tracker_must_name_a_folder_that_exists(tmp_path, activation):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert "names iter_0000007, but there is no such folder" in refused(arguments(str(tmp_path)), activation())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("seven")
    assert "holds 'seven' instead of an iteration" in refused(arguments(str(tmp_path)), activation())


def test_a_step_given_by_flag_wins_over_the_tracker(saved, activation):
    load = saved(activation(8), 10)
    saved(activation(4), 20)
    assert manifest.check_load(arguments(load, ckpt_step=10), activation(8)) == []
    assert "--toy-width was 4" in refused(arguments(load), activation(8))
    assert "--ckpt-step names iter_0000030" in refused(arguments(load, ckpt_step=30), activation(8))


def test_the_newer_of_a_persistent_and_a_non_persistent_checkpoint_counts(saved, activation, tmp_path):
    load = saved(activation(8), 10)
    folder = tmp_path / "ckpt" / "non_persistent" / "iter_0000012"
    folder.mkdir(parents=True)
    manifest.write(folder, activation(4), 12)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("12")
    args = arguments(load, non_persistent_ckpt_type="global")
    assert manifest.check_load(args, activation(4)) == []
    assert "--toy-width was 4" in refused(args, activation(8))
    (folder.parent / "latest_checkpointed_iteration.txt").unlink()
    assert manifest.check_load(args, activation(8)) == []


def test_a_pretrained_checkpoint_is_checked_when_load_is_empty(saved, activation, tmp_path):
    args = arguments(str(tmp_path / "fresh"), pretrained_checkpoint=saved(activation(8)))
    assert manifest.check_load(args, activation(8)) == []
    assert "--toy-width was 8" in refused(args, activation(4))


@pytest.mark.parametrize("text", ["{", "[]", '{"features": {}}', '{"format": 1}'])
def test_a_damaged_manifest_is_an_error(saved, activation, text):
    load = saved(activation())
    with open(os.path.join(load, "iter_0000010", manifest.FILE_NAME), "w") as file:
        file.write(text)
    assert "is damaged" in refused(arguments(load), activation())


def test_a_manifest_of_a_later_format_is_an_error(saved, activation):
    load = saved(activation())
    path = os.path.join(load, "iter_0000010", manifest.FILE_NAME)
    with open(path) as file:
        contents = json.load(file)
    with open(path, "w") as file:
        json.dump({**contents, "format": 99}, file)
    assert "has format 99" in refused(arguments(load), activation())


# -- writing -----------------------------------------------------------------------------------------------------------


def test_the_manifest_is_written_before_the_tracker_moves(activation, tmp_path, monkeypatch):
    """The order of events inside Megatron's save_checkpoint, with a crash right before the tracker is written."""
    monkeypatch.setattr(engine, "current", lambda: activation(8))
    folder = tmp_path / "iter_0000005"
    get_tracker = engine._publish(lambda path: os.path.join(path, "latest_checkpointed_iteration.txt"))

    def megatrons_save(iteration, crash):
        folder.mkdir()
        (folder / "data").write_text("x")
        tracker = get_tracker(str(tmp_path))
        assert json.loads((folder / manifest.FILE_NAME).read_text())["iteration"] == iteration
        if crash:
            raise KeyboardInterrupt
        with open(tracker, "w") as file:
            file.write(str(iteration))

    with pytest.raises(KeyboardInterrupt):
        engine._save(megatrons_save)(5, crash=True)
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()
    assert sorted(p.name for p in folder.iterdir()) == ["data", manifest.FILE_NAME]  # no temporary file is left
    get_tracker(str(tmp_path / "elsewhere"))  # outside a save nothing is written
    assert not (tmp_path / "elsewhere").exists()


def test_a_crash_while_the_manifest_is_written_leaves_no_half_file(activation, tmp_path, monkeypatch):
    def crash(*paths):
        raise OSError("disk full")

    monkeypatch.setattr(manifest.os, "replace", crash)
    with pytest.raises(OSError, match="disk full"):
        manifest.write(tmp_path, activation(), 1)
    assert not (tmp_path / manifest.FILE_NAME).exists()


def test_every_value_of_a_config_becomes_json(activation, tmp_path):
    manifest.write(tmp_path, activation(8, probe=True), 3)
    contents = json.loads((tmp_path / manifest.FILE_NAME).read_text())
    assert contents["features"]["toy"] == {
        "changes_parameters": True,
        "changes_optimizer": False,
        "config": {"toy_width": 8, "toy_backend": "auto"},
        "parameter_fields": ["toy_width"],
        "flags": ["--toy-width", "8"],
    }
    assert contents["features"]["probe"]["config"] == {}
    assert SimpleNamespace(**contents).megatron == "0.19.2"


# -- real jobs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Two iterations of a real two-rank job: one synchronous save each, with the toy at width 5."""
    folder = tmp_path_factory.mktemp("job")
    flags = [*TINY_GPT, "--tensor-model-parallel-size", "2", "--save", folder / "ckpt", "--save-interval", "1"]
    ranks = run_ranks(DOOR, [*flags, "--k3-plugins", "toy", "--toy-width", "5"], folder, nprocs=2)
    assert ranks.codes == [0, 0], ranks
    return folder / "ckpt"


def test_every_saved_iteration_has_its_manifest(checkpoint):
    assert sorted(p.name for p in checkpoint.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    for iteration in (1, 2):
        contents = json.loads((checkpoint / f"iter_{iteration:07d}" / manifest.FILE_NAME).read_text())
        assert contents["iteration"] == iteration
        assert contents["features"]["toy"]["config"] == {"toy_width": 5, "toy_backend": "auto"}


def test_a_real_job_with_another_set_ends_before_training(checkpoint, tmp_path):
    flags = [*TINY_GPT, "--tensor-model-parallel-size", "2", "--load", checkpoint, "--k3-plugins", "toy"]
    ranks = run_ranks(DOOR, flags, tmp_path, nprocs=2)
    assert ranks.codes == [2, 2], ranks
    assert all("--k3-plugins toy --toy-width 5" in log and "initializing torch" not in log for log in ranks.logs), ranks


def test_a_real_job_without_features_is_refused_and_says_what_to_type(checkpoint, tmp_path):
    ranks = run_ranks(DOOR, [*TINY_GPT, "--load", checkpoint], tmp_path)
    assert ranks.codes == [2] and "--k3-plugins toy --toy-width 5" in ranks.logs[0], ranks


def test_a_toggled_harmless_feature_loads_and_an_asynchronous_save_has_its_manifest(checkpoint, tmp_path):
    flags = [*TINY_GPT, "--tensor-model-parallel-size", "2", "--load", checkpoint, "--train-iters", "3"]
    flags += ["--save", tmp_path / "ckpt", "--save-interval", "1", "--async-save", "--no-load-optim", "--no-load-rng"]
    flags += ["--k3-plugins", "toy,toy-probe", "--toy-width", "5", "--override-opt-param-scheduler"]
    ranks = run_ranks(DOOR, flags, tmp_path, nprocs=2)
    assert ranks.codes == [0, 0], ranks
    assert "toy-probe was toggled since" in ranks.logs[0], ranks
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert json.loads((tmp_path / "ckpt" / "iter_0000003" / manifest.FILE_NAME).read_text())["iteration"] == 3
