"""What the feature refuses before training, what its records say, and the report over them."""

import json
from argparse import Namespace
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from k3_plugins.feature import FeatureError
from k3_plugins.memory.activation_manager.config import ActivationManagerConfig
from k3_plugins.memory.activation_manager.feature import FEATURE, REFUSED
from k3_plugins.memory.activation_manager.record import write_record
from k3_plugins.memory.report import main as report
from tests.unit.memory.activation_manager.toy import step

PLAIN = {field: None for field, _, _ in REFUSED} | {
    "gradient_accumulation_fusion": False,
    "cuda_graph_impl": "none",
    "pipeline_model_parallel_size": 1,
}


def validate(rules="mlp=cpu", config=(), **args):
    settings = ActivationManagerConfig(activation_policy=rules, **dict(config))
    FEATURE.validate(Namespace(**{**PLAIN, **args}), settings)


def test_plain_flags_are_accepted():
    validate()


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("gradient_accumulation_fusion", True, "--no-gradient-accumulation-fusion"),
        ("cpu_offloading_num_layers", 2, "--cpu-offloading-num-layers"),
        ("fine_grained_activation_offloading", True, "--fine-grained-activation-offloading"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl"),
        ("overlap_moe_expert_parallel_comm", True, "--overlap-moe-expert-parallel-comm"),
        ("distribute_saved_activations", True, "--distribute-saved-activations"),
        ("fp8", "hybrid", "--fp8-format"),
        ("use_megatron_fsdp", True, "--use-megatron-fsdp"),
    ],
)
def test_what_stores_activations_otherwise_is_refused(field, value, flag):
    with pytest.raises(FeatureError, match=f"{flag}.*activation-manager|activation-manager.*{flag}"):
        validate(**{field: value})


@pytest.mark.parametrize(
    ("rules", "config", "message"),
    [
        (None, {}, "needs rules: give for example --activation-policy"),
        ("mlp=cpu", {"activation_min_bytes": -1}, "--activation-min-bytes -1"),
        ("mlp=cpu", {"activation_host_pool_mib": 0}, "--activation-host-pool-mib 0"),
        ("mlp=remote", {}, "needs at least 2; write cpu"),
    ],
)
def test_bad_settings_are_refused(rules, config, message):
    with pytest.raises(FeatureError, match=message):
        validate(rules, config)


def test_a_report_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FeatureError, match="--activation-report .*name a folder that can be written"):
        validate(config={"activation_report": str(tmp_path / "file" / "run")})
    validate(config={"activation_report": str(tmp_path / "new" / "run")})
    assert not (tmp_path / "new").exists(), "checking flags makes nothing: a dry run does it, too"


def test_bad_remote_settings_are_refused():
    wrong = ("activation_remote_timeout", 11), ("activation_remote_timeout", 4), ("activation_remote_headroom", -0.1)
    for config in (dict([pair]) for pair in wrong):
        with pytest.raises(FeatureError, match=next(iter(config)).replace("_", "-")):
            validate("mlp=remote", config, pipeline_model_parallel_size=2)


@pytest.fixture
def record(tmp_path):
    """The record of a step of the toy model, and its manager."""
    _, manager = step("*=cpu, mlp=fp8+cpu, attention=recompute")
    write_record(str(tmp_path / "run"), manager, SimpleNamespace(rank=0), iteration=1)
    return tmp_path / "run", manager


def test_report_by_layer_and_by_tensor(record, capsys):
    folder, manager = record
    rows = [asdict(row) for row in manager.rows[0]]
    for by, key in (("layer", "layer"), ("tensor", "name")):
        assert report([str(folder), "--by", by, "--json"]) == 0
        (entry,) = json.loads(capsys.readouterr().out)
        assert entry["total"]["original"] == sum(row["nbytes"] for row in rows)
        assert entry["total"]["cpu"] == sum(row["stored"] for row in rows if row["policy"].endswith("cpu"))
        assert {row[by] for row in entry["rows"]} == {row[key] for row in rows}
        assert entry["peak_device_bytes"] == manager.ledger.peak
    assert report([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "layer 2" in text and "fp8+cpu" in text and "peak of the run" in text


def test_what_if_foretells_the_bytes_of_another_run(record, capsys):
    """The record of a run without recomputation under KEEP foretells those of FP8+CPU."""
    folder, _ = record
    _, kept = step("*=keep", smallest=0)
    write_record(str(folder), kept, SimpleNamespace(rank=0), iteration=1)
    _, coded = step("*=fp8+cpu", smallest=0)
    assert report([str(folder), "--json", "--what-if", "*=fp8+cpu"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    stored = sum(row.stored for row in coded.rows[0])
    # KEEP counts whole storages, moved tensors their elements: views of one storage make the difference
    assert entry["total"]["cpu"] == pytest.approx(stored, rel=0.1) and entry["total"]["device"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--what-if", "nothing=cpu"], "rule 'nothing=cpu' matches no recorded tensor"),
        (["--what-if", "mlp=cpuu"], "did you mean cpu"),
        (["--rank", "7"], "holds no record of that rank"),
    ],
)
def test_bad_questions_end_with_a_sentence(record, words, message, capsys):
    assert report([str(record[0]), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_records(tmp_path, capsys):
    assert report([str(tmp_path)]) == 2
    assert "holds no rank*.json" in capsys.readouterr().err
    (tmp_path / "rank00000.json").write_text("[1")
    assert report([str(tmp_path)]) == 2 and "cannot be read" in capsys.readouterr().err
