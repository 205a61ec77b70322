"""Conversations as rows of a fixed length, in an order that the seed and the epoch decide.

One conversation is one row; what it does not fill is padding, which has no loss and goes to no expert (`padding`).

Letters: s sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from k3_plugins.post_training.sft.samples import Sample


class ConversationDataset(Dataset):
    """``num_rows`` rows; each epoch goes through all conversations in a new order.

    Args:
        samples: the conversations.
        num_rows: length; Megatron's sampler takes one row for each consumed sample, so a run resumes in the middle.
        seq_length: s.
        padding_id: fills rows.
        seed: of the order; None keeps the order of the files.
        attention_mask: whether rows carry a causal mask, as ``--create-attention-mask-in-dataloader`` asks.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        num_rows: int,
        seq_length: int,
        padding_id: int,
        seed: int | None,
        attention_mask: bool = False,
    ) -> None:
        self.samples, self.num_rows, self.seq_length = samples, num_rows, seq_length
        self.padding_id, self.seed = padding_id, seed
        self._positions = torch.arange(seq_length)
        causal = torch.ones(seq_length, seq_length, dtype=torch.bool).triu(1) if attention_mask else None
        self._mask = None if causal is None else causal[None]
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``tokens, labels, position_ids`` int64 ``[s]``, ``loss_mask`` fp32 ``[s]``, ``padding_mask`` bool ``[s]``."""
        sample = self.samples[self._sample_of(int(index))]
        ids = torch.full((self.seq_length + 1,), self.padding_id, dtype=torch.int64)
        train = torch.zeros(self.seq_length + 1)
        count = len(sample.ids)
        ids[:count] = torch.from_numpy(sample.ids)
        train[:count] = torch.from_numpy(sample.train)
        row = {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": train[1:],
            "position_ids": self._positions,
            "padding_mask": self._positions >= count,
        }
        return row if self._mask is None else {**row, "attention_mask": self._mask}

    def _sample_of(self, index: int) -> int:
        epoch, place = divmod(index, len(self.samples))
        if self.seed is None:
            return place
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.samples))
        return int(self._order[1][place])
