"""What a run was trained with so far, kept in ``--output``: a call that goes on must agree with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3_plugins.atomic import replacing
from k3_plugins.recipes.curriculum.schedule import Curriculum, CurriculumError

FILE = "curriculum.json"

_CURVE = frozenset(("tokens", "context", "global-batch", "cooldown"))
"""Fields of a stage that decide the learning rate of every stage."""


def values(curriculum: Curriculum, tokenizer: Sequence[str]) -> dict[str, Any]:
    """The file and the tokenizer of its data sets, as JSON values."""
    return {**curriculum.model_dump(mode="json", by_alias=True), "tokenizer": list(tokenizer)}


def write(output: Path, now: dict[str, Any]) -> None:
    """Keep ``values(...)``."""
    with replacing(output / FILE) as temporary:
        temporary.write_text(json.dumps(now, indent=1) + "\n")


def check(output: Path, now: dict[str, Any], finished: int) -> None:
    """Compare with what was kept when the first ``finished`` stages were trained.

    Raises:
        CurriculumError: naming the first field that changed, with both values; or nothing was kept.
    """
    path = output / FILE
    try:
        kept = _fixed(json.loads(path.read_text()), finished)
    except FileNotFoundError as error:
        raise CurriculumError(
            f"{output / 'checkpoints'} holds a checkpoint, but {path}, which says how it was trained, is missing; give"
            " --output another folder"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CurriculumError(
            f"{path}, which says how the run was trained, cannot be read ({error}); give --output another folder"
        ) from error
    given = _fixed(now, finished)
    for name in dict.fromkeys((*kept, *given)):
        if kept.get(name) != given.get(name):
            raise CurriculumError(
                f"{name} is {json.dumps(given.get(name))}, but {output} was trained with {json.dumps(kept.get(name))}:"
                " put it back, or give --output another folder"
            )


def _fixed(record: dict[str, Any], finished: int) -> dict[str, Any]:
    """Field -> value, of what may not change: the curve of the whole run, and all of a finished stage but its name."""
    names = ["lr", "min-lr", "warmup", "eval-global-batch", "tokenizer", *(["flags"] if finished else [])]
    fields = {name: record[name] for name in names}
    fields["number of stages"] = len(record["stages"])
    for number, stage in enumerate(record["stages"], start=1):
        for name, value in stage.items():
            if name in _CURVE or (number <= finished and name != "name"):
                fields[f"stages.{number}.{name}"] = value
    return fields
