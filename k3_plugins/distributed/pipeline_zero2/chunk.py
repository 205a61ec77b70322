"""One model chunk's gradients: on the device while a group of micro-batches accumulates, in host shards otherwise.

Hooks around the chunk's backward pass, none of which knows the schedule:

1. forward hook on Megatron's DDP wrapper -> tensor hook on the output: the chunk's backward starts, take a slot;
2. `queue_callback` from that hook: the whole backward of this micro-batch is over, count it; at the end of a group
   reduce-scatter the slot and let it drain into the host shards;
3. `finish_grad_sync`, `scale_gradients`, `zero_grad_buffer`: what Megatron's loop calls on the wrapper.

N: elements of a bucket with its padding. D: ranks of the bucket's data-parallel group (an expert's differs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch.autograd import Variable

from k3_plugins.distributed.pipeline_zero2.buffers import release_gradients
from k3_plugins.distributed.pipeline_zero2.replicated import parameters_finalize_reads
from k3_plugins.distributed.pipeline_zero2.slots import Slot, SlotPool, align


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of one bucket."""

    bucket: Any
    unbacked: torch.Tensor
    """`[N]` without memory: the bucket's gradient between two groups. Megatron asks it for its size."""
    offset: int
    """Of the bucket in a slot, in bytes."""
    rank: int
    """In the bucket's data-parallel group."""
    host: torch.Tensor
    """`[N / D]` fp32 in host memory."""
    staging_offset: int
    """In a slot's staging memory, in bytes."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradients on the device."""
        return self.unbacked.dtype

    def owned(self, param: torch.nn.Parameter) -> tuple[int, int, int] | None:
        """Which elements of `param` lie in this shard: (first in the parameter, first in `host`, how many)."""
        first, last = self.bucket.param_to_index[param]
        low, size = self.rank * self.host.numel(), self.host.numel()
        begin, end = max(first, low), min(last, low + size)
        return (begin - first, begin - low, end - begin) if end > begin else None


@dataclass(frozen=True)
class _Views:
    """A chunk's gradients in one slot."""

    extent: torch.Tensor
    buckets: list[torch.Tensor]
    main_grads: list[torch.Tensor]
    staged: list[torch.Tensor]


class ChunkGradients:
    """The gradients of one DDP-wrapped model chunk. `attach` makes Megatron use it.

    Args:
        ddp: Megatron's DistributedDataParallel around the chunk, with the distributed optimizer's buffers.
        group: micro-batches a reduction; None: the whole batch.
    """

    def __init__(self, ddp: Any, group: int | None):
        self.ddp = ddp
        self.group = group
        self.pool: SlotPool
        """Set by `attach`."""
        self.count = 0
        """Micro-batches whose backward is over in this step."""
        self.reductions = 0
        """Reduce-scatters of the whole chunk in this step."""
        self._slot: Slot | None = None
        self._in_backward = False
        self._fresh = True
        self._scale: torch.Tensor | float | None = None
        self._outside: list[Any] = []
        """Parameters whose `main_grad`, Megatron's attribute, is a whole gradient between `finish` and `settle`."""
        self._bucket_groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
        self.shards, self.nbytes, self.staging_nbytes, self.host = self._lay_out()
        self._shard_of = {param: shard for shard in self.shards for param in shard.bucket.params_list}
        for param in self._shard_of:
            # One tensor object for good: fused weight-gradient kernels take hold of it in the forward pass and write
            # through it in the backward pass. Only its memory changes.
            param.main_grad = torch.empty(0, dtype=param.main_grad.dtype, device=param.main_grad.device)
        self._main_grads = [param.main_grad for param in self._shard_of]
        self._nothing = [_unwritable(param) for param in self._shard_of]
        self._unbind()

    def _lay_out(self) -> tuple[list[Shard], int, int, torch.Tensor]:
        places, offset, staging, start = [], 0, 0, 0
        for buffer in [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]:
            release_gradients(buffer)
            width, ranks = buffer.grad_data.element_size(), buffer.data_parallel_world_size
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // ranks
                places.append((buffer, bucket, offset + bucket.offset * width, size, staging, start))
                staging += align(size * width)
                start += size
            offset += align(buffer.numel * width)
        host = torch.zeros(start, dtype=torch.float32, pin_memory=torch.cuda.is_available())
        shards = []
        for buffer, bucket, at, size, out, first in places:
            rank = buffer.data_parallel_group.rank()
            shards.append(Shard(bucket, bucket.grad_data, at, rank, host[first : first + size], out))
        return shards, offset, staging, host

    def attach(self, pool: SlotPool) -> None:
        """Put the hooks in place of Megatron's full gradient buffers."""
        self.pool = pool
        self.ddp.register_forward_hook(self._after_forward)
        self.ddp.zero_grad_buffer = self.begin_step
        self.ddp.finish_grad_sync = self.finish
        self.ddp.scale_gradients = self.scale
        self.ddp.start_grad_sync = lambda *unused: None  # the groups are reduced when they are complete

    @property
    def gradient_bytes(self) -> int:
        """Of the whole chunk on one rank, as Megatron's full buffers hold it."""
        return sum(shard.unbacked.numel() * shard.unbacked.element_size() for shard in self.shards)

    def shard_of(self, param: torch.nn.Parameter) -> Shard:
        """The part of the parameter's bucket that this rank holds."""
        return self._shard_of[param]

    def holds(self, param: torch.nn.Parameter) -> bool:
        """Whether it is one of the chunk's."""
        return param in self._shard_of

    # -- around the backward pass ---------------------------------------------------------------------------------

    def _after_forward(self, module: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_backward)

    def _before_backward(self, gradient: torch.Tensor) -> None:
        if self._in_backward:  # the other outputs of the same micro-batch
            return
        self._in_backward = True
        slot = self.pool.take(self)
        if slot is not self._slot:
            self._bind(slot)
        Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._in_backward = False
        self.count += 1
        # The last group of a batch may be short.
        if self.count == get_num_microbatches() or (self.group and self.count % self.group == 0):
            self.reduce()

    def _bind(self, slot: Slot) -> None:
        views = slot.bound.get(self)
        if views is None:
            views = slot.bound[self] = self._views(slot)
        views.extent.zero_()
        for main_grad, memory in zip(self._main_grads, views.main_grads, strict=True):
            main_grad.data = memory
        self._slot = slot

    def _views(self, slot: Slot) -> _Views:
        buckets, main_grads, staged = [], [], []
        for shard in self.shards:
            width = shard.unbacked.element_size()
            end = shard.offset + shard.unbacked.numel() * width
            buckets.append(slot.memory[shard.offset : end].view(shard.dtype))
            for param in shard.bucket.params_list:
                first, last = shard.bucket.param_to_index[param]
                main_grads.append(buckets[-1][first:last].view(param.shape))
            out = slot.staging[shard.staging_offset : shard.staging_offset + shard.host.numel() * width]
            staged.append(out.view(shard.dtype))
        return _Views(slot.memory[: self.nbytes], buckets, main_grads, staged)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce-scatter what has been accumulated, by Megatron's own code, and send this rank's part to the host."""
        slot, self._slot = self._slot, None
        assert slot is not None, "the chunk has accumulated nothing since the last reduction"
        views = slot.bound[self]
        self._unbind()
        slot.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(slot.stream):
            for shard, memory in zip(self.shards, views.buckets, strict=True):
                shard.bucket.grad_data = memory
            for group in self._bucket_groups:
                group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
                group.start_grad_sync()
            for shard, memory, staged in zip(self.shards, views.buckets, views.staged, strict=True):
                size = shard.host.numel()
                staged.copy_(memory[shard.rank * size : (shard.rank + 1) * size], non_blocking=True)
                shard.bucket.grad_data = shard.unbacked
            copied = torch.cuda.Event()
            copied.record(slot.stream)
        for group in self._bucket_groups:
            group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
        copies = [(staged, shard.host) for staged, shard in zip(views.staged, self.shards, strict=True)]
        self.pool.hand_in(self, copied, copies, self._fresh)
        self._fresh = False
        self.reductions += 1

    @torch.no_grad()
    def add(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Gradients that were computed apart from the chunk's backward passes, between its last one and `finish`.

        They are reduced like those of a group of micro-batches: one more reduce-scatter, on all data-parallel ranks.

        Args:
            gradients: by parameter, in its shape; not yet summed over data parallelism.
        """
        if self._slot is None:
            self._bind(self.pool.take(self))
        param: Any
        for param, gradient in gradients.items():
            param.main_grad.add_(gradient)

    def _unbind(self) -> None:
        # A gradient that arrives outside the hooks then fails instead of being lost.
        for main_grad, nothing in zip(self._main_grads, self._nothing, strict=True):
            main_grad.data = nothing

    # -- what Megatron calls on the DDP wrapper ---------------------------------------------------------------------

    def begin_step(self) -> None:
        """`zero_grad_buffer`: nothing has been accumulated."""
        self.pool.reset()
        self._unbind()
        self._put_back()
        self._slot, self._in_backward, self._fresh, self._scale = None, False, True, None
        self.count = self.reductions = 0
        for param in self.ddp.params_with_grad:
            param.grad_added_to_main_grad = False
        for group in self._bucket_groups:
            group.reset()

    @torch.no_grad()
    def finish(self, force_all_reduce: bool | None = False) -> None:
        """`finish_grad_sync`: the host shards are complete, and what finalize_model_grads reads is on the device."""
        if force_all_reduce:
            raise RuntimeError("pipeline-zero2 keeps no full gradients to all-reduce; drop --save-wgrads-interval")
        for group in self._bucket_groups:
            group.param_gather_dispatched = False
        if self._slot is not None:
            self.reduce()
        self.pool.wait()
        if self._fresh:
            self.host.zero_()
            self._fresh = False
        self._outside = parameters_finalize_reads(self.ddp, self._shard_of)
        param: Any
        for param in self._outside:
            # Only this rank's elements count: its peers in the other group hold the same part of their copies, as
            # with Megatron's own buffers after a reduce-scatter.
            whole = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
            if part := self._shard_of[param].owned(param):
                inside, at, size = part
                whole.view(-1)[inside : inside + size].copy_(self._shard_of[param].host[at : at + size])
            param.main_grad = whole

    def scale(self, factor: torch.Tensor | float) -> None:
        """`scale_gradients`: applied once finalize_model_grads is over."""
        self._scale = factor if self._scale is None else self._scale * factor

    @torch.no_grad()
    def settle(self) -> None:
        """After finalize_model_grads: take back what it changed and apply its factor. A second call changes nothing."""
        for param in self._outside:
            if part := self._shard_of[param].owned(param):
                inside, at, size = part
                self._shard_of[param].host[at : at + size].copy_(param.main_grad.view(-1)[inside : inside + size])
        self._put_back()
        if self._scale is not None:
            self.host.mul_(self._scale.to("cpu") if isinstance(self._scale, torch.Tensor) else self._scale)
            self._scale = None

    def _put_back(self) -> None:
        if self._outside:
            for param, main_grad in zip(self._shard_of, self._main_grads, strict=True):
                param.main_grad = main_grad
            self._outside = []


def _unwritable(param: Any) -> torch.Tensor:
    """A tensor that no gradient of the parameter can be added to: its shape differs.

    A single element would broadcast to every shape. For it, two elements share one place, which torch refuses to write.
    """
    nothing = torch.empty(0, dtype=param.main_grad.dtype, device=param.main_grad.device)
    return nothing.new_zeros(1).expand(2) if param.numel() == 1 else nothing


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for item in output.values():
            yield from _tensors(item)
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
