"""What a user sees: one table when the model is built, one line per feature after the first step. Rank 0 prints."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import k3_plugins
from k3_plugins.agreement import ranks_text
from k3_plugins.feature import Feature, Witness
from k3_plugins.patching import PatchState

if TYPE_CHECKING:
    from rich.table import Table

    from k3_plugins.activation import Activation


def backend_text(feature: Feature, config: object) -> str:
    """``torch (best available on this device); not fla: needs CUDA``; ``-`` for a feature without backends."""
    if not hasattr(feature, "backends"):
        return "-"
    backends = feature.backends(config)
    chosen = "; ".join(f"{backend.name} ({backend.why})" for backend in backends if backend.chosen)
    rejected = "".join(f"; not {backend.name}: {backend.why}" for backend in backends if not backend.chosen)
    return (chosen or "none") + rejected


def print_activation(activation: Activation) -> None:
    """The table at the start of training."""
    from rich.table import Table

    table = Table(
        title=f"k3_plugins {k3_plugins.__version__} on Megatron-Core {activation.megatron_version}, platform "
        f"{activation.platform}",
        caption="The witness of every feature is checked after the first training step.",
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("feature", "backend and why", "patches", "witness"):
        table.add_column(heading, overflow="fold")
    for feature in activation.features:
        table.add_row(
            feature.name,
            backend_text(feature, activation.configs.get(feature.name)),
            _patches_text(activation, feature.name),
            "after step 1",
        )
    table.add_row("engine", "-", _patches_text(activation, "engine"), "-")
    print_table(table)
    for note in activation.left_out:
        print(f"k3_plugins: left out: {note}", flush=True)
    for status in activation.manager.statuses:
        if status.state is PatchState.DRIFT_ALLOWED:
            print(f"k3_plugins: {status.message} (allowed by --k3-allow-drift)", flush=True)


def _patches_text(activation: Activation, feature: str) -> str:
    patches = [patch for patch in activation.manager.patches if patch.feature == feature]
    return "\n".join(f"{patch.kind.value} {patch.target.partition(':')[2]}" for patch in patches) or "none needed"


def print_witnesses(names: Sequence[str], by_rank: Sequence[Mapping[str, Witness]]) -> None:
    """One line per feature and distinct summary, with the ranks that gave it."""
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, witnesses in enumerate(by_rank):
            ranks.setdefault(witnesses[name].summary, []).append(rank)
        for summary, holders in ranks.items():
            where = "" if len(by_rank) == 1 else f" ({ranks_text(holders)})"
            print(f"k3_plugins: witness {name}: {summary}{where}", flush=True)


def print_table(table: Table) -> None:
    """Print a rich table, wide enough for a log file where there is no terminal."""
    from rich.console import Console

    Console(file=sys.stdout, width=output_width(), highlight=False).print(table)
    sys.stdout.flush()


def output_width() -> int:
    """The terminal's width, or that of a log file."""
    return shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
