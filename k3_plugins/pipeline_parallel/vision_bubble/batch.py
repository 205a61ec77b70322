"""The micro-batches of one step as every pipeline rank sees them: all tokens and image sizes, its own images.

Tokens are small and every rank reads them, so that all know the sizes of all images and can plan. Images are read and
decoded by the rank that encodes them, a few ahead of the encoder, in threads.

Letters: N patches of a micro-batch, m image tokens in this rank's slice of its sequence, P edge of a patch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatron.core import mpu
from torch import Tensor

from k3_plugins.vision.moonvit.geometry import Clip
from k3_plugins.vision.training.context import places
from k3_plugins.vision.training.rows import PairRows
from k3_plugins.vision.training.usable import named_failures

AHEAD = 2
"""Micro-batches whose images are read ahead."""

_READERS = ThreadPoolExecutor(max_workers=AHEAD, thread_name_prefix="vision-bubble")


class StepBatch:
    """The next ``count`` micro-batches of an iterator.

    Args:
        iterator: yields collated rows of ``source`` without images.
        source: reads the images.
    """

    def __init__(self, iterator: Iterator[dict[str, Tensor]], count: int, source: PairRows) -> None:
        self.rows: list[dict[str, Any]] = [next(iterator) for _ in range(count)]
        self.numbers = [int(row["row"]) for row in self.rows]
        self.clips = [[Clip(*clip) for clip in row["clips"][0].tolist()] for row in self.rows]
        group = mpu.get_context_parallel_group()
        self.wanted = [
            [tokens for tokens, _ in places(row["image_positions"][0].tolist(), row["tokens"].shape[1], group.size())]
            for row in self.rows
        ]
        """By micro-batch and context-parallel rank: the numbers of the image tokens in its slice."""
        self.tokens = [len(ranks[group.rank()]) for ranks in self.wanted]
        """m by micro-batch."""
        self._source = source
        self._waiting: Iterator[int] = iter(())
        self._reading: dict[int, Future[Tensor]] = {}

    def read_ahead(self, order: Sequence[int]) -> None:
        """Start reading the images of these micro-batches; :meth:`patches` is to be called in this order."""
        self._waiting = iter(order)
        for _ in range(AHEAD):
            self._read_next()

    def _read_next(self) -> None:
        microbatch = next(self._waiting, None)
        if microbatch is not None:
            self._reading[microbatch] = _READERS.submit(self._source.patches, self.numbers[microbatch])

    def patches(self, microbatch: int) -> Tensor:
        """The patches of a micro-batch, ``[N, 3*P*P]`` fp32 in host memory."""
        with named_failures():
            patches = self._reading.pop(microbatch).result()
        self._read_next()
        return patches
