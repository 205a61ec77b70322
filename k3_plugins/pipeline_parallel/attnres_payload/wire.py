"""The one place that packs and unpacks what a pipeline hop carries.

A message is flat: the rows ([s, b, d] each, in the order of `Hop.row_ids`), then a header that says what they are. The
receiver knows from its plan what must arrive and compares: direction, micro-batch, sending chunk, width, number of
rows and the id of every row. Gradients travel back in the same form.

Header numbers are written in base 64 with one digit an element, because 64 is exact in every floating-point format a
pipeline uses (bf16 counts to 256).

Letters: s sequence (of this rank under sequence parallelism), b micro-batch, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3_plugins.pipeline_parallel.attnres_payload.plan import Hop

_BASE = 64
_MAGIC = 43
_FIXED_DIGITS = 1 + 1 + 4 + 2 + 4 + 2
_ID_DIGITS = 2
_NO_BLOCK = _BASE**_ID_DIGITS - 1


class PayloadError(RuntimeError):
    """A message is not the one that the plan of this rank expects."""


@dataclass(frozen=True)
class Label:
    """What a message says about itself."""

    gradient: bool
    microbatch: int
    chunk: int
    """The chunk whose output this is (for a gradient: the gradient of whose output)."""
    width: int
    """Hidden size d."""
    row_ids: tuple[int, ...]

    def encode(self) -> list[int]:
        """Digits of the header."""
        digits = [_MAGIC, int(self.gradient)]
        for number, count in ((self.microbatch, 4), (self.chunk, 2), (self.width, 4), (len(self.row_ids), 2)):
            digits += _digits(number, count)
        for row_id in self.row_ids:
            digits += _digits(_NO_BLOCK if row_id < 0 else row_id, _ID_DIGITS)
        return digits

    def __str__(self) -> str:
        what = "gradient" if self.gradient else "output"
        rows = ", ".join("hidden state" if row < 0 else str(row) for row in self.row_ids)
        return f"{what} of chunk {self.chunk}, micro-batch {self.microbatch}, width {self.width}, blocks [{rows}]"


def _digits(number: int, count: int) -> list[int]:
    if not 0 <= number < _BASE**count:
        raise ValueError(f"{number} does not fit into {count} header digits")
    return [number // _BASE**power % _BASE for power in reversed(range(count))]


def describe(header: Sequence[float]) -> str:
    """A received header in words."""
    digits = [int(digit) if digit == digit and abs(digit) < 1e6 else -1 for digit in header]
    if digits[0] != _MAGIC or any(not 0 <= digit < _BASE for digit in digits):
        return "something that is no residual payload"
    numbers, position = [], 2
    for count in (4, 2, 4, 2):
        number = 0
        for digit in digits[position : position + count]:
            number = number * _BASE + digit
        numbers.append(number)
        position += count
    ids = [high * _BASE + low for high, low in zip(digits[position::2], digits[position + 1 :: 2], strict=False)]
    row_ids = tuple(-1 if row == _NO_BLOCK else row for row in ids)
    return str(Label(bool(digits[1]), numbers[0], numbers[1], numbers[2], row_ids))


def header_length(rows: int) -> int:
    """Elements of the header of a message with this many rows."""
    return _FIXED_DIGITS + _ID_DIGITS * rows


def message_length(rows: int, row_shape: Sequence[int]) -> int:
    """Elements of a message: `rows` tensors of `row_shape` and the header."""
    elements = rows
    for size in row_shape:
        elements *= size
    return elements + header_length(rows)


@dataclass
class HeaderCheck:
    """Compares headers: at once on the CPU, at the end of the step on a GPU (one synchronisation a step)."""

    _pending: list[tuple[Tensor, Tensor, Label]] = field(default_factory=list)

    def __call__(self, message: Tensor, expected: Label) -> None:
        """Raises PayloadError (on the CPU) if the message's header is not `expected`."""
        header = message.detach()[-header_length(len(expected.row_ids)) :]
        wanted = torch.tensor(expected.encode(), dtype=header.dtype, device=header.device)
        differs = (header != wanted).any()
        if header.device.type == "cpu":
            if differs:
                self._fail(header, expected)
        else:
            self._pending.append((differs, header.clone(), expected))

    def finish(self) -> None:
        """Look at the comparisons that were put off. Raises PayloadError for the first that failed."""
        pending, self._pending = self._pending, []
        if pending and torch.stack([differs for differs, _, _ in pending]).any():
            for differs, header, expected in pending:
                if differs:
                    self._fail(header, expected)

    @staticmethod
    def _fail(header: Tensor, expected: Label) -> None:
        raise PayloadError(
            f"attention residuals: a pipeline stage received {describe(header.float().tolist())}; it expected"
            f" {expected}. Every rank must run the same model, layout and --attn-res-* flags"
        )


@dataclass(frozen=True)
class Envelope:
    """One message on its way: its hop and labels, and which gradients this rank adds on the way back."""

    hop: Hop
    output: Label
    gradient: Label
    check: HeaderCheck
    collect: Callable[[int], Tensor | None]
    """Block id -> gradient deposited on this rank for a block it first got hold of here, once; else None."""


def _write(rows: Sequence[Tensor | None], row_shape: torch.Size, label: Label, like: Tensor) -> Tensor:
    message = like.new_empty(message_length(len(rows), row_shape))
    size = row_shape.numel()
    for index, row in enumerate(rows):
        place = message[index * size : (index + 1) * size]
        place.zero_() if row is None else place.copy_(row.reshape(-1))
    message[len(rows) * size :] = torch.tensor(label.encode(), dtype=message.dtype, device=message.device)
    return message


def _read(message: Tensor, rows: int, row_shape: torch.Size) -> list[Tensor]:
    size = row_shape.numel()
    return [message[index * size : (index + 1) * size].view(row_shape) for index in range(rows)]


def _add(gradient: Tensor | None, deposit: Tensor | None) -> Tensor | None:
    if gradient is None or deposit is None:
        return deposit if gradient is None else gradient
    return gradient + deposit


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, envelope: Envelope, *rows: Tensor) -> Tensor:
        ctx.envelope, ctx.row_shape = envelope, rows[0].shape
        return _write(rows, rows[0].shape, envelope.output, rows[0])

    @staticmethod
    def backward(ctx: Any, message: Tensor) -> tuple[Tensor | None, ...]:
        envelope: Envelope = ctx.envelope
        envelope.check(message, envelope.gradient)
        gradients = _read(message, envelope.hop.rows, ctx.row_shape)
        ids = envelope.hop.row_ids
        return (None, *(_add(grad, envelope.collect(row)) for grad, row in zip(gradients, ids, strict=True)))


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, envelope: Envelope, row_shape: torch.Size, message: Tensor) -> tuple[Tensor, ...]:
        ctx.envelope, ctx.row_shape = envelope, row_shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(message)
        return tuple(_read(message, envelope.hop.rows, row_shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, Tensor]:
        envelope: Envelope = ctx.envelope
        (like,) = ctx.saved_tensors
        ids = envelope.hop.row_ids
        rows = [_add(grad, envelope.collect(row)) for grad, row in zip(gradients, ids, strict=True)]
        return None, None, _write(rows, ctx.row_shape, envelope.gradient, like)


def pack(envelope: Envelope, rows: Sequence[Tensor]) -> Tensor:
    """Rows [s, b, d] in the order of the hop -> one flat message, a tensor of its own (never a view).

    Raises:
        PayloadError: if the rows are not what the hop carries.
    """
    for row in rows:
        if row.shape != rows[0].shape or row.dtype != rows[0].dtype or row.shape[-1] != envelope.output.width:
            raise PayloadError(
                f"attention residuals: cannot send {envelope.output}: a row is {tuple(row.shape)} {row.dtype}, the"
                f" first one {tuple(rows[0].shape)} {rows[0].dtype}"
            )
    if len(rows) != envelope.hop.rows:
        raise PayloadError(f"attention residuals: {len(rows)} rows cannot be sent as {envelope.output}")
    return _Pack.apply(envelope, *rows)


def unpack(envelope: Envelope, message: Tensor, row_shape: torch.Size) -> list[Tensor]:
    """One flat message -> rows [s, b, d] in the order of the hop; they share the message's memory.

    Raises:
        PayloadError: if the message has another size or header than the plan says (on a GPU the header is compared at
            the end of the step).
    """
    expected = message_length(envelope.hop.rows, row_shape)
    if message.numel() != expected:
        raise PayloadError(
            f"attention residuals: received {message.numel()} elements, expected {expected}: {envelope.output}, rows of"
            f" {tuple(row_shape)}"
        )
    envelope.check(message, envelope.output)
    return list(_Unpack.apply(envelope, row_shape, message))
