"""What there is to move: a list of memory blocks, each once, however many tensors look into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from k3_plugins.memory.state_offload.errors import StateOffloadError


@dataclass(frozen=True, eq=False)
class Block:
    """A storage. Its tensors stay valid objects while its memory is away."""

    name: str
    """Of the first tensor that was found in it."""
    storage: torch.UntypedStorage
    nbytes: int

    def bytes(self) -> torch.Tensor:
        """The memory as `[nbytes]` uint8; no copy."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def release(self) -> None:
        """Give the memory back; the tensors keep shape and strides."""
        self.storage.resize_(0)

    def allocate(self) -> None:
        """Memory of the same size, uninitialised."""
        self.storage.resize_(self.nbytes)


def blocks_of(tensors: Mapping[str, torch.Tensor]) -> list[Block]:
    """The storages of the tensors, in order, empty ones left out.

    Raises:
        StateOffloadError: for memory that others may hold (numpy, other processes, a file): it cannot be freed; for a
            tensor whose memory is away already.
    """
    found: dict[int, Block] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if tensor.numel() and not storage.nbytes():
            raise StateOffloadError(f"{name} has no memory: it is out already, or was freed; call back() first")
        if storage.nbytes() == 0 or storage.data_ptr() in found:
            continue
        if not storage.resizable():
            raise StateOffloadError(
                f"{name} lies in memory that torch shares with others (it came from numpy, was lent to it by .numpy(), "
                "or is mapped) and cannot be freed and restored in place: clone the tensor, or leave it out"
            )
        found[storage.data_ptr()] = Block(name, storage, storage.nbytes())
    return list(found.values())


def training_state(model_chunks: Iterable[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights, buffers, master weights and optimizer states of a Megatron model on this rank, by name.

    Gradients are not part of it.

    Args:
        model_chunks: with or without Megatron's DDP wrapper.
        optimizer: what `get_megatron_optimizer` returned, or any torch optimizer.
    """
    tensors: dict[str, torch.Tensor] = {}
    for index, chunk in enumerate(model_chunks):
        if getattr(chunk, "ddp_config", None) is not None:
            for number, buffer in enumerate([*chunk.buffers, *chunk.expert_parallel_buffers]):
                if buffer.param_data is not None:
                    tensors[f"chunk{index}.param_data{number}"] = buffer.param_data
        tensors.update({f"chunk{index}.{name}": param.data for name, param in chunk.named_parameters()})
        tensors.update({f"chunk{index}.{name}": value for name, value in chunk.named_buffers()})
    for index, inner in enumerate(_torch_optimizers(optimizer)):
        number = 0
        for group in inner.param_groups:
            for param in group["params"]:
                tensors[f"optimizer{index}.{number}.param"] = param.data
                state = inner.state.get(param, {})
                tensors.update(
                    {f"optimizer{index}.{number}.{key}": v for key, v in state.items() if isinstance(v, torch.Tensor)}
                )
                number += 1
    return tensors


def _torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield getattr(part, "optimizer", part)
