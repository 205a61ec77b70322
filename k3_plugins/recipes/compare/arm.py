"""An arm of a comparison: its flags, and the grids of what is tuned for it alone.

    name: hybrid
    flags: --k3-plugins kda,gated-mla --k3-model kimi_k3_tiny
    grid:
      lr: [1e-3, 2e-3, 4e-3]
      global-batch-size: [8, 16, 32]
    nproc: 1                      # ranks of a run; 1 is the default
    scale-with-lr: {min-lr: 0.1}  # flags that follow the learning rate
    scale-with-steps: {lr-wsd-decay-iters: 0.2}   # flags that follow the number of steps (rounded, at least 1)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from k3_plugins.recipes import declaration
from k3_plugins.recipes.compare.budget import RESERVED

BATCH = "global-batch-size"
LR = "lr"

Flag = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Without the dashes in front."""
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ArmError(ValueError):
    """A file that describes no arm; the text names the file, the field and what to write."""


class Arm(BaseModel):
    """What one file says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    flags: tuple[str, ...] = ()
    grid: dict[str, tuple[float, ...]]
    nproc: Annotated[int, Field(ge=1)] = 1
    scale_with_lr: dict[Flag, Factor] = Field(default_factory=dict, alias="scale-with-lr")
    scale_with_steps: dict[Flag, Factor] = Field(default_factory=dict, alias="scale-with-steps")

    @field_validator("flags", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        return declaration.words(value)

    @field_validator("grid", mode="before")
    @classmethod
    def _numbers(cls, value: object) -> object:
        if not isinstance(value, dict) or set(value) - {LR, BATCH} or LR not in value:
            raise ValueError(f"must hold {LR!r} and may hold {BATCH!r}, each a list of numbers")
        for name, entries in value.items():
            if not isinstance(entries, list) or not entries:
                raise ValueError(f"{name} must be a list of numbers")
        return {name: tuple(_number(name, entry) for entry in entries) for name, entries in value.items()}

    @model_validator(mode="after")
    def _sane(self) -> Arm:
        for name, entries in self.grid.items():
            if any(not 0 < entry < float("inf") for entry in entries):
                raise ValueError(f"grid.{name} {list(entries)} must be positive numbers")
            if list(entries) != sorted(set(entries)):
                raise ValueError(f"grid.{name} {list(entries)} must ascend without repetition")
        if any(entry != int(entry) for entry in self.grid.get(BATCH, ())):
            raise ValueError(f"grid.{BATCH} {list(self.grid[BATCH])} must be whole numbers")
        if len(self.batches) == 2:
            raise ValueError(
                f"grid.{BATCH} {list(self.batches)} holds two, and an optimum at an edge allows no verdict: give three"
                " or more, or one"
            )
        scaled = [f"--{name}" for name in (*self.scale_with_lr, *self.scale_with_steps)]
        declaration.refuse_reserved(
            [*self.flags, *scaled], RESERVED, "is set by the comparison, the same way for every arm"
        )
        return self

    @property
    def batches(self) -> tuple[int, ...]:
        """Global batch sizes to try; empty if the comparison's ``--batch`` decides."""
        return tuple(int(entry) for entry in self.grid.get(BATCH, ()))


def _number(name: str, entry: object) -> float:
    try:
        return float(str(entry))  # YAML reads 1e-3 as a text
    except ValueError as cause:
        raise ValueError(f"{name} {entry!r} is no number") from cause


def read(path: Path) -> Arm:
    """The arm in a YAML file.

    Raises:
        ArmError: naming the file, every wrong field and why.
    """
    return declaration.read(path, Arm, ArmError, "name, flags and grid")
