"""Draws where every feature enters Megatron's training: docs/architecture.svg.

    python -m k3_plugins.report.architecture --output docs/architecture.svg

The left column is Megatron's own path through a step, the right one the features at the place where they enter; a
feature's box says how many patches it has and of which kind (none: it uses a seam). Names and patches come from the
registry, so the picture cannot fall behind it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from k3_plugins import features as feature_list
from k3_plugins.atomic import replacing

PLACES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Command line and data", "arguments, checks, data sets", ("moonvit",)),
    ("Attention layers", "layer specs", ("kda", "gated-mla", "dynamic-cp")),
    ("Residual stream", "block specs, pipeline messages", ("attnres",)),
    ("Mixture of experts", "router, dispatcher, experts", ("latent-moe", "quantile-balancing", "moonep", "mxfp4-qat")),
    ("Pipeline schedule", "forward and backward steps, messages", ("vision-bubble",)),
    ("Saved activations", "autograd's saved tensors", ("activation-manager",)),
    ("Gradients", "buffers, reduce-scatter", ("pipeline-zero2",)),
    ("Optimizer", "shards of the distributed optimizer", ("per-head-muon", "qk-clip")),
    ("Checkpoints and logs", "manifest, metrics, witnesses", ()),
)
"""Place in Megatron, what is there, the features that mainly enter there."""

ENGINE = "engine: one command line, checks on every rank, fingerprints, manifest, witnesses"


def caption(name: str) -> str:
    """``kda: 2 wraps``."""
    (entry,) = feature_list.select([name]).entries
    kinds = Counter(patch.kind.value for patch in feature_list.load(entry).patches())
    words = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in sorted(kinds.items())]
    return f"{name}\n{', '.join(words) or 'seams only'}"


def draw(output: Path) -> None:
    """Write the picture, atomically; text stays text."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "k3_plugins"  # the same picture has the same bytes
    from matplotlib import pyplot
    from matplotlib.patches import FancyBboxPatch

    figure, axes = pyplot.subplots(figsize=(12, 8), layout="constrained")
    axes.set_xlim(0, 12)
    axes.set_ylim(-0.2, len(PLACES) + 0.9)
    axes.axis("off")

    def box(x: float, y: float, width: float, height: float, text: str, color: str, size: int = 9) -> None:
        axes.add_patch(
            FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.08", fc=color, ec="#444444")
        )
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)

    top = len(PLACES)
    axes.text(1.6, top + 0.55, "Megatron-Core, unmodified", ha="center", fontsize=12, weight="bold")
    axes.text(7.8, top + 0.55, "k3_plugins: --k3-plugins NAME,...", ha="center", fontsize=12, weight="bold")
    box(3.9, top + 0.02, 8.0, 0.32, ENGINE, "#f0e6d2")
    for row, (place, what, names) in enumerate(PLACES):
        y = top - row - 0.85
        box(0.1, y, 3.0, 0.7, f"{place}\n{what}", "#dde7f0")
        if row + 1 < len(PLACES):
            axes.annotate("", (1.6, y - 0.14), (1.6, y - 0.01), arrowprops={"arrowstyle": "->"})
        for column, name in enumerate(names):
            box(3.9 + 2.02 * column, y, 1.9, 0.7, caption(name), "#dcefdc")
        if names:
            axes.annotate("", (3.15, y + 0.35), (3.85, y + 0.35), arrowprops={"arrowstyle": "->"})
    try:
        with replacing(output) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})
    finally:
        pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """0."""
    parser = argparse.ArgumentParser(prog="python -m k3_plugins.report.architecture", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the SVG to write")
    draw(parser.parse_args(argv).output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
