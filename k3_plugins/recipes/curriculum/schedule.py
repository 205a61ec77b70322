"""The declared stages, and what each must tell Megatron so that the whole run follows one learning-rate curve.

The curve is over tokens: linear warm-up, then cosine from ``lr`` to ``min-lr`` over the whole run; a last stage with
``cooldown`` goes down in a straight line instead, from where the cosine stands to ``min-lr``. Megatron's scheduler
counts samples, whose tokens differ by stage. In a stage whose samples have c tokens, progress over tokens is a linear
function of the samples counted so far, so the right numbers of warm-up and decay samples make Megatron draw that
stage's piece of the curve; they need not be what the names say, and may be negative.

Letters: N samples, T tokens counted before a stage; W tokens of warm-up, A tokens of the whole run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from k3_plugins.data.tokenizers import TokenizerInfo
from k3_plugins.recipes import declaration


class CurriculumError(ValueError):
    """A file that describes no curriculum, or a run that cannot go on; the text says what to change."""


Words = tuple[str, ...]
Positive = Annotated[int, Field(ge=1)]


class Stage(BaseModel):
    """One entry of ``stages``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    tokens: Positive
    """Of the stage; rounded down to whole steps."""
    context: Positive
    """Tokens in a sequence."""
    global_batch: Positive = Field(alias="global-batch")
    """Sequences in a step."""
    micro_batch: Positive = Field(default=1, alias="micro-batch")
    nproc: Positive = 1
    flags: Words = ()
    """Of this stage alone: parallel sizes, recomputation."""
    data: dict[str, Annotated[float, Field(gt=0)]]
    """Prepared data set -> weight in the mix; long documents are upsampled by the weight of a set that holds them."""
    cooldown: bool = False

    @field_validator("tokens", mode="before")
    @classmethod
    def _count(cls, value: object) -> object:
        if isinstance(value, str):  # YAML reads 1e9 as a text
            try:
                value = float(value)
            except ValueError:
                return value  # the field's own check says what must be there
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @field_validator("flags", mode="before")
    @classmethod
    def _flags(cls, value: object) -> object:
        return declaration.words(value)

    @model_validator(mode="after")
    def _sane(self) -> Stage:
        declaration.refuse_reserved(self.flags, RESERVED, "follows from the stages")
        if not self.data:
            raise ValueError("data must name at least one prepared data set")
        if self.tokens < self.context * self.global_batch:
            raise ValueError(
                f"tokens {self.tokens} is less than one step of {self.global_batch} x {self.context} tokens"
            )
        return self

    @property
    def steps(self) -> int:
        """Whole steps."""
        return self.tokens // (self.context * self.global_batch)


class Curriculum(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lr: Annotated[float, Field(gt=0)]
    min_lr: Annotated[float, Field(ge=0)] = Field(alias="min-lr")
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of the run's tokens."""
    flags: Words = ()
    """Of every stage: features, model, optimizer."""
    eval_global_batch: Positive = Field(alias="eval-global-batch")
    """Sequences in a validation batch, the same in every stage."""
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]

    @field_validator("flags", mode="before")
    @classmethod
    def _flags(cls, value: object) -> object:
        return declaration.words(value)

    @model_validator(mode="after")
    def _sane(self) -> Curriculum:
        declaration.refuse_reserved(self.flags, RESERVED, "follows from the stages")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages {names} must have different names")
        if self.min_lr > self.lr:
            raise ValueError(f"min-lr {self.min_lr:g} is above lr {self.lr:g}")
        if any(stage.cooldown for stage in self.stages[:-1]):
            raise ValueError("only the last stage may be a cooldown")
        first = self.stages[0]
        if self.warmup * self.tokens > first.steps * first.context * first.global_batch or first.cooldown:
            raise ValueError("the warm-up must end inside the first stage, which is no cooldown")
        return self

    @property
    def tokens(self) -> int:
        """Of the whole run, in whole steps."""
        return sum(stage.steps * stage.context * stage.global_batch for stage in self.stages)

    def learning_rate(self, tokens: float) -> float:
        """The curve itself, for the report and the tests."""
        warmup = self.warmup * self.tokens
        if tokens <= warmup and warmup:
            return self.lr * tokens / warmup
        start, stage = self.tokens, self.stages[-1]
        if stage.cooldown:
            start -= stage.steps * stage.context * stage.global_batch
        share = _cosine((min(tokens, start) - warmup) / (self.tokens - warmup))
        if tokens > start:
            share *= (self.tokens - tokens) / (self.tokens - start)
        return self.min_lr + (self.lr - self.min_lr) * share


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Placed:
    """A stage with the numbers of its Megatron flags."""

    stage: Stage
    first_step: int
    """Steps of the run before it."""
    first_sample: int
    first_token: int
    style: str
    warmup_samples: int
    decay_samples: int

    @property
    def last_step(self) -> int:
        """Steps of the run after it."""
        return self.first_step + self.stage.steps


def place(curriculum: Curriculum) -> list[Placed]:
    """Every stage on the curve of the whole run (see the module docstring)."""
    placed, step, sample, token = [], 0, 0, 0
    total = curriculum.tokens
    warmup = curriculum.warmup * total
    for stage in curriculum.stages:
        samples = stage.steps * stage.global_batch
        if stage.cooldown:
            style, end = "linear", float(sample + samples)
            # the line that has the cosine's share at the first sample and 0 at the last
            gone = 1 - _cosine((token - warmup) / (total - warmup))
            before = (sample - gone * end) / (1 - gone)
        else:
            style = "cosine"
            before = sample - (token - warmup) / stage.context
            end = before + (total - warmup) / stage.context
        placed.append(Placed(stage, step, sample, token, style, round(before), round(end)))
        step, sample, token = step + stage.steps, sample + samples, token + samples * stage.context
    return placed


def _samples(curriculum: Curriculum, placed: Placed, output: Path) -> int:
    """Enough for the data set, whatever the batch sizes of earlier stages; the stage ends at its last step."""
    batch = placed.stage.global_batch
    return max(placed.last_step * batch, placed.first_sample + placed.stage.steps * batch)


FLAGS: dict[str, Callable[[Curriculum, Placed, Path], str | int | Path | None]] = {
    "seq-length": lambda curriculum, placed, output: placed.stage.context,
    "max-position-embeddings": lambda curriculum, placed, output: max(stage.context for stage in curriculum.stages),
    "micro-batch-size": lambda curriculum, placed, output: placed.stage.micro_batch,
    "global-batch-size": lambda curriculum, placed, output: placed.stage.global_batch,
    # validation counts its samples over all stages: the same batch in each
    "eval-global-batch-size": lambda curriculum, placed, output: curriculum.eval_global_batch,
    "eval-micro-batch-size": lambda curriculum, placed, output: 1,
    "train-samples": _samples,
    "exit-interval": lambda curriculum, placed, output: placed.last_step,
    "lr": lambda curriculum, placed, output: f"{curriculum.lr:.10g}",
    "min-lr": lambda curriculum, placed, output: f"{curriculum.min_lr:.10g}",
    "lr-decay-style": lambda curriculum, placed, output: placed.style,
    "lr-warmup-samples": lambda curriculum, placed, output: placed.warmup_samples,
    "lr-decay-samples": lambda curriculum, placed, output: placed.decay_samples,
    "override-opt-param-scheduler": lambda curriculum, placed, output: None,
    "save": lambda curriculum, placed, output: output / "checkpoints",
    "save-interval": lambda curriculum, placed, output: 10**9,
    "ckpt-format": lambda curriculum, placed, output: "torch_dist",
    "dist-ckpt-optim-fully-reshardable": lambda curriculum, placed, output: None,
    "tensorboard-dir": lambda curriculum, placed, output: output / "tensorboard",
}
"""Megatron's flag -> its value in a stage of the run in a folder; None for a flag without a value."""

_TOKENIZER = (word for kind in ("byte", "hf", "sp") for word in TokenizerInfo(kind, "", 1, 0).megatron_flags)

RESERVED = (
    frozenset(FLAGS)
    | {word.removeprefix("--") for word in _TOKENIZER if word.startswith("--")}
    | {
        *("load", "train-data-path", "valid-data-path", "data-path"),
        # other ways to say the same, or other spellings
        *("train-iters", "rampup-batch-size", "step-batch-size-schedule", "lr-warmup-fraction", "lr-warmup-iters"),
        *("lr-decay-iters", "override-opt_param-scheduler", "use-checkpoint-opt_param-scheduler"),
        *("use-checkpoint-opt-param-scheduler", "yaml-cfg"),
    }
)
"""Flags that follow from the stages and their data sets."""


def read(path: Path) -> Curriculum:
    """The curriculum in a YAML file.

    Raises:
        CurriculumError: naming the file, every wrong field and why.
    """
    return declaration.read(path, Curriculum, CurriculumError, "lr, min-lr, eval-global-batch and stages")
