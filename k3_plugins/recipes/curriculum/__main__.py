"""Train one model through stages of growing context, under one learning-rate curve.

    python -m k3_plugins.recipes.curriculum CURRICULUM.yaml --output runs/long [--dry-run]

The file declares the stages: tokens, context, batch, mix of data sets (long documents are upsampled by weight), and
flags such as parallel sizes (see k3_plugins/recipes/curriculum/schedule.py, and
examples/kimi_k3/curriculum_laptop.yaml). Each stage resumes from the checkpoint of the one before, under its own
layout. The learning rate is a cosine over the tokens of the whole run with a linear warm-up; a last stage with
"cooldown: true" ends in a straight line. A call goes on where the last one stopped. Exit code 0 when all stages are
done, 2 for bad input or a stage that failed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from k3_plugins.data.sources import InputError
from k3_plugins.recipes.curriculum.schedule import Curriculum, CurriculumError, Placed, place, read
from k3_plugins.recipes.curriculum.stages import commands, train


def show(curriculum: Curriculum, placed: list[Placed]) -> None:
    """Print the schedule."""
    from rich.console import Console
    from rich.table import Table

    from k3_plugins.activation_report import output_width

    table = Table(title=f"{curriculum.tokens:,} tokens in all", title_justify="left")
    for column in ("stage", "context", "tokens", "steps", "batch", "ranks", "learning rate", "data"):
        table.add_column(column, overflow="fold")
    for entry in placed:
        stage = entry.stage
        tokens = stage.steps * stage.context * stage.global_batch
        rates = [curriculum.learning_rate(entry.first_token + share * tokens) for share in (0, 1)]
        mix = sum(stage.data.values())
        table.add_row(
            stage.name + (" (cooldown)" if stage.cooldown else ""),
            f"{stage.context:,}",
            f"{tokens:,}",
            f"{entry.first_step + 1} - {entry.last_step}",
            str(stage.global_batch),
            str(stage.nproc),
            f"{rates[0]:.3g} - {rates[1]:.3g}",
            ", ".join(f"{folder} {weight / mix:.0%}" for folder, weight in stage.data.items()),
        )
    Console(width=output_width(), highlight=False).print(table)


def main(argv: list[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_plugins.recipes.curriculum",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("curriculum", type=Path, metavar="CURRICULUM.yaml")
    parser.add_argument("--output", type=Path, required=True, help="folder for checkpoints, logs and TensorBoard")
    parser.add_argument("--dry-run", action="store_true", help="print the schedule and the commands, train nothing")
    options = parser.parse_args(argv)
    try:
        curriculum = read(options.curriculum)
        placed = place(curriculum)
        show(curriculum, placed)
        if options.dry_run:
            for entry, words in zip(placed, commands(curriculum, placed, options.output), strict=True):
                print(f"\n# {entry.stage.name}\npython {shlex.join(words)}")
            return 0
        train(curriculum, placed, options.output)
    except (CurriculumError, InputError) as error:
        print(f"curriculum: {error}", file=sys.stderr)
        return 2
    print(f"done: {options.output / 'checkpoints'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
