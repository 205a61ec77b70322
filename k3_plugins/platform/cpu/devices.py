"""Device arguments: "cuda", "cuda:1" and a device number mean the CPU.

Megatron writes `device="cuda"` and `device=torch.cuda.current_device()` (a number) in several hundred places.
Wrapping the functions that take a device is enough, costs a fraction of a microsecond a call, and leaves
every other operator untouched (a TorchFunctionMode would be entered for each operator).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")

# Python functions of the `torch` namespace that create a tensor and take `device=`.
_FACTORIES = (
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_NEW_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def to_cpu(device: Any) -> Any:
    """Map one device argument: a CUDA device in any spelling becomes the CPU, all else (None, "meta") is returned."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device == "cuda" or device.startswith("cuda:") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def install() -> None:
    """Wrap the factories, the tensor methods and `torch.load`."""
    # `with torch.device("meta")` recognises the factories by identity in a set that is built on first use. It
    # must be built from the originals, or Megatron's --init-model-with-meta-device would stop working.
    from torch.utils import _device

    _device._device_constructors()
    _wrap_device_context(_device.DeviceContext)

    for name in _FACTORIES:
        setattr(torch, name, _wrap_factory(getattr(torch, name)))
    for name in _NEW_METHODS:
        setattr(torch.Tensor, name, _wrap_factory(getattr(torch.Tensor, name)))
    tensor: Any = torch.Tensor
    tensor.to = _wrap_to(tensor.to)
    tensor.cuda = _cuda
    tensor.type = _wrap_type(tensor.type)
    tensor.pin_memory = _pin_memory
    tensor.record_stream = _record_stream
    storages: tuple[Any, ...] = (torch.UntypedStorage, torch.TypedStorage)
    for storage in storages:
        storage.cuda = _storage_cuda
    torch.load = _wrap_load(torch.load)


def _wrap_factory(original: Callable) -> Callable:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        # Page-locked memory serves transfers to a GPU and cannot be had without a driver.
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return factory


def _wrap_to(original: Callable) -> Callable:
    # nn.Module.to ends here as well.
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (to_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _cuda(
    self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> torch.Tensor:
    """The tensor itself: as on a GPU, where `.cuda()` of a CUDA tensor is no copy."""
    return self.to(CPU, memory_format=memory_format)


def _wrap_type(original: Callable) -> Callable:
    # Megatron's optimizers sort parameters by `param.type()` and refuse what is not 'torch.cuda.*Tensor'.
    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name = original(self)
            return "torch.cuda." + name[len("torch.") :] if name.count(".") == 1 else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        elif getattr(dtype, "__module__", None) == "torch.cuda":
            dtype = f"torch.{dtype.__name__}"
        return original(self, dtype, non_blocking, **kwargs)

    return type_


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """The tensor itself, unpinned (`is_pinned()` stays False): there is no transfer that pinning would speed up."""
    return self


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    """Nothing: CPU memory is freed by reference count, no stream is still reading it."""


def _storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    return self


def _wrap_load(original: Callable) -> Callable:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        location: Any
        # None would put a checkpoint written on a GPU back on that GPU.
        if map_location is None:
            location = CPU
        elif isinstance(map_location, dict):
            location = {source: str(to_cpu(target)) for source, target in map_location.items()}
        else:
            location = to_cpu(map_location)
        return original(f, location, *args, **kwargs)

    return load


def _wrap_device_context(context: Any) -> None:
    # `with torch.device("cuda")` hands its device straight to the C functions, past the wrapped factories.
    original = context.__init__

    @functools.wraps(original)
    def __init__(self: Any, device: Any) -> None:
        original(self, to_cpu(device))

    context.__init__ = __init__
