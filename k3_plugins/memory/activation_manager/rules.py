"""Rules that give saved tensors their policy by name: ``attention.*=fp8+cpu, experts.act@1-4=recompute``.

A pattern is matched against a tensor's name with shell wildcards (``*`` crosses dots), and a pattern without one also
covers everything below it: ``attention`` is ``attention`` and ``attention.*``. The LAST rule that matches decides. A
rule may be limited to layers, numbered from 1 over the whole model: ``attention@1-12=fp8``.

The same rules in a YAML file, for ``--activation-policy rules.yaml``::

    - {match: "attention.*", policy: fp8+cpu}
    - {match: experts.act, policy: recompute, layers: 1-12}

This module imports neither torch nor megatron.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from k3_plugins.feature import FeatureError
from k3_plugins.memory.policy import Policy

_LAYERS = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Rule:
    """One rule."""

    pattern: str
    policy: Policy
    layers: tuple[int, int] | None = None
    """First and last layer, both included; None is every layer and everything outside of layers."""

    def __str__(self) -> str:
        if self.layers is None:
            return f"{self.pattern}={self.policy.value}"
        first, last = self.layers
        where = f"{first}" if first == last else f"{first}-{last}"
        return f"{self.pattern}@{where}={self.policy.value}"

    @property
    def exact(self) -> bool:
        """Whether the pattern has no wildcard."""
        return not set(self.pattern) & set("*?[")

    def matches(self, name: str, layer: int | None) -> bool:
        """Whether it covers the tensor ``name`` of layer number ``layer`` (None outside of layers)."""
        if self.layers is not None and (layer is None or not self.layers[0] <= layer <= self.layers[1]):
            return False
        return fnmatchcase(name, self.pattern) or fnmatchcase(name, f"{self.pattern}.*")


def parse_rules(text: str) -> tuple[Rule, ...]:
    """The value of ``--activation-policy``: rules separated by commas, or the path of a YAML file.

    Raises:
        FeatureError: naming the rule and what is wrong with it.
    """
    stripped = text.strip()
    if stripped.endswith((".yaml", ".yml")):
        rules = _read_yaml(Path(stripped))
    else:
        rules = tuple(_parse(part.strip()) for part in stripped.split(",") if part.strip())
    if not rules:
        raise FeatureError(
            f"--activation-policy {text!r} holds no rule; write for example --activation-policy 'attention.*=fp8+cpu'"
        )
    return rules


def _parse(text: str) -> Rule:
    left, equals, policy = text.partition("=")
    pattern, at, layers = left.partition("@")
    if not equals or not pattern.strip():
        raise FeatureError(
            f"--activation-policy: rule {text!r} is not of the form NAME=POLICY or NAME@FIRST-LAST=POLICY; a file of"
            " rules ends in .yaml"
        )
    name, at_the_end, where = policy.partition("@")
    if at_the_end:
        raise FeatureError(
            f"--activation-policy: rule {text!r}: layers stand before the policy, {pattern.strip()}@{where}={name}"
        )
    if "=" in policy:
        raise FeatureError(f"--activation-policy: rule {text!r} holds more than one '='; rules are separated by commas")
    return _rule(text, pattern.strip(), policy, layers.strip() if at else None)


def _rule(text: str, pattern: str, policy: str, layers: str | None) -> Rule:
    try:
        parsed = Policy.parse(policy)
    except ValueError as error:
        raise FeatureError(f"--activation-policy: rule {text!r}: {error}") from error
    return Rule(pattern, parsed, None if layers is None else _layers(text, layers))


def _layers(text: str, layers: str) -> tuple[int, int]:
    match = _LAYERS.fullmatch(layers)
    first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 1 <= first <= last:
        raise FeatureError(
            f"--activation-policy: rule {text!r}: layers {layers!r} must be a number or FIRST-LAST, counted from 1"
        )
    return first, last


def _read_yaml(path: Path) -> tuple[Rule, ...]:
    from k3_plugins import strict_yaml

    try:
        contents = strict_yaml.read(path)
    except ValueError as error:
        raise FeatureError(f"--activation-policy {path}: {error}") from error
    if not isinstance(contents, list):
        raise FeatureError(f"--activation-policy {path}: the file must hold a list of rules with match and policy")
    return tuple(_yaml_rule(path, number, item) for number, item in enumerate(contents, 1))


def _yaml_rule(path: Path, number: int, item: Any) -> Rule:
    where = f"{path}, rule {number}"
    if not isinstance(item, dict) or not {"match", "policy"} <= item.keys() <= {"match", "policy", "layers"}:
        raise FeatureError(f"--activation-policy {where}: write match, policy and, if need be, layers; found {item!r}")
    match = item["match"]
    if not isinstance(match, str) or not match.strip() or set(match) & set("@=,"):
        raise FeatureError(
            f"--activation-policy {where}: match {match!r} must be the name of a tensor or module, with or without"
            " wildcards; layers and policy have fields of their own"
        )
    layers = item.get("layers")
    return _rule(where, match.strip(), str(item["policy"]), None if layers is None else str(layers))


class RuleBook:
    """Rules that count what they matched.

    Args:
        rules: in the order in which they were written.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.hits = [0] * len(self.rules)
        """Tensors (for recompute: function calls) that each rule matched on this rank."""

    def module(self, name: str, layer: int | None) -> int | None:
        """Index of the rule that makes a module compute its results again, if the last rule that matches says so."""
        matching = [i for i, rule in enumerate(self.rules) if rule.matches(name, layer)]
        return matching[-1] if matching and self.rules[matching[-1]].policy is Policy.RECOMPUTE else None

    def tensor(self, name: str, layer: int | None, annotated: Policy | None, rebuildable: bool) -> Policy:
        """The policy of a saved tensor; counts the rules that match.

        An annotation in the code yields only to a rule that names the tensor without a wildcard. Recompute rules are
        passed over where there is nothing to compute a tensor from.

        Args:
            annotated: the policy that the code gave it.
            rebuildable: whether it is known how to compute it again.
        """
        chosen = annotated
        for index, rule in enumerate(self.rules):
            if not rule.matches(name, layer) or (rule.policy is Policy.RECOMPUTE and not rebuildable):
                continue
            self.hits[index] += 1
            if annotated is None or rule.exact:
                chosen = rule.policy
        return chosen or Policy.KEEP
