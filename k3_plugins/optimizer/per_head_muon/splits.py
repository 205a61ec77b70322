"""How the rows of a parameter divide into matrices that are orthogonalised one by one. Pure planning, no torch.

A `Split` says what the rows of a weight mean. `matrices` turns it, with the weight's local shape and its place in the
tensor-parallel group, into `Matrix` objects: which elements of which tensor rank make up each matrix.

Letters: r rows and c columns of a whole matrix, T tensor-parallel ranks, t one of them, n = r c elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Split:
    """The meaning of a weight's rows, from the first to the last: ``parts``, repeated.

    A fused query-key-value weight with two groups of two query heads of 64 rows is
    ``Split((("q", 64), ("q", 64), ("k", 64), ("v", 64)), repeat=2, each="head")``.
    """

    parts: tuple[tuple[str, int], ...]
    """(label, rows)."""
    repeat: int = 1
    each: Literal["", "head", "expert"] = ""
    """``head`` and ``expert``: every occurrence of a part is a matrix. Otherwise equal labels form one matrix."""
    order: Literal["whole", "local"] = "whole"
    """Under tensor parallelism along the rows: do the rows above describe the whole weight, of which every rank holds
    a contiguous slice, or the local weight, alike on every rank (gate and up of a gated feed-forward layer)?"""

    def __post_init__(self) -> None:
        if self.each == "head" and self.order == "local":
            raise ValueError("heads are numbered over the whole weight: describe all of them, in order 'whole'")

    @property
    def rows(self) -> int:
        """All rows that it describes."""
        return self.repeat * sum(size for _, size in self.parts)

    def without_heads(self) -> Split:
        """The same weight with equal parts joined across heads."""
        return Split(self.parts, self.repeat, "", self.order) if self.each == "head" else self

    def describe(self) -> str:
        """For people: ``per head: 8 q of 64 rows, 2 k of 64 rows``."""
        names = list(dict.fromkeys(label for label, _ in self.parts))
        if self.each == "head":
            sizes = dict(self.parts)
            counts = {name: self.repeat * sum(label == name for label, _ in self.parts) for name in names}
            return f"per head: {', '.join(f'{counts[name]} {name} of {sizes[name]} rows' for name in names)}"
        what = " | ".join(names) if len(names) > 1 else "whole matrix"
        return f"{self.repeat} experts: {what}" if self.each == "expert" else what

    def groups(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """(label, row ranges) of every matrix, rows in ascending order."""
        found: dict[str, list[tuple[int, int]]] = {}
        counts: dict[str, int] = {}
        row = 0
        for index in range(self.repeat):
            for label, size in self.parts:
                name = label
                if self.each == "head":
                    number = counts[label] = counts.get(label, -1) + 1
                    name = f"{label} {number}"
                elif self.each == "expert":
                    name = f"expert {index} {label}".rstrip()
                ranges = found.setdefault(name, [])
                if ranges and ranges[-1][1] == row:
                    ranges[-1] = (ranges[-1][0], row + size)
                else:
                    ranges.append((row, row + size))
                row += size
        return list(found.items())


def whole(rows: int) -> Split:
    """One matrix; ``rows`` are those of one tensor rank."""
    return Split((("", rows),), order="local")


@dataclass(frozen=True)
class Part:
    """What one tensor rank holds of a matrix."""

    tensor_rank: int
    intervals: tuple[tuple[int, int], ...]
    """Flat element ranges in that rank's parameter, in storage order."""
    offset: int
    """Where they start in the matrix's storage."""


@dataclass(frozen=True)
class Matrix:
    """A matrix to be orthogonalised.

    Its storage is row-major ``[r, c]``, or ``[slabs, r, c / slabs]`` when the tensor ranks hold slabs of columns.
    """

    parameter: str
    label: str
    rows: int
    columns: int
    parts: tuple[Part, ...]
    slabs: int = 1

    @property
    def size(self) -> int:
        """n."""
        return self.rows * self.columns

    @property
    def joined(self) -> bool:
        """True if several tensor ranks hold it together."""
        return len(self.parts) > 1

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz step: X X^T, its square, and the product with X."""
        small, large = sorted((self.rows, self.columns))
        return 2 * small * small * large + small**3


class SplitError(ValueError):
    """A split that does not fit its parameter. The text names the parameter."""


def matrices(
    parameter: str, split: Split, shape: Sequence[int], tensor_dim: int | None, tensor_ranks: int
) -> list[list[Matrix]]:
    """The matrices of one parameter.

    Args:
        parameter: its name.
        split: what its rows mean; the rows of ``[E, r, c]`` are those of ``[E r, c]``.
        shape: of the local parameter, 2-D or 3-D, the same on every tensor rank.
        tensor_dim: dimension of a MATRIX (0 rows, 1 columns) that is divided over the tensor ranks, None if every rank
            holds the same parameter.
        tensor_ranks: T.

    Returns:
        for every tensor rank the matrices of which it holds a part. A joined matrix is the same object in the lists of
        all its holders; a matrix that every rank holds by itself is a matrix of its own for each.

    Raises:
        SplitError: if the split does not describe exactly the rows of the parameter.
    """
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if tensor_ranks == 1:
        tensor_dim = None
    sliced = tensor_dim == 0 and split.order == "whole"
    described = rows * tensor_ranks if sliced else rows
    if split.rows != described:
        raise SplitError(
            f"{parameter} has {described} rows, its splitting rule ({split.describe()}) describes {split.rows}; "
            "correct the rule, or leave the parameter to AdamW"
        )
    result: list[list[Matrix]] = [[] for _ in range(tensor_ranks)]
    for label, ranges in split.groups():
        if tensor_dim is None:
            for t, found in enumerate(result):
                part = Part(t, _flat(ranges, columns), 0)
                found.append(Matrix(parameter, label, _height(ranges), columns, (part,)))
            continue
        if sliced:
            by_rank = [_within(ranges, t * rows, (t + 1) * rows) for t in range(tensor_ranks)]
        else:
            by_rank = [ranges] * tensor_ranks
        parts, offset = [], 0
        for t, local in enumerate(by_rank):
            if local:
                parts.append(Part(t, _flat(local, columns), offset))
                offset += _height(local) * columns
        if tensor_dim == 0:
            matrix = Matrix(parameter, label, offset // columns, columns, tuple(parts))
        else:
            matrix = Matrix(parameter, label, _height(ranges), columns * tensor_ranks, tuple(parts), tensor_ranks)
        for part in parts:
            result[part.tensor_rank].append(matrix)
    return result


def _height(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def _flat(ranges: Sequence[tuple[int, int]], columns: int) -> tuple[tuple[int, int], ...]:
    return tuple((start * columns, stop * columns) for start, stop in ranges)


def _within(ranges: Sequence[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """The part of some row ranges inside [low, high), counted from low."""
    cut = [(max(start, low) - low, min(stop, high) - low) for start, stop in ranges]
    return [(start, stop) for start, stop in cut if start < stop]
