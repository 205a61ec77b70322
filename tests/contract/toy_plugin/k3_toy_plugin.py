"""A third party's plug-in for the contract tests: it can be told, through the environment, to misbehave on one rank.

TOY_BAD_WITNESS, TOY_EXTRA_PATCH, TOY_BAD_BUILD, TOY_BAD_DATA: the number of that rank.
"""

import functools
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from k3_plugins.feature import Backend, FeatureError, Witness
from k3_plugins.patching import Patch, PatchKind


def _told(name):
    return os.environ.get(name) == os.environ.get("RANK")


@dataclass(frozen=True)
class ToyConfig:
    """Flags of the toy."""

    toy_width: int = 4
    """Width of the toy."""
    toy_backend: str = field(default="auto", metadata={"changes_parameters": False})
    """Implementation of the toy."""


def _no_data(provider):
    raise OSError("the toy's disk is gone")


def _broken_scheduler(original):
    @functools.wraps(original)
    def get_optimizer_param_scheduler(optimizer):
        if _told("TOY_BAD_BUILD"):
            raise ValueError("the toy does not fit stage 1; use --toy-width 1")
        if _told("TOY_BAD_DATA"):
            from megatron.training import training

            training.build_train_valid_test_data_iterators = _no_data
        return original(optimizer)

    return get_optimizer_param_scheduler


class Toy:
    name = "toy"
    requires = ()
    conflicts = ()
    config = ToyConfig
    changes_parameters = True

    def patches(self):
        patches = [
            Patch(
                "toy.scheduler",
                "megatron.training.training:get_optimizer_param_scheduler",
                PatchKind.WRAP,
                _broken_scheduler,
                "toy",
                "a test",
                "never",
            )
        ]
        if _told("TOY_EXTRA_PATCH"):
            patches.append(replace(patches[0], id="toy.extra"))
        return patches

    def fingerprints(self):
        return Path(__file__).with_name("fingerprints.json")

    def validate(self, args, config):
        if config.toy_width <= 0:
            raise FeatureError(f"--toy-width {config.toy_width} must be positive")

    def backends(self, config):
        return [Backend("cpu", True, "the only one"), Backend("gpu", False, "no CUDA")]

    def witness(self, model_chunks, args):
        return Witness("0 toys" if _told("TOY_BAD_WITNESS") else "1 toy", ok=not _told("TOY_BAD_WITNESS"))


class Probe:
    """Changes no parameters: toggling it must not stop a checkpoint from loading."""

    name = "toy-probe"
    requires = ("toy",)
    conflicts = ()
    config = None
    changes_parameters = False

    def patches(self):
        return ()

    def validate(self, args, config):
        return None

    def witness(self, model_chunks, args):
        return Witness("probed", ok=True)


FEATURE = Toy()
PROBE = Probe()
