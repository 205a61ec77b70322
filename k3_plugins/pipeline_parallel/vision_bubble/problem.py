"""What is planned: the layout of the text pipeline, its times, and the encoder's time for every micro-batch.

Letters: p pipeline ranks, v model chunks per rank, m micro-batches. Stage s = chunk * p + rank, so that stage 0 (the
embedding) is chunk 0 of rank 0 and stage p * v - 1 (the loss) is the last chunk of the last rank.

Times may be in any unit, as long as it is the same one everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

Communication = Literal["overlap", "blocking"]


class PlanError(ValueError):
    """The times or the layout cannot be planned; the message names the value and what to do."""


@dataclass(frozen=True)
class BubbleProblem:
    """One training step: the text pipeline and the encoder work of each micro-batch.

    The constructor is written out because it also takes one number for all of an array.

    Raises:
        PlanError: for sizes and times that no schedule has.
    """

    pipeline_size: int
    """p."""
    chunks: int
    """v; 1 is plain 1F1B, more is interleaved 1F1B with groups of p micro-batches, Megatron's default."""
    microbatches: int
    """m; with v > 1 a multiple of p, as Megatron requires."""
    forward: np.ndarray
    """Time of one chunk's forward, ``[p, v]`` by rank and chunk; given as that or as one number."""
    backward: np.ndarray
    """Time of one chunk's backward, likewise."""
    encoder_forward: np.ndarray
    """Encoder forward of one micro-batch, ``[m]``, or given as one number; 0 is a micro-batch without images."""
    encoder_backward: np.ndarray
    """Encoder backward, likewise; 0 throughout is a frozen encoder."""
    pieces: int
    """Into how many equal parts an encoder backward is split (parts of whole layers: 27 layers allow 1, 3, 9, 27)."""
    communication: Communication
    """Megatron's ``overlap_p2p_comm`` or not, with v > 1: without it nothing can run between the forward and the
    backward of a steady-state pair, because Megatron communicates only after both."""

    def __init__(
        self,
        pipeline_size: int,
        chunks: int,
        microbatches: int,
        forward: ArrayLike = 1.0,
        backward: ArrayLike = 2.0,
        encoder_forward: ArrayLike = 1.0,
        encoder_backward: ArrayLike = 2.0,
        pieces: int = 9,
        communication: Communication = "overlap",
    ) -> None:
        for name, value, least in (
            ("pipeline_size", pipeline_size, 2),
            ("chunks", chunks, 1),
            ("microbatches", microbatches, 1),
            ("pieces", pieces, 1),
        ):
            if not isinstance(value, int | np.integer) or value < least:
                raise PlanError(f"{name} is {value!r}; it must be a whole number of at least {least}")
            object.__setattr__(self, name, value)
        if communication not in ("overlap", "blocking"):
            raise PlanError(f"communication is {communication!r}; it must be 'overlap' or 'blocking'")
        object.__setattr__(self, "communication", communication)
        if chunks > 1 and microbatches % pipeline_size:
            raise PlanError(
                f"microbatches is {microbatches} and pipeline_size {pipeline_size}: interleaved 1F1B needs a"
                " multiple of the pipeline size; change --global-batch-size"
            )
        layout, per_microbatch = (pipeline_size, chunks), (microbatches,)
        times: tuple[tuple[str, ArrayLike, tuple[int, ...], bool], ...] = (
            ("forward", forward, layout, False),
            ("backward", backward, layout, False),
            ("encoder_forward", encoder_forward, per_microbatch, True),
            ("encoder_backward", encoder_backward, per_microbatch, True),
        )
        for name, given, shape, allow_zero in times:
            object.__setattr__(self, name, _times(name, given, shape, allow_zero))
        missing = [i for i in range(microbatches) if self.encoder_backward[i] and not self.encoder_forward[i]]
        if missing:
            raise PlanError(
                f"encoder_backward of micro-batch {missing[0]} is {self.encoder_backward[missing[0]]:g} and its"
                " encoder_forward 0: a backward needs a forward"
            )

    @property
    def text_work(self) -> np.ndarray:
        """``[p]`` time of all text work of each rank."""
        return self.microbatches * (self.forward.sum(1) + self.backward.sum(1))


def _times(name: str, value: ArrayLike, shape: tuple[int, ...], allow_zero: bool) -> np.ndarray:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{name} must be a number or numbers of shape {list(shape)}: {error}") from error
    if array.ndim and array.shape != shape:
        raise PlanError(f"{name} has shape {list(array.shape)}; it must be one number or of shape {list(shape)}")
    array = np.broadcast_to(array, shape).copy()
    for place, time in np.ndenumerate(array):
        if not math.isfinite(time) or time < 0 or (time == 0 and not allow_zero):
            raise PlanError(
                f"{name}[{', '.join(map(str, place))}] is {time:g}; it must be finite and"
                f" {'at least' if allow_zero else 'greater than'} 0"
            )
    array.flags.writeable = False
    return array
