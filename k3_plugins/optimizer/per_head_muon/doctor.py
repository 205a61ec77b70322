"""``python -m k3_plugins.doctor --optimizer [flags of a training]``: the table of every parameter and its update.

The whole model is built on one process with tensors that have no memory, so the table of a model of any size is
printed on any machine. Shapes are those of the whole model; the owner group follows from the parallel sizes given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3_plugins.feature import FeatureError
from k3_plugins.optimizer.per_head_muon.settings import MuonSettings
from k3_plugins.optimizer.per_head_muon.table import Entry, build_table

_PARALLEL = {
    "--tensor-model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--context-parallel-size": 1,
    "--expert-model-parallel-size": 1,
    "--expert-tensor-parallel-size": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--pipeline-model-parallel-layout": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--micro-batch-size": 1,
    "--global-batch-size": 1,
    "--load": 1,
    "--save": 1,
    "--sequence-parallel": 0,
    "--overlap-grad-reduce": 0,
    "--overlap-param-gather": 0,
}
"""Flags of a layout or a run that one process cannot have, and how many values they take."""


@dataclass(frozen=True)
class Layout:
    """The parallel sizes that decide who owns a matrix."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @classmethod
    def of(cls, words: Sequence[str]) -> Layout:
        """From a command line."""
        from k3_plugins.arguments import integer_flags

        sizes = integer_flags(words)
        tensor = sizes.get("--tensor-model-parallel-size", 1)
        return cls(
            tensor,
            sizes.get("--expert-model-parallel-size", 1),
            sizes.get("--expert-tensor-parallel-size", tensor),
        )


def one_process(words: Sequence[str]) -> list[str]:
    """The command line of the same model on one process."""
    kept, skip = [], 0
    for word in words:
        flag, _, value = word.partition("=")
        if skip:
            skip -= 1
        elif flag in _PARALLEL:
            skip = 0 if value else _PARALLEL[flag]
        else:
            kept.append(word)
    return kept


def owner_group(entry: Entry, layout: Layout) -> str:
    """The ranks among which the owners of an entry's matrices are chosen, in words."""
    if entry.split is None:
        return "-"
    data = "expert data parallel" if entry.expert and layout.expert > 1 else "data parallel"
    tensor = layout.expert_tensor if entry.expert else layout.tensor
    whole_heads = entry.split.each == "head" and entry.split.repeat % tensor == 0
    if tensor == 1 or entry.tensor_dim is None or whole_heads:
        return data
    return f"{data} x tensor parallel"


def rows_of(table: Mapping[Any, Entry], layout: Layout) -> list[dict[str, Any]]:
    """The table as JSON values; layers that are alike share a row, with their numbers in the name."""
    rows: dict[tuple, list[str]] = {}
    for entry in table.values():
        name = entry.name.partition(".")[2]
        numbers = re.search(r"(?<=\.layers\.)\d+(?=\.)", name)
        pattern = re.sub(r"(?<=\.layers\.)\d+(?=\.)", "{}", name, count=1)
        key = (pattern, entry.shape, entry.why, owner_group(entry, layout), entry.optimizer)
        rows.setdefault(key, []).append(numbers.group() if numbers else "")
    return [
        {
            "parameter": pattern.format(_ranges([int(number) for number in numbers if number])),
            "shape": list(shape),
            "split": why,
            "owner_group": group,
            "optimizer": optimizer,
        }
        for (pattern, shape, why, group, optimizer), numbers in rows.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as ``[0-2,5]``; a single number as itself."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return words[0] if len(words) == 1 and "-" not in words[0] else f"[{','.join(words)}]"


def optimizer_rows(words: Sequence[str]) -> list[dict[str, Any]]:
    """Activate the features of a command line, build the model without memory, and return its table.

    Args:
        words: the command line of a training, control flags included.

    Raises:
        FeatureError: if per-head-muon is not among the features.
        SystemExit: with code 2 and a sentence, if the features or Megatron refuse the flags.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from k3_plugins.bootstrap import activate
    from k3_plugins.models.kimi_k3.megatron_session import build, initialize

    layout = Layout.of(words)
    sys.argv[1:] = one_process(words)
    activation = activate(sys.argv[1:], door="k3_plugins.doctor")
    if activation is None or "per-head-muon" not in activation.names:
        raise FeatureError("--optimizer shows the table of per-head-muon: add per-head-muon to --k3-plugins")
    args = initialize(activation, {})
    with FakeTensorMode():
        model = build(args)
    settings = MuonSettings.resolve(args, activation.configs["per-head-muon"])
    return rows_of(build_table([model], settings), layout)
