"""Policies compose or are refused with a sentence; rules match by name and layer, the last one counts."""

import pytest

from k3_plugins.feature import FeatureError
from k3_plugins.memory.activation_manager.names import short
from k3_plugins.memory.activation_manager.rules import RuleBook, parse_rules
from k3_plugins.memory.policy import Policy


@pytest.mark.parametrize("policy", Policy)
def test_policies_are_read_back(policy):
    assert Policy.parse(policy.value.upper()) is policy and Policy.parse(policy) is policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpuu", "did you mean cpu"),
        ("", "no activation policy ''"),
        ("cpu+fp8", "write fp8 first"),
        ("cpu+remote", "one place"),
        ("keep+fp8", "keep cannot be combined"),
        ("recompute+cpu", "recompute cannot be combined"),
        ("fp8+fp8", "named twice"),
    ],
)
def test_unknown_policies_and_compositions_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Policy.parse(text)
    with pytest.raises(FeatureError, match=f"(?s)rule 'mlp={text.replace('+', '[+]')}'.*{message}"):
        parse_rules(f"mlp={text}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rule"),
        ("mlp", "'mlp' is not of the form"),
        ("=cpu", "'=cpu' is not of the form"),
        ("mlp@0-2=cpu", "counted from 1"),
        ("mlp@3-2=cpu", "counted from 1"),
        ("mlp@x=cpu", "counted from 1"),
        ("mlp=cpu@1-4", "mlp@1-4=cpu"),
        ("mlp=cpu;attention=fp8", "separated by commas"),
        ("rules.json", "a file of rules ends in .yaml"),
        ("missing.yaml", "missing.yaml"),
    ],
)
def test_malformed_rules_are_refused(text, message):
    with pytest.raises(FeatureError, match=message):
        parse_rules(text)


def test_flag_and_yaml_say_the_same(tmp_path):
    file = tmp_path / "rules.yaml"
    file.write_text('- {match: "attention.*", policy: fp8+cpu}\n- {match: mlp, policy: recompute, layers: 2-3}\n')
    assert parse_rules(str(file)) == parse_rules("attention.*=fp8+cpu, mlp@2-3=recompute")
    file.write_text("- {match: mlp, policy: cpu, layer: 3}\n")
    with pytest.raises(FeatureError, match="rule 1: write match, policy"):
        parse_rules(str(file))
    for match in ("", "3", "mlp@3", "'mlp=cpu'"):
        file.write_text(f"- {{match: {match}, policy: cpu}}\n")
        with pytest.raises(FeatureError, match="rule 1: match .* must be the name"):
            parse_rules(str(file))
    file.write_text("- {match: mlp, policy: cpu, policy: fp8}\n")
    with pytest.raises(FeatureError, match="'policy' is given twice.*rules.yaml.*line 1, column 29"):
        parse_rules(str(file))
    file.write_text("mlp: cpu\n")
    with pytest.raises(FeatureError, match="must hold a list"):
        parse_rules(str(file))


def test_patterns():
    book = RuleBook(parse_rules("*=cpu, attention=fp8, attention.core.*@2=keep, mlp.act=recompute"))

    def policy(name, layer=1, annotated=None, rebuildable=False):
        return book.tensor(name, layer, annotated, rebuildable)

    assert policy("router.saved") is Policy.CPU
    assert policy("attention.saved") is policy("attention.core.q") is Policy.FP8
    assert policy("attentions.saved") is Policy.CPU
    assert policy("attention.core.q", 2) is Policy.KEEP
    assert policy("attention.core.q", None) is Policy.FP8
    # without anything to compute it from, the rule before counts
    assert policy("mlp.act") is Policy.CPU and policy("mlp.act", rebuildable=True) is Policy.RECOMPUTE
    # an annotation yields to a rule that names the tensor, not to a wildcard
    assert policy("router.saved", annotated=Policy.KEEP) is Policy.KEEP
    assert policy("attention.saved", annotated=Policy.KEEP) is Policy.FP8
    assert book.hits == [10, 5, 1, 1]
    assert book.module("mlp.act", 1) == 3 and book.module("mlp", 1) is None


def test_names():
    names = {
        "self_attention.core_attention": "attention.core_attention",
        "self_attention_res": "self_attention_res",
        "input_layernorm": "attention_norm",
        "mlp.linear_fc1": "mlp.linear_fc1",
        "mlp.experts.local_experts.12.linear_fc2": "experts.linear_fc2",
        "mlp.shared_experts.activation_func": "shared_experts.act",
        "mlp.router": "router",
    }
    assert {path: short(path) for path in names} == names
