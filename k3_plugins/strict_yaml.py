"""YAML files that users write: a key given twice is an error, not the last one wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            text = (key.tag, str(key.value))
            if text in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is given twice in one mapping", problem_mark=key.start_mark
                )
            seen.add(text)
        return super().construct_mapping(node, deep)


def read(path: Path) -> Any:
    """What the file holds.

    Raises:
        ValueError: it cannot be read or is no YAML; one line that says where.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return yaml.load(file, _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as cause:
        raise ValueError(" ".join(str(cause).split())) from cause
