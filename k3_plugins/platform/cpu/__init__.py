"""The CPU platform: lets an unmodified Megatron-Core train on CPUs with gloo.

It gives `torch.cuda` and every `device=` argument a CPU meaning, maps the `nccl` backend to `gloo`, and
repairs the places of Megatron that are wrong, some of them silently, once the "GPU" is the CPU. It is for
correctness and small runs. The parts, in the order they are installed:

    cuda_module            torch.cuda.*: streams, events, memory figures, generator
    devices                device arguments "cuda"/int -> cpu; Tensor.cuda, Tensor.type
    collectives            nccl -> gloo
    randomness             random draws that would touch the shared CPU generator on some ranks only
    packages               CUDA-only packages count as not installed
    processes              helper processes end with their rank
    megatron               repairs of Megatron's modules, applied when each is imported
    checkpoint_tracker     a kill while the tracker file is written leaves the old one (one of those repairs)
    distributed_optimizer  resume of the distributed optimizer with torch's Adam (one of those repairs)

`.cuda()` and `.cpu()` return the tensor itself, they do not copy: code that is tested for moving data must
compare storages, not devices.
"""

from __future__ import annotations

import os

from k3_plugins.platform import PlatformError, detect

_notes: list[str] | None = None


def install(*, named: bool) -> list[str]:
    """Install everything, once. `named` says that the user asked for the CPU by name.

    Returns what the user should know beyond the fact itself, one sentence each.

    Raises PlatformError beside a GPU unless `named`: a job on a GPU machine must not become a CPU job by
    accident.
    """
    global _notes
    if _notes is not None:
        return _notes
    gpu = detect.gpu()
    if gpu.present and not named:
        raise PlatformError(f"the CPU platform stays off beside a GPU ({gpu.reason}) unless named: --k3-platform cpu.")

    _set_environment()

    from k3_plugins.platform.cpu import collectives, cuda_module, devices, megatron, packages, processes, randomness

    devices.install()
    cuda_module.install()
    collectives.install()
    randomness.install()
    processes.install()
    megatron.install()
    hidden = packages.install()
    _notes = [f"not used, CUDA only: {', '.join(hidden)}"] if hidden else []
    return _notes


def _set_environment() -> None:
    # Megatron's fused functions go through torch.compile. On the CPU that would call a C++ compiler for
    # minutes and change rounding between layouts; without it they run as they are written.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Megatron refuses tensor and context parallelism without it: on GPUs before Blackwell it orders
    # communication before computation. gloo has no such hazard, so the demand is met and means nothing.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
