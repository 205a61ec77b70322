"""Where a job computes: on NVIDIA GPUs, as Megatron expects, or on CPUs with gloo.

Megatron-Core assumes CUDA in every file. `select` decides once, before Megatron is imported, and installs the
CPU platform (`k3_plugins.platform.cpu`) where it applies. Importing this package imports neither torch nor
Megatron and changes nothing.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

NAMES = ("cpu", "cuda", "auto")
"""What `--k3-platform` accepts."""


class PlatformError(RuntimeError):
    """A platform that cannot be had. The message says what to type instead; `exit_code` is for the command line."""

    exit_code = 2


@dataclass(frozen=True)
class PlatformReport:
    """What was selected and why.

    name: "cpu" or "cuda". reason: one sentence. banner: what was printed on rank 0 ("" for CUDA, which says
    nothing).
    """

    name: str
    reason: str
    banner: str


_selected: PlatformReport | None = None


def select(name: str | None = None) -> PlatformReport:
    """Choose the platform and, for the CPU, install it. Call before `megatron` is imported.

    None and "auto" take CUDA where a device is usable, and the CPU, with a banner, where no GPU exists. A GPU
    that is present but not usable is an error: a training job must not move to the CPU unnoticed. "cpu"
    installs the CPU platform even beside a GPU, because it was asked for by name. Selecting the same platform
    again is a no-op.

    Raises PlatformError for an unknown name, for "cuda" without a usable device, for a GPU that cannot be
    used (None, "auto"), for a second, different choice, and if Megatron was imported too early.
    """
    global _selected
    requested = "auto" if name is None else name
    if requested not in NAMES:
        raise PlatformError(f"--k3-platform {requested}: no such platform; choose one of {', '.join(NAMES)}.")
    if _selected is not None:
        if requested not in ("auto", _selected.name):
            raise PlatformError(
                f"--k3-platform {requested}: this process already runs on the {_selected.name} platform "
                f"({_selected.reason}). A process has one platform: start a new one."
            )
        return _selected

    from k3_plugins.platform import detect

    gpu = detect.gpu()
    if requested == "cuda":
        if not gpu.usable:
            raise PlatformError(
                f"--k3-platform cuda: no CUDA device can be used ({gpu.reason}). "
                "Use --k3-platform cpu for a small run on the CPU."
            )
        report = PlatformReport("cuda", f"asked for by name; {gpu.reason}", "")
    elif requested == "auto" and gpu.usable:
        report = PlatformReport("cuda", gpu.reason, "")
    elif requested == "auto" and gpu.present:
        raise PlatformError(
            f"this machine has an NVIDIA GPU that cannot be used: {gpu.reason}. Repair that, or name the CPU: "
            "--k3-platform cpu."
        )
    else:
        reason = f"asked for by name; {gpu.reason}" if requested == "cpu" else gpu.reason
        report = PlatformReport("cpu", reason, _banner(reason, _install_cpu(named=requested == "cpu")))
        if int(os.environ.get("RANK", "0")) == 0:
            # stderr: stdout may be a machine-readable answer (doctor --json).
            print(report.banner, file=sys.stderr, flush=True)
    _selected = report
    return report


def _banner(reason: str, notes: list[str]) -> str:
    width = 100
    lines = (
        "k3_plugins: CPU PLATFORM (gloo, no CUDA)",
        f"why: {reason}",
        "For correctness checks and small runs: Megatron computes on the CPU and says nothing about GPU speed.",
        *notes,
    )
    return "\n".join(("=" * width, *lines, "=" * width))


def _install_cpu(named: bool) -> list[str]:
    if "megatron.core" in sys.modules or "megatron.training" in sys.modules:
        raise PlatformError(
            "the CPU platform must be selected before Megatron is imported: its modules bind CUDA functions by name "
            "at import. Call k3_plugins.platform.select() first, or start through python -m k3_plugins.launch."
        )
    from k3_plugins.platform import cpu

    return cpu.install(named=named)
