"""The picture of a run: training and validation loss over the iterations, and the bigram model's line to beat."""

from pathlib import Path

import numpy as np

from k3_plugins.report.events import ReportError, Run
from k3_plugins.report.summary import TRAIN, validation_series

INK, GREY, BLUE = "#1f2430", "#8a919e", "#2a6fbb"
VALIDATION_COLOURS = ("#d9622b", "#2f8f5b", "#8a4fa3", "#b58a00")


def draw_losses(
    run: Run,
    path: Path,
    *,
    factors: tuple[float | None, float | None],
    bigram_bits_per_byte: float | None = None,
    title: str = "",
) -> None:
    """Draws the picture into ``path`` (PNG).

    Args:
        factors: from nats per token to bits per byte, for training and validation; if one is unknown, the axis is in
            nats per token, and the bigram's line is left out.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ReportError(f"the picture needs matplotlib ({error}): pip install matplotlib") from error
    train, validations = run.scalars.get(TRAIN), validation_series(run)
    # One unit for every curve; several validation sets have no one number of bytes per token.
    in_bits = (train is None or factors[0] is not None) and (not validations or factors[1] is not None)
    in_bits = in_bits and len(validations) <= 1
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bottom = []
    if train is not None:
        values = train.values * (factors[0] if in_bits else 1.0)
        axes.plot(train.steps, values, color=BLUE, alpha=0.25, linewidth=0.8)
        smooth = _smooth(values)
        axes.plot(train.steps, smooth, color=BLUE, linewidth=1.8, label=f"training  {smooth[-1]:.3f}")
        bottom.append(np.nanmin(values))
    for i, (name, series) in enumerate(validations.items()):
        values = series.values * (factors[1] if in_bits else 1.0)
        colour = VALIDATION_COLOURS[i % len(VALIDATION_COLOURS)]
        label = f"{name if len(validations) > 1 else 'validation'}  {values[-1]:.3f}"
        axes.plot(series.steps, values, color=colour, marker="o", markersize=4.5, linewidth=1.4, label=label)
        bottom.append(np.nanmin(values))
    if in_bits and bigram_bits_per_byte is not None:
        label = f"byte bigram model  {bigram_bits_per_byte:.3f}"
        axes.axhline(bigram_bits_per_byte, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)), label=label)
        bottom.append(bigram_bits_per_byte)
    axes.set_xlabel("iteration", color=INK)
    axes.set_ylabel("bits per byte" if in_bits else "loss (nats per token)", color=INK)
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_ylim(bottom=0.92 * min(bottom))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(axis="y", color="#e6e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c3c8d0")
    axes.tick_params(colors=INK, length=3)
    axes.legend(frameon=False, labelcolor=INK)
    figure.savefig(path, format="png")


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over about a twenty-fifth of the points around each, fewer at the ends, leaving out those not finite."""
    half = len(values) // 50
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    known = count[high] > count[low]
    return np.where(known, (total[high] - total[low]) / np.maximum(count[high] - count[low], 1), np.nan)
