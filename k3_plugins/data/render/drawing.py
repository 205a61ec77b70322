"""A drawing: its SVG code, the objects in it with their boxes, and a caption that names every coordinate twice.

Coordinates are pixels from the top left corner, x to the right and y down; normalised, they are divided by the width
and the height. A box is (left, top, right, bottom).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

Box = tuple[float, float, float, float]

COLOURS = {
    "red": "#d62728",
    "green": "#2ca02c",
    "blue": "#1f77b4",
    "orange": "#ff7f0e",
    "purple": "#9467bd",
    "brown": "#8c564b",
    "pink": "#e377c2",
    "olive": "#bcbd22",
    "cyan": "#17becf",
    "black": "#000000",
}
"""Colours that can be told apart; every named object of a drawing has another one."""
WHITE = "#ffffff"
FONT = "DejaVu Sans"


@dataclass(frozen=True)
class Item:
    """One named thing in a drawing."""

    name: str
    """Such as ``red circle`` or ``text 'anchor'``."""
    box: Box
    colour: str
    """``#rrggbb``."""
    facts: dict[str, object] = field(default_factory=dict)
    """What else the caption says, such as the value of a bar (JSON types)."""


@dataclass(frozen=True)
class Drawing:
    """One drawing, not yet rendered."""

    kind: str
    width: int
    height: int
    body: tuple[str, ...]
    """SVG elements in drawing order."""
    items: tuple[Item, ...]
    background: str = WHITE

    @property
    def svg(self) -> str:
        """The whole SVG document."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}"'
            f' viewBox="0 0 {self.width} {self.height}">',
            f'<rect width="{self.width}" height="{self.height}" fill="{self.background}"/>',
            *self.body,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    @property
    def caption(self) -> str:
        """One sentence for the drawing and one for each object, with the box in pixels and in [0, 1]."""
        article = "An" if self.kind[0] in "aeiou" else "A"
        count = f"{len(self.items)} object{'' if len(self.items) == 1 else 's'}"
        sentences = [f"{article} {self.kind} drawing of {self.width} x {self.height} pixels with {count}."]
        for item in self.items:
            facts = "".join(f", {name} {value}" for name, value in item.facts.items())
            where = f"{pixels(item.box)} px, {normalised(item.box, self)} of the size"
            sentences.append(f"{item.name}{facts}: box {where}.")
        return " ".join(sentences)

    @property
    def short_caption(self) -> str:
        """The same facts and coordinates in as few words as possible: ``red star 7 8 48 46 px 0.13 0.14 0.86 0.82``."""
        lines = []
        for item in self.items:
            facts = "".join(f" {name} {value}" for name, value in item.facts.items())
            whole = " ".join(str(round(edge)) for edge in item.box)
            unit = " ".join(f"{edge:.2f}" for edge in in_unit_square(item.box, self))
            lines.append(f"{item.name}{facts} {whole} px {unit}")
        return "; ".join(lines)

    @property
    def record(self) -> dict[str, object]:
        """What the caption says, as JSON."""
        return {
            "kind": self.kind,
            "width": self.width,
            "height": self.height,
            "objects": [
                {
                    "name": item.name,
                    "colour": item.colour,
                    "box": [round(edge, 1) for edge in item.box],
                    "box_normalised": [round(edge, 4) for edge in in_unit_square(item.box, self)],
                    **({"facts": item.facts} if item.facts else {}),
                }
                for item in self.items
            ],
        }


def in_unit_square(box: Box, drawing: Drawing) -> Box:
    """The box divided by the drawing's size."""
    left, top, right, bottom = box
    return left / drawing.width, top / drawing.height, right / drawing.width, bottom / drawing.height


def pixels(box: Box) -> str:
    """``(12, 30, 64, 90)``."""
    return "(" + ", ".join(str(round(edge)) for edge in box) + ")"


def normalised(box: Box, drawing: Drawing) -> str:
    """``(0.012, 0.060, 0.064, 0.180)``."""
    return "(" + ", ".join(f"{edge:.3f}" for edge in in_unit_square(box, drawing)) + ")"


def number(value: float) -> str:
    """A coordinate in SVG code: at most two digits behind the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def element(tag: str, text: str | None = None, /, **attributes: object) -> str:
    """One SVG element; underscores in attribute names become hyphens, numbers are shortened."""
    words = [tag]
    for name, value in attributes.items():
        shown = number(value) if isinstance(value, int | float) else escape(str(value), {'"': "&quot;"})
        words.append(f'{name.replace("_", "-")}="{shown}"')
    opening = " ".join(words)
    return f"<{opening}/>" if text is None else f"<{opening}>{escape(text)}</{tag}>"
