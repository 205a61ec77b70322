"""Device bytes of saved activations and step time: the activation manager's policies against none and Megatron's full
recomputation.

    python benchmarks/activation_memory.py [--layers 12 24] [--hidden 128] [--sequence 128] [--steps 5] [--json]

One process trains the same small GPT from the same weights under every policy, one after the other. Bytes are counted
storages (each once, what the backward pass computes again included; host buffers are not device memory, although both
are this machine's memory), so they depend on shapes only. "blocked" is the time that the backward pass waited for bytes
from the host. Times on a CPU say what hooks, copies, the codec and recomputation cost there, nothing about overlap on
GPUs. The relative error is that of the whole gradient of the first step against no policy.
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
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from k3_plugins.memory.activation_manager.config import ActivationManagerConfig  # noqa: E402
from k3_plugins.memory.activation_manager.training import attach  # noqa: E402

MIB = 1 << 20
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
VARIANTS: tuple[tuple[str, str | None, bool], ...] = (
    ("no policy", None, False),
    ("Megatron full recompute", None, True),
    ("keep", "*=keep", False),
    ("recompute", "attention=recompute, mlp=recompute, *_norm=recompute", False),
    ("fp8", "*=fp8", False),
    ("cpu", "*=cpu", False),
    ("fp8+cpu", "*=fp8+cpu", False),
    ("mlp=recompute, *=fp8+cpu", "*=fp8+cpu, mlp=recompute", False),
    ("full recompute, decoder=cpu", "decoder=cpu", True),
)
"""(name, rules, Megatron's full recomputation)"""


@dataclass(frozen=True)
class Shape:
    """A model and a micro-batch."""

    hidden: int
    sequence: int
    micro_batch: int = 2
    vocabulary: int = 64


def build(shape: Shape, layers: int, full_recompute: bool) -> GPTModel:
    """The same weights every time."""
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=shape.hidden,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **(FULL if full_recompute else {}),
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.sequence,
    )


def step(model: GPTModel, shape: Shape, number: int) -> float:
    """Forward and backward of one micro-batch; returns the seconds."""
    size = (shape.micro_batch, shape.sequence + 1)
    tokens = torch.randint(shape.vocabulary, size, generator=torch.Generator().manual_seed(number))
    positions = torch.arange(shape.sequence).expand(shape.micro_batch, -1)
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
    return time.perf_counter() - start


def measure(
    shape: Shape, layers: int, rules: str | None, full: bool, steps: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """One row of the table, and the gradient of the first step."""
    model = build(shape, layers, full)
    manager = None
    if rules is not None:
        manager, _ = attach([model], ActivationManagerConfig(activation_policy=rules))
    times, gradient = [], torch.empty(0)
    for number in range(steps + 1):
        times.append(step(model, shape, number))
        if number == 0:
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()
            if manager is not None:
                manager.blocked.seconds, manager.blocked.waits = 0.0, 0
    blocked = manager.blocked.seconds if manager is not None else 0.0
    if manager is None:  # timed without hooks; the bytes are counted in one more step
        manager, _ = attach([model], ActivationManagerConfig(activation_policy="decoder=keep" if full else "*=keep"))
        step(model, shape, 0)
    row = {
        "device_peak_bytes": manager.ledger.peak,
        "host_peak_bytes": manager.pool.peak,
        "step_ms": 1e3 * statistics.median(times[1:]),
        "blocked_ms": 1e3 * blocked / steps,
        "passes": manager.passes,
    }
    return row, gradient


def table(shape: Shape, layers: int, steps: int) -> dict[str, dict[str, Any]]:
    """All rows for one depth."""
    rows: dict[str, dict[str, Any]] = {}
    plain = torch.empty(0)
    for name, rules, full in VARIANTS:
        row, gradient = measure(shape, layers, rules, full, steps)
        plain = gradient if rules is None and not full else plain
        first = rows.get("no policy", row)
        row["of_no_policy"] = row["device_peak_bytes"] / first["device_peak_bytes"]
        row["relative_error"] = ((gradient - plain).norm() / plain.norm()).item()
        rows[name] = row
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="timed steps; the median is printed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    shape = Shape(options.hidden, options.sequence)
    tables = {layers: table(shape, layers, options.steps) for layers in options.layers}
    if options.json:
        print(json.dumps({"shape": asdict(shape), "layers": tables}, indent=2))
    else:
        for layers, rows in tables.items():
            print(f"{layers} layers, hidden {shape.hidden}, {shape.micro_batch} x {shape.sequence} tokens, fp32")
            heads = " ".join(f"{head:>8}" for head in ("of none", "host MiB", "step ms", "blocked", "rel.err"))
            print(f"{'':<30} {'device MiB':>10} {heads}")
            for name, row in rows.items():
                print(
                    f"{name:<30} {row['device_peak_bytes'] / MIB:>10.2f} {row['of_no_policy']:>8.1%} "
                    f"{row['host_peak_bytes'] / MIB:>8.2f} {row['step_ms']:>8.1f} {row['blocked_ms']:>8.2f} "
                    f"{row['relative_error']:>8.1e}"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
