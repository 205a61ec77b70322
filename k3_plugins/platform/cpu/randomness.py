"""Random draws that must not touch the generator the model uses.

On a GPU machine there are two generators: the CPU's, which the data loader draws from, and the GPU's, which
dropout draws from. Here both are one. A draw that happens on some ranks only would shift the dropout masks,
or the initial weights, of those ranks alone: nothing fails, the model is just no longer the same on all
ranks.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch
from torch.utils.data import DataLoader

_loaders_made = 0


def install() -> None:
    """Give every DataLoader its own generator, and drop a warning that is about two generators."""
    loader: Any = DataLoader
    original = loader.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        # An iterator draws its base seed from the default generator. In Megatron only tensor-parallel rank 0
        # has a loader, so that rank alone would move on.
        if call.arguments.get("generator") is None:
            call.arguments["generator"] = _private_generator()
        # Without an accelerator torch would pin nothing and warn about it.
        call.arguments["pin_memory"] = False
        original(*call.args, **call.kwargs)

    loader.__init__ = __init__
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_two_generators)


def _private_generator() -> torch.Generator:
    """Seeded from the user's seed and the loader's number, so that shuffling is reproducible and loaders differ."""
    global _loaders_made
    generator = torch.Generator()
    generator.manual_seed((torch.initial_seed() + _loaders_made) % 2**63)
    _loaders_made += 1
    return generator


def _not_about_two_generators(record: logging.LogRecord) -> bool:
    # Megatron's tracker warns when "the CPU's generator moved inside the GPU's context". Here that is its
    # purpose.
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
