"""Writes the report of a run: ``loss.png`` and ``summary.json``, each in one step."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

from k3_plugins.report.events import read_run
from k3_plugins.report.plot import draw_losses
from k3_plugins.report.summary import Summary, bits_per_byte_factors, summarize

PICTURE, SUMMARY = "loss.png", "summary.json"


def write_report(
    tensorboard_dir: str | os.PathLike,
    out_dir: str | os.PathLike | None = None,
    *,
    dataset: str | os.PathLike | None = None,
    seq_length: int | None = None,
    bigram_bits_per_byte: float | None = None,
    title: str | None = None,
) -> Summary:
    """Reports on the run whose event files are in ``tensorboard_dir`` (flush its writer first); call it on one rank.

    Args:
        out_dir: where to write; default: beside the event files.
        dataset: the prepared data set's folder, for bits per byte; default: from the arguments that Megatron logged.
        seq_length: for tokens per second; default: from the same.
        bigram_bits_per_byte: a baseline to draw and to record.
        title: of the picture; default: the name of the run's folder (the one above, if that is called tensorboard).

    Raises:
        ReportError: no events, no loss, or a missing package; nothing was written then.
    """
    run = read_run(tensorboard_dir)
    summary = summarize(run, dataset=dataset, seq_length=seq_length, bigram_bits_per_byte=bigram_bits_per_byte)
    out = Path(out_dir if out_dir is not None else tensorboard_dir)
    out.mkdir(parents=True, exist_ok=True)
    if title is None:
        folder = Path(os.path.abspath(out))
        title = folder.parent.name if folder.name == "tensorboard" else folder.name
    temporary = out / f".{PICTURE}.tmp-{os.getpid()}"
    try:
        draw_losses(
            run,
            temporary,
            factors=bits_per_byte_factors(run, dataset),
            bigram_bits_per_byte=bigram_bits_per_byte,
            title=title,
        )
        os.replace(temporary, out / PICTURE)
    finally:
        temporary.unlink(missing_ok=True)
    temporary = out / f".{SUMMARY}.tmp-{os.getpid()}"
    temporary.write_text(json.dumps(_null_for_nan(asdict(summary)), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, out / SUMMARY)
    return summary


def _null_for_nan(record: dict) -> dict:
    """JSON has no NaN; ``non_finite`` says that there were some."""
    return {
        key: _null_for_nan(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in record.items()
    }
