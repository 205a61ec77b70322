"""How the next token is chosen from the logits: greedy, or sampled with temperature, top-k and top-p.

Importing this module imports no torch, so that the settings are checked before a model is loaded. Letter: V, the ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SMALLEST_TEMPERATURE = 1e-6
"""Below it nothing but the most likely token is ever drawn, which 0 says exactly."""

MAX_SEED = 2**64 - 1
"""torch's generators take 64 bits."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        ValueError: naming the flag, its value and what to give.
    """

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Only the so many most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability."""
    seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        t = self.temperature
        if t != 0 and not (math.isfinite(t) and t >= SMALLEST_TEMPERATURE):
            raise ValueError(
                f"--temperature {t}: give a number of at least {SMALLEST_TEMPERATURE}, for example 0.8, or 0 for the "
                "most likely token"
            )
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k}: give a number of tokens, or 0 to allow every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: give a number above 0 and at most 1, which allows every token")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: give a whole number from 0 to {MAX_SEED}")


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> int:
    """The next token.

    Args:
        logits: ``[V]``, real tokens only.
        sampling: see there; top-k is applied before top-p.
        generator: on the CPU; for sampling.
    """
    import torch

    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.float().cpu()
    # The largest score is 0, so that no temperature makes it infinite.
    scores, ids = ((logits - logits.max()) / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        scores, ids = scores[: sampling.top_k], ids[: sampling.top_k]
    probabilities = scores.softmax(-1)
    if sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)  # the first one always stays
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
