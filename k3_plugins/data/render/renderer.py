"""SVG to PNG with resvg, and the extent of text, which the same renderer measures.

The font is DejaVu Sans as matplotlib ships it; fonts of the machine are not looked at, so that a drawing looks alike
everywhere.
"""

from __future__ import annotations

import functools
import io
from pathlib import Path

import numpy as np

from k3_plugins.compat.optional import require
from k3_plugins.data.render.drawing import FONT, Box, Drawing, element

MEASURED = 128
"""Font size at which texts are measured."""


@functools.cache
def font_file() -> str:
    """The path of the font."""
    import matplotlib

    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")


def render(drawing: Drawing) -> bytes:
    """The PNG of a drawing.

    Raises:
        FeatureError: if resvg is not installed, with the command to type.
    """
    resvg = require("resvg_py", "rendering SVG")
    png = resvg.svg_to_bytes(
        svg_string=drawing.svg,
        skip_system_fonts=True,
        font_files=[font_file()],
        font_family=FONT,
        sans_serif_family=FONT,
    )
    return bytes(png)


@functools.lru_cache(maxsize=4096)
def _ink(text: str) -> Box:
    """Where the ink of a text lies at size :data:`MEASURED`, from its start on the baseline."""
    from PIL import Image

    margin, baseline = MEASURED, 2 * MEASURED
    code = element("text", text, x=margin, y=baseline, font_family=FONT, font_size=MEASURED)
    sheet = Drawing("text", 2 * margin + MEASURED * len(text), 3 * MEASURED, (code,), ())
    dark = np.asarray(Image.open(io.BytesIO(render(sheet))).convert("L")) < 128
    rows, columns = np.flatnonzero(dark.any(1)), np.flatnonzero(dark.any(0))
    return (
        float(columns[0] - margin),
        float(rows[0] - baseline),
        float(columns[-1] + 1 - margin),
        float(rows[-1] + 1 - baseline),
    )


def text_box(text: str, x: float, baseline: float, size: int) -> Box:
    """Where the ink of a text lies that starts at ``x`` on a baseline."""
    left, top, right, bottom = (edge * size / MEASURED for edge in _ink(text))
    return x + left, baseline + top, x + right, baseline + bottom
