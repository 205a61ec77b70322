"""Gradient bytes, reduce-scatter volume and step time: pipeline-zero2 against Megatron's distributed optimizer.

    python benchmarks/pipeline_zero2.py [--pipeline 2] [--virtual 4] [--data 2] [--micro-batches 8] [--json]

Both train the same small GPT in the same processes (gloo, CPU), one after the other, from the same weights. Bytes are
those of storages, volume is counted by wrapping the reduce-scatter; both depend on the layout only. Times say what the
hooks and the extra reduce-scatters cost where all processes share a machine's cores, nothing about overlap on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from k3_plugins import platform

platform.select("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from k3_plugins.distributed.pipeline_zero2.attach import PipelineZeRO2, attach  # noqa: E402
from k3_plugins.distributed.pipeline_zero2.config import PipelineZeRO2Config  # noqa: E402

MICRO_BATCH = 2


@dataclass(frozen=True)
class Shape:
    """A model and how it is laid out."""

    pipeline: int = 2
    virtual: int = 4
    micro_batches: int = 8
    hidden: int = 64
    vocabulary: int = 64
    sequence: int = 32
    adam_eps: float = 1e-8


@dataclass
class Training:
    """A model in training on this rank; zero2 is None for Megatron's own gradients."""

    shape: Shape
    chunks: list[Any]
    optimizer: Any
    zero2: PipelineZeRO2 | None

    def step(self, number: int) -> tuple[list[float], float]:
        """One step on its own random tokens; the micro-batches' losses (last stage) and the gradient norm."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        data = [iter(range(self.shape.micro_batches)) for _ in self.chunks]
        many = len(self.chunks) > 1

        def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
            seed = 1000 * number + 100 * parallel_state.get_data_parallel_rank() + next(iterator)
            size = (MICRO_BATCH, self.shape.sequence + 1)
            tokens = torch.randint(self.shape.vocabulary, size, generator=torch.Generator().manual_seed(seed))
            positions = torch.arange(self.shape.sequence).expand(MICRO_BATCH, -1)
            output = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
            return output, lambda losses: (losses.mean(), {"loss": losses.mean().item()})

        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if many else data[0],
            model=self.chunks if many else self.chunks[0],
            num_microbatches=self.shape.micro_batches,
            seq_length=self.shape.sequence,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        ok, norm, _ = self.optimizer.step()
        assert ok
        return [loss["loss"] for loss in losses], float(norm)

    def gradient_bytes(self) -> int:
        """Device memory that gradients take now: every storage that a buffer, a parameter or a slot refers to."""
        tensors = [slot.memory for slot in self.zero2.pool.slots] if self.zero2 else []
        for chunk in self.chunks:
            tensors += [buffer.grad_data for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
            for param in chunk.parameters():
                tensors += [tensor for tensor in (param.main_grad, param.grad) if tensor is not None]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def build(shape: Shape, config: PipelineZeRO2Config | None, *, seed: int = 1, unused: int = 0) -> Training:
    """The chunks of this rank in DDP with the distributed optimizer; with a config, pipeline-zero2 on them.

    Args:
        unused: give each chunk a parameter of so many elements that no forward pass uses.
    """
    parallel_state.destroy_model_parallel()
    virtual = shape.virtual if shape.virtual > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=shape.pipeline, virtual_pipeline_model_parallel_size=virtual
    )
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    data = parallel_state.get_data_parallel_world_size()
    destroy_num_microbatches_calculator()
    batch = MICRO_BATCH * data * shape.micro_batches
    init_num_microbatches_calculator(dist.get_rank(), None, batch, MICRO_BATCH, data)
    model_config = TransformerConfig(
        num_layers=shape.pipeline * shape.virtual,
        hidden_size=shape.hidden,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        pipeline_model_parallel_size=shape.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=shape.pipeline > 1,
        finalize_model_grads_func=finalize_model_grads,
    )
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
    chunks = []
    for stage in range(shape.virtual):
        at = {"ignore_virtual": False, "vp_stage": stage if virtual else None}
        chunk = GPTModel(
            config=model_config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=shape.vocabulary,
            max_sequence_length=shape.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            vp_stage=at["vp_stage"],
        )
        chunk.model_type = "encoder_or_decoder"
        if unused:
            chunk.unused = torch.nn.Parameter(torch.ones(unused))
        chunks.append(_wrap(chunk, model_config, ddp_config))
    optimizer_config = OptimizerConfig(
        lr=1e-3, weight_decay=0.1, clip_grad=1.0, adam_eps=shape.adam_eps, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks)
    return Training(shape, chunks, optimizer, attach(chunks, optimizer, config) if config else None)


def _wrap(chunk: GPTModel, config: TransformerConfig, ddp_config: DistributedDataParallelConfig) -> Any:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    params = [param for param in chunk.parameters() if param.requires_grad]
    layout = DistributedOptimizer.compute_full_param_layout(params, None, group.size(), ddp_config)
    return DistributedDataParallel(config, ddp_config, chunk, full_param_layout=layout)


class Volume:
    """Counts what goes into reduce-scatters, by wrapping the function that Megatron calls."""

    def __init__(self) -> None:
        self.bytes = 0
        self.calls = 0

    def __enter__(self) -> Volume:
        self._original = param_and_grad_buffer.dist_reduce_scatter_func

        def counted(output: torch.Tensor, source: torch.Tensor, **keywords: Any) -> Any:
            self.bytes += source.numel() * source.element_size()
            self.calls += 1
            return self._original(output, source, **keywords)

        param_and_grad_buffer.dist_reduce_scatter_func = counted
        return self

    def __exit__(self, *error: object) -> None:
        param_and_grad_buffer.dist_reduce_scatter_func = self._original


def measure(shape: Shape, config: PipelineZeRO2Config | None, steps: int) -> dict[str, Any]:
    """One row of the table, of this rank."""
    training = build(shape, config)
    times, trajectory = [], []
    with Volume() as volume:
        for number in range(steps + 1):
            dist.barrier()
            start = time.perf_counter()
            losses, norm = training.step(number)
            dist.barrier()
            times.append(time.perf_counter() - start)
            trajectory.append((sum(losses), norm))
    report = training.zero2.report() if training.zero2 else None
    return {
        "device_gradient_bytes": training.gradient_bytes(),
        "host_gradient_bytes": report.host_bytes if report else 0,
        "host_staging_bytes": report.staging_bytes if report else 0,
        "reduce_scatter_bytes": volume.bytes // (steps + 1),
        "reduce_scatters": volume.calls // (steps + 1),
        "step_ms": 1e3 * statistics.median(times[1:]),
        "trajectory": trajectory,
    }


def main() -> None:
    """Start the ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline ranks (P)")
    parser.add_argument("--virtual", type=int, default=4, help="model chunks of a rank (V)")
    parser.add_argument("--data", type=int, default=2, help="data-parallel ranks (D)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a data-parallel rank (M)")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="timed steps; the median is printed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = options.pipeline * options.data
    mp.start_processes(_rank, (options, ranks, port), nprocs=ranks, start_method="fork")


def _rank(rank: int, options: argparse.Namespace, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    shape = Shape(options.pipeline, options.virtual, options.micro_batches, options.hidden)
    variants = {
        "distributed optimizer": None,
        "pipeline-zero2": PipelineZeRO2Config(),
        "pipeline-zero2, step on cpu": PipelineZeRO2Config(zero2_optimizer_device="cpu"),
    }
    rows = {name: measure(shape, config, options.steps) for name, config in variants.items()}
    stock = rows["distributed optimizer"]["trajectory"]
    for row in rows.values():
        pairs = zip(row.pop("trajectory"), stock, strict=True)
        differences = [abs(a - b) / max(abs(b), 1e-12) for mine, his in pairs for a, b in zip(mine, his, strict=True)]
        row["largest_relative_difference"] = max(differences)
    if rank == 0 and options.json:
        print(json.dumps({"shape": asdict(shape), "data": options.data, "rows": rows}, indent=2))
    elif rank == 0:
        print(f"P {options.pipeline}, V {options.virtual}, D {options.data}, M {options.micro_batches}; rank 0, MiB")
        sizes = ("device_gradient_bytes", "host_gradient_bytes", "host_staging_bytes", "reduce_scatter_bytes")
        heads = " ".join(f"{word:>8}" for word in ("device", "host", "staging", "reduced"))
        print(f"{'':<28} {heads} {'calls':>6} {'step ms':>8} {'rel.diff':>9}")
        for name, row in rows.items():
            cells = " ".join(f"{row[size] / 2**20:>8.2f}" for size in sizes)
            difference = row["largest_relative_difference"]
            print(f"{name:<28} {cells} {row['reduce_scatters']:>6} {row['step_ms']:>8.1f} {difference:>9.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
