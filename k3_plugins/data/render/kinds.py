"""The kinds of drawings. Each takes a generator of random numbers, a size and a limit of objects, and draws inside it.

Objects that a caption names do not overlap each other, and each has a colour of its own, so that what a caption says
can be checked against the pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from k3_plugins.data.render.drawing import COLOURS, FONT, Box, Drawing, Item, element, number
from k3_plugins.data.render.renderer import text_box

WORDS = (
    "anchor basin candle delta ember fable garden harbor island jigsaw kettle lantern meadow nickel orbit pebble quartz"
    " river saddle timber umbra valley willow xenon yonder zephyr"
).split()
SKIES = ("#dff1ff", "#fff0dc", "#e9e4f5")
GROUNDS = ("#c9e4b4", "#eadfb8", "#d5d9de")
GREY = "#6b7280"


MOST = 8
"""Most objects that a caption names, unless a smaller limit is asked for."""


def _count(rng: np.random.Generator, least: int, most: int, limit: int) -> int:
    """A random number of objects from ``least`` to ``most``, both cut at the limit."""
    return int(rng.integers(min(least, limit), min(most, limit) + 1))


def cells(rng: np.random.Generator, width: float, height: float, count: int) -> list[Box]:
    """``count`` random cells of a grid over the area, each with a margin."""
    columns = max(1, math.ceil(math.sqrt(count * width / height)))
    rows = math.ceil(count / columns)
    chosen = rng.choice(columns * rows, count, replace=False)
    w, h = width / columns, height / rows
    return [
        (c * w + 0.08 * w, r * h + 0.08 * h, (c + 1) * w - 0.08 * w, (r + 1) * h - 0.08 * h)
        for r, c in (divmod(int(cell), columns) for cell in chosen)
    ]


def inside(rng: np.random.Generator, cell: Box, least: float = 0.5) -> Box:
    """A random box in a cell, at least ``least`` of its edges long."""
    left, top, right, bottom = cell
    w, h = (right - left) * rng.uniform(least, 1), (bottom - top) * rng.uniform(least, 1)
    x, y = rng.uniform(left, right - w), rng.uniform(top, bottom - h)
    return x, y, x + w, y + h


def colours(rng: np.random.Generator, count: int) -> list[str]:
    """Names of ``count`` different colours."""
    return [str(name) for name in rng.permutation(list(COLOURS))[:count]]


def square(box: Box) -> Box:
    """The largest square in the middle of a box."""
    left, top, right, bottom = box
    half = min(right - left, bottom - top) / 2
    x, y = (left + right) / 2, (top + bottom) / 2
    return x - half, y - half, x + half, y + half


def _polygon(points: Sequence[tuple[float, float]], colour: str) -> tuple[str, Box]:
    xs, ys = zip(*points, strict=True)
    text = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return element("polygon", points=text, fill=colour), (min(xs), min(ys), max(xs), max(ys))


def _shape(name: str, box: Box, colour: str) -> tuple[str, Box]:
    left, top, right, bottom = box
    x, y = (left + right) / 2, (top + bottom) / 2
    if name == "circle":
        box = square(box)
        return element("circle", cx=x, cy=y, r=(box[2] - box[0]) / 2, fill=colour), box
    if name == "ellipse":
        return element("ellipse", cx=x, cy=y, rx=(right - left) / 2, ry=(bottom - top) / 2, fill=colour), box
    if name == "rectangle":
        return element("rect", x=left, y=top, width=right - left, height=bottom - top, fill=colour), box
    if name == "square":
        box = square(box)
        return element("rect", x=box[0], y=box[1], width=box[2] - box[0], height=box[3] - box[1], fill=colour), box
    if name == "triangle":
        return _polygon([(x, top), (right, bottom), (left, bottom)], colour)
    if name == "diamond":
        return _polygon([(x, top), (right, y), (x, bottom), (left, y)], colour)
    half = min(right - left, bottom - top) / 2
    angles = [math.pi * (k / 5 - 0.5) for k in range(10)]
    radii = [half if k % 2 == 0 else 0.45 * half for k in range(10)]
    return _polygon([(x + r * math.cos(a), y + r * math.sin(a)) for a, r in zip(angles, radii, strict=True)], colour)


SHAPES = ("circle", "ellipse", "rectangle", "square", "triangle", "diamond", "star")


def shapes(rng: np.random.Generator, width: int, height: int, limit: int = MOST) -> Drawing:
    """Plain shapes, one in a cell of a grid."""
    count = _count(rng, 1, 8, limit)
    body, items = [], []
    for cell, colour in zip(cells(rng, width, height, count), colours(rng, count), strict=True):
        name = str(rng.choice(SHAPES))
        code, box = _shape(name, inside(rng, cell), COLOURS[colour])
        body.append(code)
        items.append(Item(f"{colour} {name}", box, COLOURS[colour]))
    return Drawing("shape", width, height, tuple(body), tuple(items))


def chart(rng: np.random.Generator, width: int, height: int, limit: int = MOST) -> Drawing:
    """A bar chart with axes; the caption names every bar's value. Upright or lying bars."""
    count, upright = _count(rng, 2, 6, limit), bool(rng.integers(2))
    left, top, right, bottom = 0.1 * width, 0.08 * height, 0.95 * width, 0.9 * height
    values = rng.integers(5, 101, count)
    line = max(1.0, min(width, height) / 200)
    axis = {"stroke": GREY, "stroke_width": line}
    body = [
        element("line", x1=left, y1=bottom, x2=right, y2=bottom, **axis),
        element("line", x1=left, y1=top, x2=left, y2=bottom, **axis),
    ]
    items = []
    for k, (value, colour) in enumerate(zip(values.tolist(), colours(rng, count), strict=True)):
        if upright:
            slot = (right - left) / count
            x, length = left + slot * (k + 0.2), (bottom - top - line) * value / 100
            box = (x, bottom - line - length, x + 0.6 * slot, bottom - line)
        else:
            slot = (bottom - top) / count
            y, length = top + slot * (k + 0.2), (right - left - line) * value / 100
            box = (left + line, y, left + line + length, y + 0.6 * slot)
        body.append(_shape("rectangle", box, COLOURS[colour])[0])
        items.append(Item(f"{colour} bar", box, COLOURS[colour], {"value": value}))
    return Drawing("chart", width, height, tuple(body), tuple(items))


def _text(text: str, x: float, baseline: float, size: int, colour: str) -> tuple[str, Box]:
    code = element("text", text, x=x, y=baseline, font_family=FONT, font_size=size, fill=colour)
    return code, text_box(text, x, baseline, size)


def _fitting(text: str, width: float, height: float) -> int:
    """The largest whole font size at which a text fits, at least 4."""
    left, top, right, bottom = text_box(text, 0, 0, 256)
    return max(4, math.floor(min(width / (right - left), height / (bottom - top)) * 256))


def text_layout(rng: np.random.Generator, width: int, height: int, limit: int = MOST) -> Drawing:
    """Lines of words of several sizes, one below the other, each starting anywhere that has room."""
    count = _count(rng, 1, 5, limit)
    band = height / count
    body, items = [], []
    for k, colour in enumerate(colours(rng, count)):
        text = " ".join(rng.choice(WORDS, int(rng.integers(1, 3)), replace=False).tolist())
        size = _fitting(text, 0.9 * width * rng.uniform(0.5, 1), 0.7 * band)
        left, top, right, bottom = text_box(text, 0, 0, size)
        x = rng.uniform(0, max(width - (right - left), 0)) - left
        baseline = k * band + (band - (bottom - top)) / 2 - top
        code, box = _text(text, x, baseline, size, COLOURS[colour])
        body.append(code)
        items.append(Item(f"{colour} text {text!r}", box, COLOURS[colour], {"font size": size}))
    return Drawing("text layout", width, height, tuple(body), tuple(items))


def diagram(rng: np.random.Generator, width: int, height: int, limit: int = MOST) -> Drawing:
    """Labelled boxes with arrows from each to the next."""
    count = _count(rng, 2, 5, limit)
    names, places = colours(rng, count), cells(rng, width, height, count)
    labels = rng.choice(WORDS, count, replace=False).tolist()
    boxes = [inside(rng, cell, 0.6) for cell in places]
    line = max(1.0, min(width, height) / 150)
    body, items, centres = [], [], [((b[0] + b[2]) / 2, (b[1] + b[3]) / 2) for b in boxes]
    # Arrows first: boxes cover their ends.
    for one, two in zip(range(count - 1), range(1, count), strict=True):
        (x1, y1), (x2, y2) = centres[one], _edge(centres[one], boxes[two])
        body.append(element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=GREY, stroke_width=line))
        angle, head = math.atan2(y2 - y1, x2 - x1), 5 * line
        wings = [(x2 - head * math.cos(angle + s), y2 - head * math.sin(angle + s)) for s in (-0.4, 0.4)]
        body.append(_polygon([(x2, y2), *wings], GREY)[0])
    for colour, label, box in zip(names, labels, boxes, strict=True):
        left, top, right, bottom = box
        body.append(_shape("rectangle", box, COLOURS[colour])[0])
        size = _fitting(label, 0.8 * (right - left), 0.4 * (bottom - top))
        ink = text_box(label, 0, 0, size)
        x = (left + right - ink[2] + ink[0]) / 2 - ink[0]
        body.append(_text(label, x, (top + bottom - ink[3] + ink[1]) / 2 - ink[1], size, "#ffffff")[0])
        items.append(Item(f"{colour} box {label!r}", box, COLOURS[colour]))
    for k in range(count - 1):
        items[k].facts["points to"] = repr(labels[k + 1])
    return Drawing("diagram", width, height, tuple(body), tuple(items))


def _edge(start: tuple[float, float], box: Box) -> tuple[float, float]:
    """Where the way from ``start`` to the middle of a box enters it."""
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    dx, dy = start[0] - x, start[1] - y
    shares = [half / abs(d) for half, d in (((box[2] - box[0]) / 2, dx), ((box[3] - box[1]) / 2, dy)) if d]
    share = min([1.0, *shares])
    return x + dx * share, y + dy * share


def scene(rng: np.random.Generator, width: int, height: int, limit: int = MOST) -> Drawing:
    """Sky, ground, a sun, and houses and trees on the horizon."""
    horizon = height * rng.uniform(0.6, 0.8)
    sky, ground = str(rng.choice(SKIES)), str(rng.choice(GROUNDS))
    body = [element("rect", x=0, y=horizon, width=width, height=height - horizon, fill=ground)]
    count = _count(rng, 1, 4, limit - 1)
    names = colours(rng, count + 1)
    radius = min(width, horizon * 0.4) * rng.uniform(0.15, 0.4)
    x, y = rng.uniform(radius, width - radius), rng.uniform(radius, horizon * 0.45 - radius)
    y = max(y, radius)
    body.append(element("circle", cx=x, cy=y, r=radius, fill=COLOURS[names[0]]))
    items = [Item(f"{names[0]} sun", (x - radius, y - radius, x + radius, y + radius), COLOURS[names[0]])]
    slot = width / max(count, 1)
    for k, colour in enumerate(names[1:]):
        w, h = slot * rng.uniform(0.4, 0.85), horizon * rng.uniform(0.2, 0.45)
        left = slot * k + rng.uniform(0, slot - w)
        top, base, fill = horizon - h, horizon, COLOURS[colour]
        if rng.integers(2):
            # Walls and roof of one colour, so that the house is one object.
            body.append(_polygon([(left, base), (left, top + 0.4 * h), (left + w / 2, top),
                                  (left + w, top + 0.4 * h), (left + w, base)], fill)[0])  # fmt: skip
            items.append(Item(f"{colour} house", (left, top, left + w, base), fill))
        else:
            trunk = w / 6
            body.append(element("rect", x=left + w / 2 - trunk / 2, y=base - 0.3 * h, width=trunk, height=0.3 * h,
                                fill=fill))  # fmt: skip
            body.append(_polygon([(left + w / 2, top), (left + w, base - 0.3 * h), (left, base - 0.3 * h)], fill)[0])
            items.append(Item(f"{colour} tree", (left, top, left + w, base), fill))
    return Drawing("scene", width, height, tuple(body), tuple(items), background=sky)


KINDS: dict[str, Callable[[np.random.Generator, int, int, int], Drawing]] = {
    "shapes": shapes,
    "chart": chart,
    "text": text_layout,
    "diagram": diagram,
    "scene": scene,
}


def draw(seed: int, index: int, *, kinds: Sequence[str], smallest: int, largest: int, limit: int = MOST) -> Drawing:
    """Drawing number ``index`` of a seed, whatever is drawn before it.

    Edges are drawn log-uniformly, each by itself, so that all sizes and shapes of images occur.

    Args:
        kinds: names from :data:`KINDS`, taken in turn.
        smallest, largest: limits of both edges, in pixels.
        limit: most objects that the caption names.
    """
    rng = np.random.default_rng([seed, index])
    width, height = np.exp(rng.uniform(math.log(smallest), math.log(largest + 1), 2)).astype(int).tolist()
    return KINDS[kinds[index % len(kinds)]](rng, min(width, largest), min(height, largest), limit)
