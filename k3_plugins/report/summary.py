"""The numbers of a run: losses, bits per byte, throughput."""

import ast
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3_plugins.data import sidecar
from k3_plugins.data.sources import InputError
from k3_plugins.report.events import ReportError, Run, Series

TRAIN = "lm loss"
VALIDATION = "lm loss validation"


@dataclass(frozen=True)
class LossSummary:
    """A loss in nats per token: where it started, ended, and was lowest. Values that are not finite are counted."""

    first: float
    last: float
    last_iteration: int
    best: float
    best_iteration: int
    non_finite: int


@dataclass(frozen=True)
class Summary:
    """The contents of ``summary.json``; what was not logged is null.

    ``validation_loss`` is that of the only validation set. With ``--multiple-validation-sets`` and several of them it
    is null, and ``validation_losses`` has each by name. ``bits_per_byte`` is the loss in bits over the bytes of text
    that the tokens stand for, so that tokenizers compare; ``tokens_per_second`` and ``tflops_per_device`` are medians
    over the log intervals (the first one warms up).
    """

    iterations: int
    tokens: int | None
    train_loss: LossSummary | None
    validation_loss: LossSummary | None
    validation_losses: dict[str, LossSummary]
    train_bits_per_byte: float | None
    validation_bits_per_byte: float | None
    best_validation_bits_per_byte: float | None
    bigram_bits_per_byte: float | None
    tokens_per_second: float | None
    tflops_per_device: float | None
    seq_length: int | None
    event_files: int


def summarize(
    run: Run,
    *,
    dataset: str | os.PathLike | None = None,
    seq_length: int | None = None,
    bigram_bits_per_byte: float | None = None,
) -> Summary:
    """Sums up a run. The data set folder and the sequence length are taken from Megatron's logged arguments if absent.

    Raises:
        ReportError: no loss was logged, or ``dataset`` is no prepared data set.
    """
    train, validations = run.scalars.get(TRAIN), validation_series(run)
    if train is None and not validations:
        raise ReportError(f"no {TRAIN!r} was logged (found: {', '.join(sorted(run.scalars))}): nothing to report on")
    seq_length = seq_length or _logged_int(run, "seq_length")
    train_loss = None if train is None else _loss(train)
    validation_losses = {name: _loss(series) for name, series in validations.items()}
    validation_loss = next(iter(validation_losses.values())) if len(validation_losses) == 1 else None
    train_bits, validation_bits = bits_per_byte_factors(run, dataset)
    batch = run.scalars.get("batch-size")
    tokens = None
    if seq_length and batch is not None:
        tokens = int(_cumulative(batch, train)) * seq_length
    return Summary(
        iterations=int(max(series.steps[-1] for series in (train, *validations.values()) if series is not None)),
        tokens=tokens,
        train_loss=train_loss,
        validation_loss=validation_loss,
        validation_losses=validation_losses if len(validation_losses) > 1 else {},
        train_bits_per_byte=_times(train_loss.last if train_loss else None, train_bits),
        validation_bits_per_byte=_times(validation_loss.last if validation_loss else None, validation_bits),
        best_validation_bits_per_byte=_times(validation_loss.best if validation_loss else None, validation_bits),
        bigram_bits_per_byte=bigram_bits_per_byte,
        tokens_per_second=_tokens_per_second(run, seq_length),
        tflops_per_device=_median(run.scalars.get("throughput")),
        seq_length=seq_length,
        event_files=run.files,
    )


def validation_series(run: Run) -> dict[str, Series]:
    """Validation losses by name: Megatron appends the set's name to the tag under ``--multiple-validation-sets``."""
    return {
        tag.removeprefix(VALIDATION).removeprefix("-") or "validation": series
        for tag, series in sorted(run.scalars.items())
        if tag == VALIDATION or (tag.startswith(f"{VALIDATION}-") and not tag.endswith(" ppl"))
    }


def bits_per_byte_factors(run: Run, dataset: str | os.PathLike | None = None) -> tuple[float | None, float | None]:
    """What turns a training and a validation loss (nats per token) into bits per byte; None where it is unknown."""
    folders = {"train": dataset, "validation": dataset}
    if dataset is None:
        folders = {
            "train": _logged_folder(run, "train_data_path"),
            "validation": _logged_folder(run, "valid_data_path"),
        }
    factors: list[float | None] = []
    for split, folder in folders.items():
        info = None
        if folder is not None:
            try:
                info = sidecar.read(folder)
            except InputError as error:
                # A data set of another make has no sidecar: then there are no bits per byte, unless it was named.
                if dataset is not None:
                    raise ReportError(str(error)) from error
        if info is None or split not in info.splits:
            factors.append(None)
        else:
            factors.append(info.tokens_per_byte(split) / math.log(2.0))
    return factors[0], factors[1]


def _loss(series: Series) -> LossSummary:
    finite = np.isfinite(series.values)
    if not finite.any():
        raise ReportError("no logged loss is finite: the run diverged from its first iteration")
    best = int(np.argmin(np.where(finite, series.values, np.inf)))
    return LossSummary(
        first=float(series.values[0]),
        last=float(series.values[-1]),
        last_iteration=int(series.steps[-1]),
        best=float(series.values[best]),
        best_iteration=int(series.steps[best]),
        non_finite=int((~finite).sum()),
    )


def _times(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor


def _median(series: Series | None) -> float | None:
    if series is None:
        return None
    values = series.values[1:] if len(series.values) > 1 else series.values
    return float(np.median(values))


def _cumulative(batch: Series, train: Series | None) -> float:
    """Samples up to the last iteration: each logged batch size holds for the iterations since the one before."""
    steps = np.concatenate([[0], batch.steps])
    return float((np.diff(steps) * batch.values).sum())


def _tokens_per_second(run: Run, seq_length: int | None) -> float | None:
    batch, times = run.scalars.get("batch-size"), run.scalars.get("iteration-time")
    if seq_length is None or batch is None or times is None:
        return None
    # Both are logged at the same iterations, or the batch size at more of them.
    at = np.searchsorted(batch.steps, times.steps, side="right") - 1
    rates = batch.values[np.maximum(at, 0)] * seq_length / times.values
    return float(np.median(rates[1:] if len(rates) > 1 else rates))


def _logged_int(run: Run, name: str) -> int | None:
    text = run.arguments.get(name, "")
    return int(text) if text.isdigit() else None


def _logged_folder(run: Run, name: str) -> Path | None:
    """The folder of a data path as Megatron logged it: the text of a list with one prefix."""
    try:
        paths = ast.literal_eval(run.arguments.get(name, "None"))
    except (ValueError, SyntaxError):
        return None
    # A blend of several data sets has no one number of bytes per token.
    return Path(paths[0]).parent if isinstance(paths, list) and len(paths) == 1 else None
