"""Rows of interleaved image and text tokens, as a data set for Megatron's own samplers.

    [image ... image][t e x t][end][image ...][t e x t][end][padding]

A row holds as many whole pairs as fit. The loss is on text and ends; image tokens and padding are masked from it.

Letters: s sequence, N patches and M image tokens of a row, P edge of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.geometry import Clip
from k3_plugins.vision.training.pairs import Pair, read_patches, read_text, too_long
from k3_plugins.vision.training.tokens import END, IMAGE


class Content(NamedTuple):
    """What a pair brings into a row."""

    text: NDArray[np.uint8]
    mark: int | None
    """Where in the text the image stands; None: ahead of it."""
    clip: Clip | None


def row_of(contents: Sequence[Content], seq_length: int) -> dict[str, Tensor]:
    """A row of pairs that fit it, images by their places only.

    Returns:
        tokens, labels, position_ids ``[s]`` int64 and loss_mask ``[s]`` fp32; clips ``[k, 3]`` int64, and the positions
        ``[M]`` int64 of the image tokens.
    """
    tokens = torch.full((seq_length + 1,), END, dtype=torch.int64)
    counts = torch.zeros(seq_length + 1)
    at = 0
    for content in contents:
        text = torch.from_numpy(content.text.astype(np.int64))
        image = torch.full((content.clip.tokens if content.clip else 0,), IMAGE)
        before = content.mark or 0
        end = at + len(text) + len(image) + 1
        tokens[at : end - 1] = torch.cat([text[:before], image, text[before:]])
        counts[at:end] = 1  # the end counts too
        counts[at + before : at + before + len(image)] = 0
        at = end
    inputs = tokens[:-1]
    clips = [content.clip for content in contents if content.clip is not None]
    return {
        "tokens": inputs,
        "labels": tokens[1:],
        "loss_mask": counts[1:],
        "position_ids": torch.arange(seq_length),
        "clips": torch.tensor(clips, dtype=torch.int64).reshape(-1, 3),
        "image_positions": torch.nonzero(inputs == IMAGE)[:, 0],
    }


class PairRows(Dataset):
    """``count`` rows; pairs are shuffled anew in every epoch.

    Args:
        pairs: what rows are made of.
        count: number of rows.
        seq_length: s.
        config: read for the patch size.
        seed: of the order; None keeps the pairs' order.
        images: whether a row holds its patches; a pipeline stage that does not encode leaves them out, and they are not
            read.

    Raises:
        BadSample: a pair that is longer than a row.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        count: int,
        seq_length: int,
        config: MoonViTConfig,
        seed: int | None,
        images: bool = True,
    ) -> None:
        for pair in pairs:
            if sample := too_long(pair.title, pair.image_tokens, pair.text_bytes, seq_length):
                raise sample
        self.pairs, self.seq_length, self.config, self.images = pairs, seq_length, config, images
        self.rows: list[list[int]] = []
        epoch = 0
        while len(self.rows) < count:
            order = range(len(pairs))
            if seed is not None:
                order = np.random.default_rng([seed, epoch]).permutation(len(pairs)).tolist()
            self.rows += pack([pair.tokens for pair in pairs], order, seq_length)
            epoch += 1
        del self.rows[count:]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row: what :func:`row_of` returns, the row's number, and with ``images`` the patches."""
        pairs = [self.pairs[number] for number in self.rows[index]]
        row = row_of([Content(read_text(pair), pair.mark, pair.clip) for pair in pairs], self.seq_length)
        row["row"] = torch.tensor(index)
        return {**row, "patches": self.patches(index)} if self.images else row

    def patches(self, index: int) -> Tensor:
        """The patches ``[N, 3*P*P]`` fp32 of a row's images, in the order of its clips.

        Raises:
            ImageError: an image that does not decode, or not to its header's size, naming the sample.
        """
        pairs = [self.pairs[number] for number in self.rows[index]]
        patches = [read_patches(pair, self.config) for pair in pairs if pair.image is not None]
        return torch.cat([torch.zeros(0, 3 * self.config.moonvit_patch_size**2), *patches])


def pack(lengths: Sequence[int], order: Sequence[int], seq_length: int) -> list[list[int]]:
    """Pairs in their order, a new row wherever the next one does not fit."""
    rows: list[list[int]] = []
    room = 0
    for number in order:
        if lengths[number] > room:
            rows.append([])
            room = seq_length
        rows[-1].append(number)
        room -= lengths[number]
    return rows
