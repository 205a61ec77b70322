"""Speed and memory of KDA on this machine's CPU: our `torch` backend beside what others ship.

    python benchmarks/kda.py [--json] [--out FILE] [--lengths 1024,4096,16384] [--threads 2] [--only NAME,...]

Same inputs, same process, fp32, B = 1, H = 8, K = V = 128 by default, with the gate of K3 (bounded by -5). Peers: fla's
`naive_chunk_kda` and `naive_recurrent_kda`, and the PyTorch path of transformers' Kimi-Linear model, up to T = 4096
(they need several GB there; one that would not fit into free memory or --peer-gb is left out, with the reason).

`fwd` runs without autograd, `fwd+bwd` gives the gradients of q, k, v, g and beta. Time: the best of the runs that fit
into --patience seconds (at least one), wall clock. Memory: the peak resident size that the kernel recorded during the
first run (VmHWM, reset before it) minus the resident size before it, freed heap given back to the system first. It
counts outputs, gradients, saved tensors and temporaries, not the inputs. The operators' results are compared first.
"""

import argparse
import ctypes
import gc
import inspect
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import machine as report_machine
from k3_plugins.transformer.kda.ops import kda

PEER_LENGTH = 4096
# Bytes per token and value-head element (K * V * HV) that a peer keeps for its backward, from measured peaks.
PEER_BYTES = {"fla_naive_chunk": 12, "fla_naive_recurrent": 21, "transformers_torch": 17}

Operator = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass
class Measurement:
    """One operator at one length."""

    name: str
    length: int
    mode: str
    seconds: float
    cpu_seconds: float
    """of all threads; what a busy machine distorts least, with --threads 1 (waiting threads spin)"""
    tokens_per_second: float
    peak_extra_bytes: int
    runs: int


def make_inputs(length: int, heads: int, width: int) -> list[Tensor]:
    """q, k (normalised), v, g, beta as a K3 layer would hand them over."""
    generator = torch.Generator().manual_seed(length)
    q, k, v, z = (torch.randn(1, length, heads, width, generator=generator) for _ in range(4))
    beta = torch.rand(1, length, heads, generator=generator)
    g = -5 * torch.sigmoid(2 * z - 4)
    return [x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta)]


def operators() -> tuple[dict[str, Operator], dict[str, str]]:
    """Ours and the peers that can be imported; the reason for each that cannot."""
    found: dict[str, Operator] = {"ours_torch": lambda *x: kda(*x, backend="torch")[0]}
    missing: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla says that there is no GPU
        try:
            from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda

            found["fla_naive_chunk"] = lambda *x: naive_chunk_kda(*x)[0]
            found["fla_naive_recurrent"] = lambda *x: naive_recurrent_kda(*x)[0]
        except ImportError as error:
            missing["fla_naive_chunk"] = missing["fla_naive_recurrent"] = f"{error} (pip install fla-core)"
        try:
            from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

            # Their decorator replaces it by fla's GPU kernel where fla is installed.
            plain = inspect.unwrap(chunk_kimi_delta_attention)
            found["transformers_torch"] = lambda *x: plain(*x)[0]
        except ImportError as error:
            missing["transformers_torch"] = f"{error} (pip install transformers, with Kimi-Linear)"
    return found, missing


def disagreement(found: dict[str, Operator], heads: int, width: int) -> dict[str, float]:
    """Largest difference of every peer's output from ours, over our largest, at T = 192."""
    inputs = make_inputs(192, heads, width)
    with torch.no_grad():
        outputs = {name: operator(*inputs) for name, operator in found.items()}
    ours = outputs.pop("ours_torch")
    return {name: ((o - ours).abs().max() / ours.abs().max()).item() for name, o in outputs.items()}


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def free_bytes() -> int:
    """Memory that a new allocation can use without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise KeyError("MemAvailable")


def peak_extra(run: Callable[[], object]) -> int:
    """Peak resident bytes during `run` over those before it."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present size
    before = _status("VmRSS")
    result = run()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def measure(name: str, operator: Operator, inputs: list[Tensor], mode: str, patience: float) -> Measurement:
    """Run once for the memory, then for the time until `patience` seconds are spent."""
    weights = torch.ones_like(inputs[2])

    def run() -> object:
        if mode == "fwd":
            with torch.no_grad():
                return operator(*inputs)
        return torch.autograd.grad(operator(*inputs), inputs, weights)

    peak = 0
    times: list[float] = []
    cpu_times: list[float] = []
    while not times or (sum(times) < patience and len(times) < 20):
        start, cpu_start = time.perf_counter(), time.process_time()
        if times:
            run()
        else:
            peak = peak_extra(run)
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu_start)
    length = inputs[0].shape[1]
    return Measurement(name, length, mode, min(times), min(cpu_times), length / min(times), peak, len(times))


def machine() -> dict[str, object]:
    """What the numbers belong to."""
    threads = {"threads": torch.get_num_threads(), "load_at_start": os.getloadavg()[0]}
    return {**report_machine.machine(), **threads, **report_machine.versions()}


def ratios(results: list[Measurement]) -> dict[str, float]:
    """Our tokens per second over each peer's, and how time grows with the length."""
    by_key = {(r.name, r.length, r.mode): r for r in results}
    out = {}
    for (name, length, mode), peer in by_key.items():
        ours = by_key.get(("ours_torch", length, mode))
        if name != "ours_torch" and ours:
            out[f"ours / {name}, T={length}, {mode}"] = peer.seconds / ours.seconds
            out[f"ours / {name}, T={length}, {mode}, CPU time"] = peer.cpu_seconds / ours.cpu_seconds
    seconds = {r.length: r.seconds for r in results if r.name == "ours_torch" and r.mode == "fwd+bwd"}
    if 4096 in seconds and 16384 in seconds:
        out["ours, time(16384) / time(4096), fwd+bwd"] = seconds[16384] / seconds[4096]
    return out


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """All measurements, as the object that --json prints."""
    torch.set_num_threads(arguments.threads)
    found, missing = operators()
    skipped = [{"name": name, "reason": reason} for name, reason in missing.items()]
    results: list[Measurement] = []
    description = machine()
    differences = disagreement(found, arguments.heads, arguments.width)
    for length in arguments.lengths:
        inputs = make_inputs(length, arguments.heads, arguments.width)
        for name, operator in found.items():
            if arguments.only and name not in arguments.only:
                continue
            if name in PEER_BYTES:
                need = PEER_BYTES[name] * length * arguments.heads * arguments.width**2 / 1e9
                room = min(arguments.peer_gb, free_bytes() / 1e9 - 1)
                if length > PEER_LENGTH:
                    skipped.append({"name": name, "length": length, "reason": f"peers run up to T = {PEER_LENGTH}"})
                    continue
                if need > room:
                    reason = f"needs about {need:.1f} GB, {room:.1f} GB allowed"
                    skipped.append({"name": name, "length": length, "reason": reason})
                    continue
            for mode in ("fwd", "fwd+bwd"):
                result = measure(name, operator, inputs, mode, arguments.patience)
                results.append(result)
                if not arguments.json:
                    line = f"T={length:<6} {name:<20} {mode:<8} {result.tokens_per_second:>10.0f} tokens/s"
                    line += f" {result.seconds:>9.3f} s {result.peak_extra_bytes / 1e6:>9.1f} MB extra"
                    print(line, f"({result.runs} runs)", flush=True)
    return {
        "sizes": {"batch": 1, "heads": arguments.heads, "K": arguments.width, "V": arguments.width, "dtype": "fp32"},
        "machine": description,
        "relative_difference_of_outputs": differences,
        "memory": "VmHWM reset before the run, minus VmRSS before it",
        "results": [asdict(r) for r in results],
        "ratios": ratios(results),
        "skipped": skipped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--lengths", type=lambda s: [int(x) for x in s.split(",")], default=[1024, 4096, 16384])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128, help="K = V")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--patience", type=float, default=5.0, help="seconds to repeat each measurement for")
    parser.add_argument("--peer-gb", type=float, default=9.0, help="leave out a peer that would need more memory")
    parser.add_argument("--only", type=lambda s: s.split(","), help="measure these names alone")
    arguments = parser.parse_args()
    if not Path("/proc/self/clear_refs").exists():
        parser.error("the memory measurement needs Linux's /proc")
    report = run(arguments)
    text = json.dumps(report, indent=2)
    if arguments.out:
        temporary = arguments.out.with_name(arguments.out.name + ".tmp")
        temporary.write_text(text + "\n")
        os.replace(temporary, arguments.out)
    if arguments.json:
        print(text)
        return
    print()
    for name, value in report["ratios"].items():
        print(f"{name:<70} {value:>8.1f}x")
    for entry in report["skipped"]:
        at = f" at T={entry['length']}" if "length" in entry else ""
        print(f"not measured: {entry['name']}{at}: {entry['reason']}")


if __name__ == "__main__":
    main()
