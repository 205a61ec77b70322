"""Step time and slowest rank of a mixture-of-experts layer: MoonEP against Megatron's dispatchers, on CPU with gloo.

    python benchmarks/moonep.py [--ranks 4] [--tokens 512] [--steps 5] [--json]

For each routing that the router itself produces: rows of the busiest rank (against a rank's own S*K), the makespan of
the expert computation (CPU time of the slowest rank, forward), the time of a forward and backward pass by the clock and
in CPU time (slowest rank), redundant experts, and the bytes that the layer keeps for its backward pass on the rank that
keeps most. "moonep-keep" is MoonEP without --moe-moonep-memory-efficient. The processes share this machine's cores and
exchange through memory: the numbers show who waits for whom, not how fast a cluster would be; on a machine that is busy
with other things only rows, bytes and CPU times mean something. MoonEP sends rows twice and moves 2 m experts' weights
per rank in each pass; on balanced loads that is pure cost, and the last lines say how much it was.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from k3_plugins import platform

platform.select("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig  # noqa: E402
from k3_plugins.transformer.moe.latent_moe.layer import LatentMoELayer  # noqa: E402
from k3_plugins.transformer.moe.latent_moe.spec import moe_module_spec  # noqa: E402
from k3_plugins.transformer.moe.moonep.config import MoonEPConfig  # noqa: E402
from k3_plugins.transformer.moe.moonep.spec import layer_options  # noqa: E402
from k3_plugins.transformer.moe.ops import grouped_mlp  # noqa: E402

DISPATCHERS = ("alltoall", "allgather", "moonep", "moonep-keep")
ROUTINGS = ("balanced", "zipf", "single_hot", "tight")
"""single_hot: every token's experts on one rank. tight: that rank's experts get nothing, which needs most slots."""
HIDDEN, LATENT, FFN, EXPERTS, TOPK = 256, 128, 256, 32, 4


def main() -> None:
    """Start the ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="expert-parallel ranks")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per rank (S)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps; the median is printed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    for name in ("tokens", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if args.ranks < 2 or EXPERTS % args.ranks:
        parser.error(f"--ranks {args.ranks} must be at least 2 and divide the {EXPERTS} experts")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(_rank, (args, port), nprocs=args.ranks, start_method="fork")


def _rank(rank: int, args: SimpleNamespace, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=args.ranks, expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(1)
    talks = rank == 0 and not args.json
    if talks:
        own = args.tokens * TOPK
        print(f"{args.ranks} ranks, {args.tokens} tokens each, top {TOPK} of {EXPERTS}: S*K = {own} rows per rank")
        heads = f"{'busiest rank':>12} {'experts ms':>10} {'step ms':>8} {'CPU ms':>7} {'slots':>5} {'kept KiB':>8}"
        print(f"{'routing':<12} {'dispatcher':<11} {heads}")
    rows = {}
    for routing in ROUTINGS:
        for dispatcher in DISPATCHERS:
            row = rows[routing, dispatcher] = _measure(args, routing, dispatcher)
            if talks:
                spent = f"{row['experts_ms']:>10.1f} {row['step_ms']:>8.1f} {row['cpu_ms']:>7.1f}"
                counts = f"{row['slots']:>5} {row['kept_bytes'] / 1024:>8.0f}"
                print(f"{routing:<12} {dispatcher:<11} {row['rows_of_busiest_rank']:>12} {spent} {counts}", flush=True)
    ratios = {
        routing: {key: rows[routing, "moonep"][key] / rows[routing, "alltoall"][key] for key in ("step_ms", "cpu_ms")}
        for routing in ROUTINGS
    }
    if talks:
        for routing, ratio in ratios.items():
            clock, cpu = ratio["step_ms"], ratio["cpu_ms"]
            print(f"{routing}: MoonEP takes {clock:.2f} times as long as alltoall here, {cpu:.2f} times the CPU time")
    if rank == 0 and args.json:
        listing = [{"routing": r, "dispatcher": d, **row} for (r, d), row in rows.items()]
        report = {"options": vars(args), "rows_per_rank": args.tokens * TOPK, "rows": listing}
        print(json.dumps({**report, "moonep_over_alltoall": ratios}, indent=2))
    dist.barrier()
    dist.destroy_process_group()


def _measure(args: SimpleNamespace, routing: str, dispatcher: str) -> dict[str, Any]:
    """One row of the table, of the rank that has most."""
    layer = _layer(args, routing, dispatcher)
    meter = _Meter()
    torch.manual_seed(100 + dist.get_rank())
    x = torch.randn(args.tokens, 1, HIDDEN)
    x[..., 0] = 1.0
    times, cpu_times, spans = [], [], []
    for _ in range(args.steps + 1):
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        with meter:
            output, _ = layer(x.clone().requires_grad_())
        output.sum().backward()
        cpu_times.append(time.process_time() - cpu_start)
        dist.barrier()
        times.append(time.perf_counter() - start)
        spans.append(meter.seconds)
    medians = [statistics.median(values[1:]) for values in (spans, times, cpu_times)]
    worst = torch.tensor([float(meter.rows), *medians, float(_kept(layer, x))], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    slots = int(layer.report.slots_anywhere) if dispatcher.startswith("moonep") else 0
    rows, experts, step, cpu, kept = worst.tolist()
    return {
        "rows_of_busiest_rank": int(rows),
        "experts_ms": 1e3 * experts,
        "step_ms": 1e3 * step,
        "cpu_ms": 1e3 * cpu,
        "slots": slots,
        "kept_bytes": int(kept),
    }


def _kept(layer: LatentMoELayer, x: torch.Tensor) -> int:
    """Bytes of the storages that autograd keeps from one forward pass, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output, _ = layer(x.clone().requires_grad_())
    output.sum().backward()
    return sum(storage.nbytes() for storage in storages.values())


def _layer(args: SimpleNamespace, routing: str, dispatcher: str) -> LatentMoELayer:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_ffn_hidden_size=FFN,
        moe_latent_size=LATENT,
        moe_shared_expert_intermediate_size=FFN,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="allgather" if dispatcher == "allgather" else "alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        transformer_impl="local",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        expert_model_parallel_size=args.ranks,
        expert_tensor_parallel_size=1,
    )
    options = {}
    if dispatcher.startswith("moonep"):
        options = layer_options(LatentMoELayer, MoonEPConfig(moe_moonep_memory_efficient=dispatcher == "moonep"))
    torch.manual_seed(0)
    layer = moe_module_spec(config, LatentMoEConfig(), **options)(config=config, layer_number=1)
    layer.set_layer_number(1)
    e = torch.arange(EXPERTS, dtype=torch.float32)
    # The first channel of every token is 1: its router column is an offset per expert.
    offsets = {
        "balanced": 0 * e,
        "zipf": 2.5 - 1.2 * torch.log1p(e),
        "single_hot": torch.where(e < TOPK, 6.0, 0.0),
        "tight": torch.where(e < EXPERTS // args.ranks, -8.0, 0.0),
    }
    layer.router.weight.data[:, 0] = offsets[routing]
    return layer.train()


class _Meter:
    """Rows and CPU seconds of the expert network in the forward pass, in whichever module calls it."""

    rows = 0
    seconds = 0.0

    def __enter__(self) -> None:
        self.original = grouped_mlp.forward

        def timed(x: torch.Tensor, probs: torch.Tensor, w1: torch.Tensor, *rest: object) -> object:
            start = time.thread_time()
            result = self.original(x, probs, w1, *rest)
            self.seconds = time.thread_time() - start
            self.rows = int(rest[1][-1])
            return result

        grouped_mlp.forward = timed

    def __exit__(self, *error: object) -> None:
        grouped_mlp.forward = self.original


if __name__ == "__main__":
    main()
