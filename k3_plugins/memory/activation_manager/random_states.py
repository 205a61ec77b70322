"""Random generators as they were: dropout in a function that runs again must drop the same elements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class RandomStates(Protocol):
    """The generators that a model draws from."""

    def now(self) -> Any:
        """Their states."""

    def restored(self, states: Any) -> AbstractContextManager[None]:
        """A context with these states; afterwards the generators go on as if nothing had happened."""


class TorchRandomStates:
    """torch's CPU generator."""

    def now(self) -> torch.Tensor:
        """See `RandomStates`."""
        return torch.get_rng_state()

    @contextmanager
    def restored(self, states: torch.Tensor) -> Iterator[None]:
        """See `RandomStates`."""
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(states)
            yield


class MegatronRandomStates:
    """The CPU's, the device's and those of Megatron's tracker, as its own checkpointing handles them."""

    def now(self) -> Any:
        """See `RandomStates`."""
        from megatron.core.tensor_parallel.random import _get_all_rng_states

        return _get_all_rng_states()

    @contextmanager
    def restored(self, states: Any) -> Iterator[None]:
        """See `RandomStates`."""
        from megatron.core.tensor_parallel.random import _fork_rng, _set_all_rng_states

        with _fork_rng():
            _set_all_rng_states(*states)
            yield
