"""What orthogonalisation costs on sharded momentum: elements received, balance of the work, step time, extra memory.

    python benchmarks/muon_p2p.py [--ranks 4] [--steps 5] [--hidden 512] [--json]

First part, counted on Megatron's own bucket layouts for D data-parallel ranks: the elements that a rank receives in a
step beyond AdamW's reduce-scatter and all-gather (mean and most), and how uneven the Newton-Schulz work is: the busiest
rank over the mean, and the least that this can be for any choice of owners among the holders, because of the largest
matrix and of the matrices that lie whole on one rank. "all-gather" collects the whole buffer on every rank;
"layer-wise" is Megatron's layout in which no parameter crosses a shard: nothing travels for Newton-Schulz, but every
collective carries the padding that this takes, and optimizer states are as uneven as the work. Second part, timed on
gloo ranks that share this machine's cores and exchange through memory: it shows what a step does, not how fast a
cluster would be.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from k3_plugins import platform

platform.select("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.training.training import wrap_model_chunks_with_ddp  # noqa: E402

from k3_plugins.models.kimi_k3.layer_specs import block_spec  # noqa: E402
from k3_plugins.optimizer.per_head_muon.megatron_optimizer import build  # noqa: E402
from k3_plugins.optimizer.per_head_muon.planner import Place, assign, even_bounds, least_busiest, view  # noqa: E402
from k3_plugins.optimizer.per_head_muon.settings import MOONLIGHT, MuonSettings  # noqa: E402
from k3_plugins.optimizer.per_head_muon.splits import Split, matrices, whole  # noqa: E402
from tests.distributed.optimizer.per_head_muon.allocations import Allocations  # noqa: E402

Weights = list[tuple[str, tuple[int, ...], Split | None]]
MILLION = 1e6


def dense_8b(layers: int = 4) -> Weights:
    """Layers of an 8B model: 32 query heads, 8 groups, feed-forward width 14336."""
    weights: Weights = []
    for i in range(layers):
        group = ((("q", 128),) * 4) + (("k", 128), ("v", 128))
        weights += [
            (f"{i}.norm1", (4096,), None),
            (f"{i}.qkv", (6144, 4096), Split(group, 8, "head")),
            (f"{i}.proj", (4096, 4096), whole(4096)),
            (f"{i}.norm2", (4096,), None),
            (f"{i}.fc1", (28672, 4096), Split((("gate", 14336), ("up", 14336)), order="local")),
            (f"{i}.fc2", (4096, 14336), whole(4096)),
        ]
    return weights


def k3_chunk() -> Weights:
    """Three KDA layers and one of gated MLA at K3's sizes; the routed experts have buffers of their own."""
    d, heads, width, latent = 7168, 96, 128, 3584
    weights: Weights = []

    def add(name: str, rows: int, columns: int, split: Split | None) -> None:
        weights.append((name, (rows, columns), split))

    for i in range(4):
        if i < 3:
            for name in ("q", "k", "v", "gate"):
                add(f"{i}.{name}", heads * width, d, Split(((name, width),), heads, "head"))
            add(f"{i}.decay_down", width, d, whole(width))
            add(f"{i}.decay_up", heads * width, width, Split((("decay", width),), heads, "head"))
            add(f"{i}.beta", heads, d, whole(heads))
            for name in ("q_conv", "k_conv", "v_conv"):
                add(f"{i}.{name}", heads * width, 4, None)
        else:
            add(f"{i}.q_down", 1536, d, whole(1536))
            add(f"{i}.q_up", heads * 192, 1536, Split((("q", 192),), heads, "head"))
            add(f"{i}.kv_down", 576, d, Split((("kv", 512), ("k shared", 64))))
            add(f"{i}.kv_up", heads * 256, 512, Split((("k", 128), ("v", 128)), heads, "head"))
            add(f"{i}.gate", heads * width, d, Split((("gate", width),), heads, "head"))
        add(f"{i}.proj", d, heads * width, whole(d))
        add(f"{i}.router", 896, d, whole(896))
        add(f"{i}.down", latent, d, whole(latent))
        add(f"{i}.up", d, latent, whole(d))
        add(f"{i}.shared1", 2 * 6144, d, Split((("gate", 6144), ("up", 6144)), order="local"))
        add(f"{i}.shared2", d, 6144, whole(d))
    return weights


def plans(weights: Weights, ranks: int, bucket: int | None, heads: bool, rule: str) -> dict[str, Any]:
    """One row of the first part."""
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for _, shape, _ in weights]
    layout = DistributedOptimizer._compute_per_buffer_param_layout(
        params, bucket, ranks, DistributedDataParallelConfig(use_distributed_optimizer=True)
    )
    found, bounds = [], {}
    for param, (name, shape, split) in zip(params, weights, strict=True):
        if split is not None:
            start, stop, number = layout.param_index_map[param]
            bounds[name] = even_bounds(start, stop, *layout.bucket_indices[number], ranks)
            found += matrices(name, split if heads else split.without_heads(), shape, None, 1)[0]
    assignments = assign([found], [bounds], ranks, rule)
    received, costs = [], []
    for rank in range(ranks):
        plan = view(assignments, Place(0, rank))
        received.append(plan.elements_received)
        costs.append(sum(a.matrix.cost for a in (*plan.local, *plan.owned)))
    mean = sum(costs) / ranks
    return {
        "mean_received": sum(received) / ranks,
        "most_received": max(received),
        "cut": sum(not a.local for a in assignments),
        "busiest": max(costs) / mean,
        "least": max(1.0, least_busiest(assignments) / mean),
    }


def layer_wise(weights: Weights, ranks: int) -> dict[str, Any]:
    """One row: what every rank receives is the padding in the two collectives."""
    named = [(name, shape, split) for name, shape, split in weights if split is not None]
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for _, shape, _ in named]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    layout = LayerWiseDistributedOptimizer._compute_per_buffer_param_layout(params, None, ranks, config)
    ((low, high),) = layout.bucket_indices
    shard, costs = (high - low) // ranks, [0] * ranks
    for param, (name, shape, split) in zip(params, named, strict=True):
        start, _, _ = layout.param_index_map[param]
        # Megatron's Muon splits query, key and value only, and takes them whole.
        costs[(start - low) // shard] += sum(m.cost for m in matrices(name, split.without_heads(), shape, None, 1)[0])
    padding = high - low - sum(param.numel() for param in params)
    received = 2 * padding * (ranks - 1) / ranks
    return {"mean_received": received, "most_received": received, "cut": 0, "busiest": max(costs) * ranks / sum(costs)}


def count(table: bool = True) -> list[dict[str, Any]]:
    """The first part: one row for every model, number of ranks and method, printed as it is counted."""
    rows = []
    for title, weights in (("4 layers of a dense 8B model", dense_8b()), ("4 layers of K3", k3_chunk())):
        total = sum(torch.Size(shape).numel() for _, shape, _ in weights)
        if table:
            print(f"\n{title}: {total / MILLION:.0f} M elements. Received per rank and step, in M elements:")
            print(f"{'D':>4} {'method':<42} {'mean':>8} {'most':>8} {'cut':>5} {'busiest/mean':>13} {'least':>6}")
        for ranks in (8, 32, 128):
            for method, found in _methods(weights, total, ranks):
                rows.append({"model": title, "elements": total, "ranks": ranks, "method": method, **found})
                if table:
                    print(_line(rows[-1]), flush=True)
    return rows


def _methods(weights: Weights, total: int, ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    everything = total * (ranks - 1) / ranks
    yield "all-gather of the buffer", {"mean_received": everything, "most_received": everything}
    for label, bucket, heads, rule in (
        ("peer to peer, per head, balanced", None, True, "balanced"),
        ("peer to peer, per head, largest piece", None, True, "largest-piece"),
        ("peer to peer, whole matrices, balanced", None, False, "balanced"),
        ("peer to peer, whole, largest piece", None, False, "largest-piece"),
        ("peer to peer, per head, 40 M buckets", 40_000_000, True, "balanced"),
        ("the same, largest piece", 40_000_000, True, "largest-piece"),
    ):
        yield label, plans(weights, ranks, bucket, heads, rule)
    yield "layer-wise, padding of both collectives", layer_wise(weights, ranks)


def _line(row: dict[str, Any]) -> str:
    numbers = f"{row['mean_received'] / MILLION:>8.2f} {row['most_received'] / MILLION:>8.2f}"
    if "busiest" in row:
        numbers += f" {row['cut']:>5} {row['busiest']:>13.2f}"
    if "least" in row:
        numbers += f" {row['least']:>6.2f}"
    return f"{row['ranks']:>4} {row['method']:<42} {numbers}"


def main() -> None:
    """Count, then start the ranks and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="gloo ranks of the timed part; 0 leaves it out")
    parser.add_argument("--steps", type=int, default=5, help="timed steps; the median is printed")
    parser.add_argument("--hidden", type=int, default=512, help="width of the timed model of 4 layers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    args = parser.parse_args()
    counted, timed = count(table=not args.json), []
    if args.ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        rows = mp.get_context("fork").SimpleQueue()
        mp.start_processes(_rank, (args, port, rows), nprocs=args.ranks, start_method="fork")
        timed = rows.get()
    if args.json:
        print(json.dumps({"options": vars(args), "counted": counted, "timed": timed}, indent=2))


def _rank(rank: int, args: SimpleNamespace, port: int, rows: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    if rank == 0 and not args.json:
        print(f"\n{args.ranks} gloo ranks, 4 layers, hidden {args.hidden}: optimizer step of the slowest rank")
        print(f"{'optimizer':<24} {'ms':>8} {'received M':>11} {'extra MB':>9} {'largest MB':>11} {'states MB':>10}")
    found = []
    for name in ("adamw", "per-head-muon", "per-head-muon, 1 a batch", "layer-wise muon"):
        row = _measure(args, name)
        numbers = torch.tensor(list(row.values()), dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        found.append({"optimizer": name, **dict(zip(row, numbers.tolist(), strict=True))})
        if rank == 0 and not args.json:
            ms, *counts = numbers.tolist()
            received, peak, largest, states = (value / MILLION for value in counts)
            print(f"{name:<24} {ms:>8.1f} {received:>11.3f} {peak:>9.2f} {largest:>11.2f} {states:>10.2f}", flush=True)
    if rank == 0:
        rows.put(found)
    dist.destroy_process_group()


def _measure(args: SimpleNamespace, name: str) -> dict[str, float]:
    """One row of the second part, of this rank; memory is what the step allocates beyond what was there before."""
    layer_wise_muon = name == "layer-wise muon"
    chunk = _chunk(args, layer_wise_muon)
    config = OptimizerConfig(
        optimizer="muon" if layer_wise_muon else "adam",
        lr=1e-3,
        weight_decay=0.1,
        clip_grad=0.0,
        use_distributed_optimizer=not layer_wise_muon,
        use_layer_wise_distributed_optimizer=layer_wise_muon,
        bf16=True,  # Megatron's layer-wise optimizer has no fp32 form
        params_dtype=torch.bfloat16,
        **{**MOONLIGHT, "muon_fp32_matmul_prec": "high"},
    )
    if name.startswith("per-head"):
        limit = 1 if name.endswith("batch") else 2**26
        optimizer = _per_head(config, chunk, MuonSettings(batch_elements=limit, matmul_precision="high"))
    else:
        optimizer = get_megatron_optimizer(config, [chunk])
    times, meter = [], Allocations()
    for step in range(args.steps + 2):
        for param in chunk.module.parameters():
            param.main_grad.normal_(generator=torch.Generator().manual_seed(step))
        dist.barrier()
        start = time.perf_counter()
        if step == args.steps + 1:  # not timed: counting costs more than the step
            with meter:
                optimizer.step()
        else:
            optimizer.step()
        if 0 < step <= args.steps:
            times.append(1e3 * (time.perf_counter() - start))
        chunk.zero_grad_buffer()
    received, states = 0.0, 0
    for part in optimizer.chained_optimizers:
        for inner in getattr(part, "chained_optimizers", [part]):
            inner = inner.optimizer
            states += sum(t.nbytes for s in inner.state.values() for t in s.values() if isinstance(t, torch.Tensor))
            if hasattr(inner, "exchange"):
                received += inner.exchange.elements_received / inner.steps
    return {
        "step_ms": statistics.median(times),
        "elements_received": received,
        "peak_extra_bytes": meter.peak,
        "largest_extra_bytes": meter.largest,
        "state_bytes": states,
    }


def _per_head(config: OptimizerConfig, chunk: Any, settings: MuonSettings) -> Any:
    """Megatron's factory with the feature's function in the place that the feature patches."""
    import megatron.core.optimizer as module

    original = module._get_megatron_optimizer_based_on_param_groups
    module._get_megatron_optimizer_based_on_param_groups = lambda *a, **k: build(original, settings, *a, **k)
    try:
        return get_megatron_optimizer(config, [chunk])
    finally:
        module._get_megatron_optimizer_based_on_param_groups = original


def _chunk(args: SimpleNamespace, layer_wise_muon: bool) -> Any:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=args.hidden,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=3 * args.hidden,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        bias_activation_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, None, kda=None, mla=None),
        vocab_size=1000,
        max_sequence_length=8,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=not layer_wise_muon)
    (chunk,) = wrap_model_chunks_with_ddp(
        [Float16Module(config, model)],
        config,
        ddp,
        use_layer_wise_distributed_optimizer=layer_wise_muon,
        bucket_sizes=[None],
    )
    return chunk


if __name__ == "__main__":
    main()
