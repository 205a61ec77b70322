"""Process groups: the backend `nccl` becomes `gloo`.

gloo has every collective Megatron uses: uneven all-to-all, reduce-scatter, averages, batched point-to-point,
in fp32, bf16, fp16 and integers. It has no fp8.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def install() -> None:
    """Wrap the functions that name a backend or a device, in both modules that export them."""
    _replace("init_process_group", _wrap_init_process_group)
    _replace("new_group", _wrap_new_group)
    _replace("all_to_all_single", _wrap_all_to_all_single)
    _replace("barrier", _wrap_barrier)
    _replace("_coalescing_manager", _wrap_coalescing_manager)


def _replace(name: str, wrap: Callable) -> None:
    wrapped = wrap(getattr(distributed_c10d, name))
    setattr(distributed_c10d, name, wrapped)
    setattr(dist, name, wrapped)


def _backend(backend: Any) -> Any:
    """ "nccl" and per-device lists such as "cpu:gloo,cuda:nccl" become "gloo"; other names, and None, stay."""
    return "gloo" if backend is not None and "nccl" in str(backend) else backend


def _wrap_init_process_group(original: Callable) -> Callable:
    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)  # binds the group to a GPU
        if "pg_options" in kwargs:
            kwargs["pg_options"] = _options(kwargs["pg_options"])
        # `python -m ...` without torchrun is a job of one process: it needs no rendezvous, no address and no
        # port.
        alone = kwargs.get("world_size") == 1 and kwargs.get("store") is None and "MASTER_ADDR" not in os.environ
        if alone and kwargs.get("init_method") is None and not args:
            kwargs["store"] = dist.HashStore()
        return original("gloo" if backend is None else _backend(backend), *args, **kwargs)

    return init_process_group


def _wrap_new_group(original: Callable) -> Callable:
    @functools.wraps(original)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("device_id", None)
        return original(ranks, timeout, _backend(backend), _options(pg_options), *args, **kwargs)

    return new_group


def _options(options: Any) -> Any:
    # NCCL's options (CTA counts, stream priority) mean nothing to gloo, which rejects them.
    return None if "NCCL" in str(type(options)) else options


def _wrap_all_to_all_single(original: Callable) -> Callable:
    # Megatron's MoE dispatcher passes split sizes as NumPy or tensor elements, which NCCL's path converts.
    @functools.wraps(original)
    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(output, input, _ints(output_split_sizes), _ints(input_split_sizes), *args, **kwargs)

    return all_to_all_single


def _ints(sizes: Any) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]


def _wrap_coalescing_manager(original: Callable) -> Callable:
    # gloo lays coalesced tensors end to end in the first one's dtype: a bf16 and an fp32 buffer that Megatron gathers
    # together come back as garbage, without an error. One batch per dtype is what NCCL does anyway.
    @contextlib.contextmanager
    @functools.wraps(original)
    def _coalescing_manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        group = group or distributed_c10d._get_default_group()
        recorded = distributed_c10d._world.pg_coalesce_state
        batches: dict[Any, list] = {}
        with original(group, device, async_ops) as manager:
            yield manager
            for operation in recorded[group]:
                batches.setdefault(operation.tensor.dtype, []).append(operation)
            if batches:
                recorded[group][:] = batches.pop(next(iter(batches)))
        for operations in batches.values():
            with original(group, device, async_ops) as further:
                recorded[group].extend(operations)
            manager.works.extend(further.works)

    return _coalescing_manager


def _wrap_barrier(original: Callable) -> Callable:
    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group=group, async_op=async_op)

    return barrier
