"""The storage policies of a saved tensor, and which of them compose. Imports neither torch nor megatron."""

from __future__ import annotations

import difflib
from enum import Enum

STEPS = ("keep", "recompute", "fp8", "cpu", "remote")

FP8_BLOCK = 128
"""Values that share a scale."""


def coded_bytes(count: int) -> int:
    """Bytes of ``count`` values in FP8: codes padded to whole blocks, and an fp32 scale for each block."""
    return -(-count // FP8_BLOCK) * (FP8_BLOCK + 4)


class Policy(Enum):
    """What happens to a tensor between the forward pass that saves it and the backward pass that reads it."""

    KEEP = "keep"
    """It stays where it is."""
    RECOMPUTE = "recompute"
    """It is dropped and computed again."""
    FP8 = "fp8"
    """It stays on the device in 8-bit codes, e4m3 or int8, with one fp32 scale for 128 values."""
    CPU = "cpu"
    """Its bits wait in a host buffer."""
    REMOTE = "remote"
    """Its bits wait in the memory of another pipeline rank."""
    FP8_CPU = "fp8+cpu"
    FP8_REMOTE = "fp8+remote"

    @property
    def coded(self) -> bool:
        """Whether the values are rounded to 8 bits."""
        return self.value.startswith("fp8")

    @property
    def place(self) -> str:
        """``device``, ``cpu`` or ``remote``."""
        last = self.value.rpartition("+")[2]
        return last if last in ("cpu", "remote") else "device"

    @property
    def exact(self) -> Policy:
        """The same place without FP8, for tensors that must keep their bits."""
        return {Policy.FP8: Policy.KEEP, Policy.FP8_CPU: Policy.CPU, Policy.FP8_REMOTE: Policy.REMOTE}.get(self, self)

    @classmethod
    def parse(cls, text: str | Policy) -> Policy:
        """A policy from its name, such as ``fp8+cpu``; upper and lower case count the same.

        Raises:
            ValueError: for an unknown policy, or one that does not compose; the text says what to write.
        """
        if isinstance(text, Policy):
            return text
        steps = [step.strip().lower() for step in text.split("+")]
        for step in steps:
            if step not in STEPS:
                near = difflib.get_close_matches(step, STEPS, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise ValueError(f"there is no activation policy {step!r}{hint}; the policies are {', '.join(STEPS)}")
        try:
            return cls("+".join(steps))
        except ValueError:
            raise ValueError(f"activation policy {text!r}: {_why_not(steps)}") from None


def _why_not(steps: list[str]) -> str:
    if len(set(steps)) < len(steps):
        return "a policy is named twice"
    for alone in ("keep", "recompute"):
        if alone in steps:
            return f"{alone} cannot be combined with another policy"
    if {"cpu", "remote"} <= set(steps):
        return "a tensor waits in one place, cpu or remote"
    return "values are coded before they are moved; write fp8 first, as in fp8+cpu"
