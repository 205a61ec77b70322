"""Run a training module unchanged and write the first step's gradients in a layout-independent form.

    python -m tests.harness.gradients RECORDS [--perturb] TARGET [arguments of TARGET]

Also writes the records of `tests.harness.recorded`. Before the first optimizer step each rank saves every gradient
shard with its place in the whole parameter, taken from the model's own distributed-checkpoint description; `assemble`
puts the shards of all ranks together and checks that replicas agree. With --perturb every one-dimensional parameter
is made random before training, so that a gradient assigned to the wrong head or channel cannot hide behind equal
values.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.harness.recorded import before_training, hook_training, record


def main() -> None:
    directory, *rest = sys.argv[1:]
    perturb = rest[0] == "--perturb"
    if perturb:
        rest = rest[1:]
    watch = functools.partial(write_gradients, directory=Path(directory), perturb=perturb)
    hook_training(rest[0], lambda module: before_training(module, watch))
    record(directory, digest=False, target=rest[0])
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


def write_gradients(arguments: dict[str, Any], directory: Path, perturb: bool = False) -> None:
    """For `before_training`: the first step's gradients go to `directory`."""
    model, optimizer = arguments["model"], arguments["optimizer"]
    if perturb:
        make_vectors_random(model)
        optimizer.reload_model_params()
    step, done = optimizer.step, []

    def step_after_dump(*step_args, **step_kwargs):
        if not done:
            done.append(True)
            _dump(model, directory / f"grads{os.environ.get('RANK', '0')}.pt")
        return step(*step_args, **step_kwargs)

    optimizer.step = step_after_dump


def make_vectors_random(model) -> None:
    """Every one-dimensional parameter; call `reload_model_params` of the optimizer afterwards."""
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for chunk in model:
            for _, parameter in sorted(chunk.named_parameters()):
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def _dump(model, path: Path) -> None:
    shards = []
    for chunk in model:
        _complete_distributed_gradients(chunk)
        with _gradients_as_parameters(chunk):
            shards += _shards(chunk)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(shards, path)


def save_parameters(model, directory: Path) -> None:
    """This rank's shards of the parameters as they are now, for `assemble(directory, "parameters")`."""
    shards = [shard for chunk in model for shard in _shards(chunk)]
    torch.save(shards, directory / f"parameters{os.environ.get('RANK', '0')}.pt")


def _shards(chunk) -> list[tuple]:
    """(name, global shape, offset, values) of everything that the chunk would write into a checkpoint."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    sharded = chunk.sharded_state_dict()
    apply_factories(sharded)
    tensors = (item for item in nested_values(sharded) if isinstance(item, ShardedTensor) and item.data is not None)
    return [(item.key, item.global_shape, item.global_offset, item.data.detach().clone()) for item in tensors]


@contextmanager
def _gradients_as_parameters(chunk) -> Iterator[None]:
    """The modules hold gradients in the places of their parameters.

    The parameters themselves are left alone: an fp32 gradient under a bf16 parameter's name would end Megatron's
    accumulation for the rest of the run.
    """
    places = [
        (module._parameters, name, parameter)
        for module in chunk.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    stand_ins = {}
    for parameters, name, parameter in places:
        if parameter not in stand_ins:
            gradient = parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)  # frozen
            stand_ins[parameter] = torch.nn.Parameter(gradient.detach().clone(), requires_grad=False)
            stand_ins[parameter].__dict__.update(parameter.__dict__)
        parameters[name] = stand_ins[parameter]
    try:
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


def _complete_distributed_gradients(chunk) -> None:
    """With the distributed optimizer each rank holds one reduced piece of every bucket; gather the others."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            pieces = list(bucket.grad_data.chunk(group.size()))
            gathered = [torch.empty_like(piece) for piece in pieces]
            torch.distributed.all_gather(gathered, pieces[group.rank()].clone(), group=group)
            bucket.grad_data.copy_(torch.cat(gathered))


def assemble(directory: Path, what: str = "grads", replica_tolerance: float = 1e-6) -> dict[str, torch.Tensor]:
    """Every whole gradient (or parameter) from the shards of all ranks; replicas must agree, no element be missing."""
    full: dict[str, torch.Tensor] = {}
    for path in sorted(Path(directory).glob(f"{what}*.pt")):
        for key, shape, offset, data in torch.load(path, weights_only=False):
            whole = full.setdefault(key, torch.full(shape, float("nan"), dtype=data.dtype))
            # Equal layers are stacked along a prepended axis, of which a shard holds one entry.
            data = data.reshape((1,) * (len(shape) - data.dim()) + data.shape)
            region = whole[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))]
            if not torch.isnan(region).any():
                scale = data.abs().max().clamp(min=1e-20)
                difference = ((region - data).abs().max() / scale).item()
                assert difference <= replica_tolerance, f"replicas of {key} differ by {difference:.1e} in {path.name}"
            region.copy_(data)
    holes = [key for key, whole in full.items() if torch.isnan(whole).any()]
    assert not holes, f"{what}: elements that no rank reported: {holes}"
    return full


def largest_difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest relative error (over each tensor's largest entry) and the parameter it occurs in."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    errors = {
        key: ((actual[key] - value).abs().max() / value.abs().max().clamp(min=1e-20)).item()
        for key, value in expected.items()
    }
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


if __name__ == "__main__":
    main()
