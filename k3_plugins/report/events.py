"""Reads the scalars of a run back from its TensorBoard event files.

A run that was stopped and resumed has several files, and after a crash the older one may reach further than the
checkpoint that the newer one started from. A newer file therefore replaces the older ones from its own first iteration
on, like the training it records.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

# Megatron logs most scalars twice; the second has samples on its axis instead of iterations.
OTHER_AXIS = " vs samples"
TEXT_SUFFIX = "/text_summary"


class ReportError(ValueError):
    """A run cannot be reported on; the message says what is missing."""


@dataclass(frozen=True)
class Series:
    """One scalar over the iterations: ``steps`` int64 ``[n]`` ascending, ``values`` float32 ``[n]`` as they were
    written, ``wall_times`` float64 ``[n]`` in seconds."""

    steps: np.ndarray
    values: np.ndarray
    wall_times: np.ndarray


@dataclass(frozen=True)
class Run:
    """The scalars of a run by tag, Megatron's arguments as it logged them (texts), and how many files it took."""

    scalars: dict[str, Series]
    arguments: dict[str, str] = field(default_factory=dict)
    files: int = 1


def find_event_files(folder: str | os.PathLike) -> list[Path]:
    """Event files in ``folder`` or in its ``tensorboard`` folder.

    Raises:
        ReportError: there are none.
    """
    folder = Path(folder)
    for place in (folder, folder / "tensorboard"):
        files = sorted(place.glob("*tfevents*"))
        if files:
            return files
    raise ReportError(
        f"no TensorBoard event files in {str(folder)!r} or its folder 'tensorboard': "
        "train with --tensorboard-dir, and name that folder or the one above it"
    )


def read_run(folder: str | os.PathLike) -> Run:
    """Reads and merges all event files of a run (see the module's docstring for how).

    Raises:
        ReportError: there is no event file, or none holds a scalar.
    """
    read = [_read_file(path) for path in find_event_files(folder)]
    files = sorted((file for file in read if file is not None), key=lambda file: file[0])
    if not files:
        raise ReportError(
            f"the event files in {str(folder)!r} hold no scalars: the run ended before its first log interval"
        )
    points: dict[str, dict[int, tuple[float, float]]] = {}
    arguments: dict[str, str] = {}
    for _, scalars, texts in files:
        first = min(step for series in scalars.values() for step in series)
        for tag in points:
            points[tag] = {step: point for step, point in points[tag].items() if step < first}
        for tag, series in scalars.items():
            points.setdefault(tag, {}).update(series)
        arguments.update(texts)
    return Run({tag: _series(by_step) for tag, by_step in points.items() if by_step}, arguments, len(files))


def _series(by_step: dict[int, tuple[float, float]]) -> Series:
    steps = sorted(by_step)
    return Series(
        np.array(steps, dtype=np.int64),
        np.array([by_step[step][0] for step in steps], dtype=np.float32),
        np.array([by_step[step][1] for step in steps], dtype=np.float64),
    )


def _read_file(path: Path) -> tuple[float, dict[str, dict[int, tuple[float, float]]], dict[str, str]] | None:
    """Start time, scalars and texts of one file; None without scalars. The last value of a step counts."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ReportError(f"reading a run needs tensorboard ({error}): pip install tensorboard") from error
    # 0 keeps every event; the default would keep a random sample of them.
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    scalars = {
        tag: {event.step: (event.value, event.wall_time) for event in accumulator.Scalars(tag)}
        for tag in tags["scalars"]
        if not tag.endswith(OTHER_AXIS)
    }
    if not scalars:
        return None
    texts = {}
    for tag in tags["tensors"]:
        if tag.endswith(TEXT_SUFFIX):
            value = accumulator.Tensors(tag)[-1].tensor_proto.string_val
            texts[tag.removesuffix(TEXT_SUFFIX)] = value[0].decode("utf-8", errors="replace") if value else ""
    return accumulator.FirstEventTimestamp(), scalars, texts
