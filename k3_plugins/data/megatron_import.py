"""Imports the parts of Megatron that data preparation uses, quietly, and says what to do when they are absent."""

import importlib
import logging
import warnings
from types import ModuleType

from k3_plugins.data.sources import InputError


def import_megatron(module: str, purpose: str) -> ModuleType:
    """Imports a module of Megatron-Core.

    Its import warns of missing GPU packages, which data preparation does not use: those lines would only bury the
    report of what was skipped.

    Raises:
        InputError: Megatron-Core or torch is missing or broken; the message names ``purpose`` and the remedy.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"Megatron-Core and torch are needed {purpose} ({error}): pip install megatron-core torch"
        ) from error
    finally:
        logging.disable(level)
