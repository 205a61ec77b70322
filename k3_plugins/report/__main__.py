"""``python -m k3_plugins.report RUN``: writes loss.png and summary.json, and prints the main numbers."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from k3_plugins.report.events import ReportError
from k3_plugins.report.summary import Summary
from k3_plugins.report.write import PICTURE, SUMMARY, write_report


def print_summary(summary: Summary, title: str) -> None:
    """A table of what is known about the run."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")

    def row(name: str, value: float | int | None, form: str) -> None:
        if value is not None:
            table.add_row(name, form.format(value))

    row("iterations", summary.iterations, "{:,}")
    row("tokens trained on", summary.tokens, "{:,}")
    if summary.train_loss is not None:
        row("training loss, last (nats per token)", summary.train_loss.last, "{:.4f}")
    if summary.validation_loss is not None:
        row("validation loss, last (nats per token)", summary.validation_loss.last, "{:.4f}")
        row("validation loss, best (nats per token)", summary.validation_loss.best, "{:.4f}")
    for name, loss in summary.validation_losses.items():
        row(f"validation loss of {name}, last (nats per token)", loss.last, "{:.4f}")
    row("validation, bits per byte", summary.validation_bits_per_byte, "{:.4f}")
    row("byte bigram model, bits per byte", summary.bigram_bits_per_byte, "{:.4f}")
    row("tokens per second", summary.tokens_per_second, "{:,.0f}")
    row("TFLOP/s per device", summary.tflops_per_device, "{:.3f}")
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m k3_plugins.report",
        description=f"Writes {PICTURE} and {SUMMARY} from a run's TensorBoard files, and prints the main numbers.",
    )
    parser.add_argument("run", help="folder with the event files, or with a folder 'tensorboard' that has them")
    parser.add_argument("--out", metavar="DIR", help="where to write; default: the run's folder")
    parser.add_argument("--dataset", metavar="DIR", help="the prepared data set; default: as Megatron logged it")
    parser.add_argument("--seq-length", type=int, metavar="S", help="default: as Megatron logged it")
    parser.add_argument("--bigram", metavar="FILE", help="JSON of python -m k3_plugins.data.bigram, to compare with")
    parser.add_argument("--title", help="of the picture; default: the folder's name")
    args = parser.parse_args(argv)
    out = args.out or args.run
    try:
        summary = write_report(
            args.run,
            out,
            dataset=args.dataset,
            seq_length=args.seq_length,
            bigram_bits_per_byte=_read_bigram(args.bigram) if args.bigram else None,
            title=args.title,
        )
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print_summary(summary, args.title or Path(os.path.abspath(out)).name)
    print(f"picture: {os.path.join(out, PICTURE)}\nsummary: {os.path.join(out, SUMMARY)}")
    return 0


def _read_bigram(path: str) -> float:
    try:
        return float(json.loads(Path(path).read_text(encoding="utf-8"))["bits_per_byte"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(
            f"--bigram {path!r} is no result of python -m k3_plugins.data.bigram --json: {error}"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
