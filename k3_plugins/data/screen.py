"""What ``prepare`` shows: a progress bar while it works, then what lies where and what was left out."""

import json
import os
import shlex
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from k3_plugins.data.sidecar import DatasetInfo

# What a flag asked to leave out is counted, but needs no line of its own.
ASKED_FOR = ("excluded", "not-included")
SHOWN_SKIPS = 10


class PrepareScreen:
    """Progress on a terminal, and on anything else one line at every quarter, so that logs stay readable."""

    def __init__(self) -> None:
        self.console = Console(file=sys.stderr)
        self.started = time.monotonic()
        self.quarter = 0
        self.bar = Progress(
            TextColumn("preparing"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[documents]} documents"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("preparing", total=None, documents=0)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def progress(self, done: int, total: int, documents: int) -> None:
        self.bar.update(self.task, completed=done, total=total, documents=documents)
        quarter = 4 * done // max(total, 1)
        if not self.console.is_terminal and quarter > self.quarter:
            self.quarter = quarter
            print(f"preparing: {25 * quarter} %, {documents} documents", file=sys.stderr, flush=True)

    def summary(self, folder: str, info: DatasetInfo) -> None:
        console = Console()
        table = Table(title=f"Data set {folder}", title_justify="left")
        table.add_column("split")
        for column in ("documents", "MB of text", "tokens"):
            table.add_column(column, justify="right")
        for name, split in info.splits.items():
            table.add_row(name, f"{split.documents:,}", f"{split.bytes / 1e6:.2f}", f"{split.tokens:,}")
        console.print(table)
        text_mb = sum(split.bytes for split in info.splits.values()) / 1e6
        seconds = time.monotonic() - self.started
        tokenizer = info.tokenizer
        # Plain prints: rich would colour and wrap what is meant to be copied.
        print(
            f"tokenizer {tokenizer.kind}{f' {tokenizer.model}' if tokenizer.model else ''}: "
            f"{tokenizer.vocab_size} ids, end of document {tokenizer.eod_id}; "
            f"{seconds:.1f} s, {text_mb / seconds:.1f} MB/s"
        )
        if info.skipped:
            self._skips(folder, info)
        print("Megatron flags:", shlex.join(info.megatron_flags(folder)))

    @staticmethod
    def _skips(folder: str, info: DatasetInfo) -> None:
        path = os.path.join(folder, "skipped.jsonl")
        counts = ", ".join(f"{count} {reason}" for reason, count in info.skipped.items())
        print(f"left out: {counts} (every one is listed in {path})")
        shown = 0
        with open(path, encoding="utf-8") as stream:
            for line in stream:
                skip = json.loads(line)
                if skip["reason"] in ASKED_FOR:
                    continue
                if shown == SHOWN_SKIPS:
                    print("  ...")
                    break
                # File names may hold bytes that no terminal can show.
                source = skip["source"].encode("utf-8", errors="backslashreplace").decode("utf-8")
                if "line" in skip:
                    source += f", line {skip['line']}"
                print(f"  {skip['reason']}: {source}" + (f" ({skip['detail']})" if skip["detail"] else ""))
                shown += 1
