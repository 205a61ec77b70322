"""Is there a GPU, and can this PyTorch use it?

"Present" and "usable" differ: a CPU-only PyTorch on a GPU machine, or a driver that is too old, leaves a GPU
that is present but not usable. Choosing the CPU there by itself would turn a broken installation into a slow
success.
"""

from __future__ import annotations

import functools
import glob
import os
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """present: the machine shows this process a GPU. usable: PyTorch can compute on it. reason: one clause."""

    present: bool
    usable: bool
    reason: str


@functools.cache
def gpu() -> Gpu:
    """Look for a CUDA device without creating a CUDA context (that would cost memory and poison fork).

    Cached: once the CPU platform is installed, torch.cuda no longer tells.
    """
    import torch

    with warnings.catch_warnings(record=True) as caught:
        # torch explains a failed start-up (old driver) in a warning, which is the reason we want to pass on.
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return Gpu(True, True, f"{count} CUDA device{'s' if count > 1 else ''} visible")

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return Gpu(False, False, f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU")
    if not _device_files():
        return Gpu(False, False, "no NVIDIA GPU on this machine")
    if torch.version.cuda is None:
        return Gpu(True, False, f"PyTorch {torch.__version__} is built without CUDA")
    told = "; ".join(str(w.message).split(" (Triggered")[0] for w in caught)
    return Gpu(True, False, told or f"PyTorch {torch.__version__} sees no device (CUDA_VISIBLE_DEVICES={hidden!r})")


def _device_files() -> list[str]:
    # The driver's character devices; WSL exposes the GPU under another name.
    return glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg")
