"""Every claim and the script that measures it.

A claim compares ours with a peer's (or with a bound, or with ourselves without the feature, as its sentence says); less
is better in every one. Arguments of a quick form measure the same claims on less: `{json}` in them stands for a file.
Numbers are in base units: bytes, seconds, rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.report.readers import (
    Reading,
    activations,
    attnres_bytes,
    attnres_quality,
    attnres_rows,
    balance,
    bubble,
    bubble_executed,
    kda,
    kda_growth,
    moonep,
    moonep_slots,
    muon_counted,
    muon_timed,
    qat,
    zero2,
    zero2_host,
)

Kind = Literal["count", "memory", "loss", "CPU time", "time"]
EQUAL: dict[Kind, float] = {"count": 1e-6, "memory": 0.05, "loss": 0.02, "CPU time": 0.05, "time": 0.1}
"""The relative difference up to which a line of each kind says "equal"."""


@dataclass(frozen=True)
class Claim:
    """One line of the page."""

    id: str
    """The anchor."""
    what: str
    """What is compared, ours first; `{word}` comes from the reading."""
    kind: Kind
    unit: str
    read: Callable[[Any], Reading]
    full_only: bool = False
    """Not measured by the quick form."""


@dataclass(frozen=True)
class Form:
    """How a script is run."""

    arguments: str
    limit: float
    """Seconds."""


@dataclass(frozen=True)
class Benchmark:
    """A script and what is read from it."""

    name: str
    script: str
    title: str
    quick: Form
    full: Form
    claims: tuple[Claim, ...]
    parts: tuple[str, ...] = ()
    """Other files of benchmarks/ that serve this script only."""

    @property
    def forms(self) -> dict[str, Form]:
        """By name."""
        return {"quick": self.quick, "full": self.full}


MS = 1e-3
DENSE, K3 = "4 layers of a dense 8B model", "4 layers of K3"
ALL_GATHER, LAYER_WISE = "all-gather of the buffer", "layer-wise, padding of both collectives"
NONE, FULL = "no policy", "Megatron full recompute"
AT_T = "B 1, H {H}, K = V = {K}, T {T}, fp32"
BEST = "best of {n} runs against best of {m}"

KDA = Benchmark(
    "kda",
    "kda.py",
    "Kimi Delta Attention, torch backend",
    Form("--json --lengths 512,1024 --threads 1 --patience 4", 600),
    Form("--json --lengths 1024,4096,16384 --threads 1 --patience 5", 3600),
    (
        Claim(
            "kda-time-fla-chunk",
            f"forward and backward against fla's naive_chunk_kda, {AT_T}; {BEST}",
            "CPU time",
            "s",
            kda("fla_naive_chunk", "fwd+bwd", "cpu_seconds"),
        ),
        Claim(
            "kda-time-fla-recurrent",
            f"forward and backward against fla's naive_recurrent_kda, {AT_T}; {BEST}",
            "CPU time",
            "s",
            kda("fla_naive_recurrent", "fwd+bwd", "cpu_seconds"),
        ),
        Claim(
            "kda-time-transformers",
            f"forward and backward against the PyTorch path of transformers, {AT_T}; {BEST}",
            "CPU time",
            "s",
            kda("transformers_torch", "fwd+bwd", "cpu_seconds"),
        ),
        Claim(
            "kda-forward-transformers",
            f"forward alone against the PyTorch path of transformers, {AT_T}; {BEST}",
            "CPU time",
            "s",
            kda("transformers_torch", "fwd", "cpu_seconds"),
        ),
        Claim(
            "kda-memory-fla-chunk",
            f"peak extra memory of forward and backward against fla's naive_chunk_kda, {AT_T}",
            "memory",
            "bytes",
            kda("fla_naive_chunk", "fwd+bwd", "peak_extra_bytes"),
        ),
        Claim(
            "kda-memory-transformers",
            f"peak extra memory of forward and backward against the PyTorch path of transformers, {AT_T}",
            "memory",
            "bytes",
            kda("transformers_torch", "fwd+bwd", "peak_extra_bytes"),
        ),
        Claim(
            "kda-linear",
            "forward and backward per token at T {long} against our own at T {short}",
            "CPU time",
            "s",
            kda_growth,
        ),
    ),
)

ATTNRES_PIPELINE = Benchmark(
    "attnres-pipeline",
    "attnres_pipeline.py",
    "Pipeline traffic of Block Attention Residuals",
    Form("--json", 120),
    Form("2,4,2 4,2,1 4,4,8 16,4,8 8,4,1 --measure --json", 1800),
    (
        Claim(
            "attnres-traffic",
            "rows sent over all hops with the cache of blocks against without it, P 16, V 4, 8 blocks per chunk",
            "count",
            "rows",
            attnres_rows([16, 4, 8], "off"),
        ),
        Claim(
            "attnres-traffic-small",
            "the same, P 4, V 2, 1 block per chunk",
            "count",
            "rows",
            attnres_rows([4, 2, 1], "off"),
        ),
        Claim(
            "attnres-traffic-received",
            "cache of what was received and produced against the paper's, of what was"
            " received; P 16, V 4, 8 blocks per chunk",
            "count",
            "rows",
            attnres_rows([16, 4, 8], "received"),
        ),
        Claim(
            "attnres-traffic-residual",
            "rows sent with the cache against the plain residual stream, one row per hop,"
            " P 16, V 4, 8 blocks per chunk",
            "count",
            "rows",
            attnres_rows([16, 4, 8], "residual"),
        ),
        Claim(
            "attnres-bytes",
            "bytes that gloo ranks sent in a step, headers included, with the cache against without it,"
            " P {P}, V {V}, {N} blocks per chunk",
            "count",
            "bytes",
            attnres_bytes,
            full_only=True,
        ),
    ),
)

ATTNRES_QUALITY = Benchmark(
    "attnres-quality",
    "attnres_quality.py",
    "Learning with Attention Residuals",
    Form("--json --steps 80 --lrs 2e-3 4e-3 8e-3 1.6e-2", 900),
    Form("--json --seeds 3", 7200),
    (
        Claim(
            "attnres-loss",
            "held-out loss after {steps} steps against the plain residual, {layers} layers, the same"
            " number of parameters, each at its best learning rate{note}",
            "loss",
            "nats per byte",
            attnres_quality("loss"),
        ),
        Claim("attnres-step", "time to train against the plain residual", "time", "s", attnres_quality("seconds")),
    ),
)

MOONEP = Benchmark(
    "moonep",
    "moonep.py",
    "MoonEP against Megatron's dispatchers",
    Form("--json --steps 3", 600),
    Form("--json --steps 20 --tokens 2048", 1800),
    (
        Claim(
            "moonep-rows-hot",
            "rows of the busiest rank against alltoall, every token's experts on one of {ranks} ranks",
            "count",
            "rows",
            moonep("single_hot", "rows_of_busiest_rank"),
        ),
        Claim(
            "moonep-rows-zipf",
            "the same, experts' shares as in Zipf's law",
            "count",
            "rows",
            moonep("zipf", "rows_of_busiest_rank"),
        ),
        Claim(
            "moonep-kept",
            "bytes kept for the backward pass on the fullest rank against alltoall, one hot rank",
            "count",
            "bytes",
            moonep("single_hot", "kept_bytes"),
        ),
        Claim("moonep-kept-balanced", "the same, balanced load", "count", "bytes", moonep("balanced", "kept_bytes")),
        Claim(
            "moonep-kept-keep",
            "bytes kept, one hot rank, with memory-efficient training against without it",
            "count",
            "bytes",
            moonep("single_hot", "kept_bytes", "moonep-keep"),
        ),
        Claim(
            "moonep-experts-hot",
            "expert computation, forward, slowest rank, against alltoall, one hot rank",
            "CPU time",
            "s",
            moonep("single_hot", "experts_ms", scale=MS),
        ),
        Claim(
            "moonep-cpu-hot",
            "forward and backward of the layer, slowest rank, against alltoall, one hot rank",
            "CPU time",
            "s",
            moonep("single_hot", "cpu_ms", scale=MS),
        ),
        Claim(
            "moonep-cpu-balanced",
            "the same, balanced load: sending rows twice and moving weights is pure cost",
            "CPU time",
            "s",
            moonep("balanced", "cpu_ms", scale=MS),
        ),
        Claim(
            "moonep-step-hot",
            "forward and backward by the clock against alltoall, one hot rank",
            "time",
            "s",
            moonep("single_hot", "step_ms", scale=MS),
        ),
        Claim("moonep-step-balanced", "the same, balanced load", "time", "s", moonep("balanced", "step_ms", scale=MS)),
    ),
)

MOONEP_PLANNER = Benchmark(
    "moonep-planner",
    "moonep_planner.py",
    "Plans of MoonEP",
    Form("--json --seeds 1 --repeats 3 --ilp-seconds 2", 600),
    Form("--json", 3600),
    (
        Claim(
            "moonep-plan-largest",
            "redundant experts of the fullest rank, summed over {cases} cases, against the exact"
            " optimum where an integer program proved it",
            "count",
            "experts",
            moonep_slots("optimum", 0),
        ),
        Claim(
            "moonep-plan-total",
            "redundant experts of all ranks, the same {cases} cases, against the total at that optimum",
            "count",
            "experts",
            moonep_slots("optimum", 1),
        ),
        Claim(
            "moonep-plan-alias",
            "redundant experts of the fullest rank, {cases} cases, against the plain alias method",
            "count",
            "experts",
            moonep_slots("alias", 0),
        ),
    ),
)

MUON = Benchmark(
    "muon-p2p",
    "muon_p2p.py",
    "Per-Head Muon, peer to peer",
    Form("--json --ranks 2 --steps 3 --hidden 256", 600),
    Form("--json", 1800),
    (
        Claim(
            "muon-traffic-k3",
            f"elements that a rank receives per step, beyond AdamW's, {K3}, 32 ranks, mean: peer to peer"
            " against an all-gather of the buffer",
            "count",
            "elements",
            muon_counted(K3, 32, "mean_received", ALL_GATHER),
        ),
        Claim(
            "muon-traffic-dense",
            f"the same, {DENSE}, 8 ranks",
            "count",
            "elements",
            muon_counted(DENSE, 8, "mean_received", ALL_GATHER),
        ),
        Claim(
            "muon-traffic-layer-wise",
            f"the same, {K3}, 32 ranks, against the padding of Megatron's layer-wise layout, which sends nothing else",
            "count",
            "elements",
            muon_counted(K3, 32, "mean_received", LAYER_WISE),
        ),
        Claim(
            "muon-balance",
            f"Newton-Schulz work of the busiest rank over the mean, {K3}, 32 ranks, against the layer-wise layout",
            "count",
            "x",
            muon_counted(K3, 32, "busiest", LAYER_WISE),
        ),
        Claim(
            "muon-balance-largest-piece",
            f"the same, 40 M buckets, {DENSE}, 8 ranks, owners balanced against the owner of the largest piece",
            "count",
            "x",
            muon_counted(DENSE, 8, "busiest", "the same, largest piece", "peer to peer, per head, 40 M buckets"),
        ),
        Claim(
            "muon-step-adamw",
            "optimizer step of the slowest of {ranks} ranks, hidden {hidden}, against AdamW",
            "time",
            "s",
            muon_timed("step_ms", "adamw", MS),
        ),
        Claim(
            "muon-step-layer-wise",
            "the same against Megatron's layer-wise Muon",
            "time",
            "s",
            muon_timed("step_ms", "layer-wise muon", MS),
        ),
        Claim(
            "muon-extra-memory",
            "peak memory that the step allocates, of the rank that allocates most, against layer-wise Muon",
            "count",
            "bytes",
            muon_timed("peak_extra_bytes", "layer-wise muon"),
        ),
        Claim(
            "muon-states",
            "optimizer states of the rank that holds most, against layer-wise Muon",
            "count",
            "bytes",
            muon_timed("state_bytes", "layer-wise muon"),
        ),
    ),
)

QAT = Benchmark(
    "mxfp4-qat",
    "mxfp4_qat.py",
    "MXFP4 quantization-aware training",
    Form("--json --steps 100", 900),
    Form("--json --seeds 5", 7200),
    (
        Claim(
            "qat-loss",
            "held-out loss after {steps} steps (seeds: {seeds}) against training without quantization",
            "loss",
            "nats per byte",
            qat(lambda arms: arms["qat"]["curve"][-1], lambda arms: arms["plain"]["curve"][-1]),
        ),
        Claim(
            "qat-loss-joined",
            "the same, quantized in the last third only",
            "loss",
            "nats per byte",
            qat(lambda arms: arms["joined"]["curve"][-1], lambda arms: arms["plain"]["curve"][-1]),
        ),
        Claim(
            "qat-loss-rounded",
            "held-out loss of quantization-aware training against quantizing the plain model afterwards",
            "loss",
            "nats per byte",
            qat(lambda arms: arms["qat"]["curve"][-1], lambda arms: arms["plain"]["rounded_afterwards"]),
        ),
        Claim(
            "qat-step",
            "step against a step without quantization",
            "time",
            "s",
            qat(lambda arms: arms["qat"]["seconds_per_step"], lambda arms: arms["plain"]["seconds_per_step"]),
        ),
    ),
)

ZERO2 = Benchmark(
    "pipeline-zero2",
    "pipeline_zero2.py",
    "Pipeline ZeRO-2 against the distributed optimizer",
    Form("--json --steps 2", 600),
    Form("--json --steps 20", 1800),
    (
        Claim(
            "zero2-device-bytes",
            "device memory of gradients, P {P}, V {V}, D {D}, {M} micro-batches",
            "count",
            "bytes",
            zero2("device_gradient_bytes"),
        ),
        Claim("zero2-all-bytes", "gradients on the device and on the host together", "count", "bytes", zero2_host),
        Claim("zero2-volume", "bytes that a step reduce-scatters", "count", "bytes", zero2("reduce_scatter_bytes")),
        Claim("zero2-step", "step", "time", "s", zero2("step_ms", scale=MS)),
        Claim(
            "zero2-step-cpu",
            "step, optimizer on the CPU",
            "time",
            "s",
            zero2("step_ms", "pipeline-zero2, step on cpu", MS),
        ),
    ),
)

BALANCING = Benchmark(
    "quantile-balancing",
    "quantile_balancing.py",
    "Quantile Balancing",
    Form("--json --draws 1 --tokens 4096", 600),
    Form("--json --draws 5", 3600),
    (
        Claim(
            "qb-none",
            "largest over mean load of 896 experts after {updates} updates on one batch (draws: {draws}) against"
            " no bias",
            "count",
            "x",
            balance("before", False),
        ),
        Claim(
            "qb-sign",
            "the same against the sign update after as many updates (it needs many more)",
            "count",
            "x",
            balance("sign", False),
        ),
        Claim(
            "qb-average",
            "the same, content that drifts along the batch, against averaging the quantiles of {shards} micro-batches",
            "count",
            "x",
            balance("average", True),
        ),
        Claim("qb-uniform", "centred bins against uniform bins", "count", "x", balance("uniform", False)),
        Claim(
            "qb-exact", "centred bins against the exact quantile of all scores", "count", "x", balance("exact", False)
        ),
    ),
)

BUBBLE = Benchmark(
    "vision-bubble",
    "vision_bubble.py",
    "Encoder work in pipeline bubbles",
    Form("--json {json}", 600),
    Form("--json {json} --execute", 1800),
    (
        Claim(
            "bubble-simulated",
            "SIMULATED step, P 4, V 2, 8 micro-batches, encoder forward 1 and backward 2 for each,"
            " against the encoder in stage 0",
            "count",
            "units",
            bubble(4, 2, 8, "in_stage_0"),
        ),
        Claim(
            "bubble-simulated-large",
            "the same, P 16, V 4, 128 micro-batches",
            "count",
            "units",
            bubble(16, 4, 128, "in_stage_0"),
        ),
        Claim(
            "bubble-bound",
            "the same against the lower bound of any plan",
            "count",
            "units",
            bubble(16, 4, 128, "bound"),
        ),
        Claim(
            "bubble-real",
            "executed step, P {p}, V {v}, {m} micro-batches, real work, a core for each process, against the"
            " encoder in stage 0",
            "time",
            "s",
            bubble_executed("real"),
            full_only=True,
        ),
        Claim(
            "bubble-emulated",
            "executed step, P {p}, V {v}, {m} micro-batches, EMULATED durations (processes sleep),"
            " against the encoder in stage 0",
            "time",
            "s",
            bubble_executed("emulated"),
            full_only=True,
        ),
    ),
    parts=("vision_bubble_steps.py",),
)

ACTIVATIONS = Benchmark(
    "activation-memory",
    "activation_memory.py",
    "Activation manager",
    Form("--json --layers 12 --steps 3", 600),
    Form("--json --layers 12 24 --steps 10", 1800),
    (
        Claim(
            "activations-fp8-cpu",
            "peak device bytes of saved activations, {layers} layers, all in FP8 in host memory, against no policy",
            "count",
            "bytes",
            activations("fp8+cpu", NONE, "device_peak_bytes"),
        ),
        Claim(
            "activations-fp8-cpu-recompute",
            "the same against Megatron's full recomputation",
            "count",
            "bytes",
            activations("fp8+cpu", FULL, "device_peak_bytes"),
        ),
        Claim(
            "activations-fp8",
            "the same, in FP8 on the device, against no policy",
            "count",
            "bytes",
            activations("fp8", NONE, "device_peak_bytes"),
        ),
        Claim(
            "activations-recompute",
            "the same, attention, MLP and norms recomputed, against no policy",
            "count",
            "bytes",
            activations("recompute", NONE, "device_peak_bytes"),
        ),
        Claim(
            "activations-keep-step",
            "step with every tensor kept by the manager, against no manager",
            "time",
            "s",
            activations("keep", NONE, "step_ms", MS),
        ),
        Claim(
            "activations-fp8-cpu-step",
            "step, all in FP8 in host memory, against no policy",
            "time",
            "s",
            activations("fp8+cpu", NONE, "step_ms", MS),
        ),
        Claim(
            "activations-fp8-cpu-step-recompute",
            "the same against Megatron's full recomputation",
            "time",
            "s",
            activations("fp8+cpu", FULL, "step_ms", MS),
        ),
    ),
)

BENCHMARKS = (
    KDA,
    ATTNRES_PIPELINE,
    ATTNRES_QUALITY,
    MOONEP,
    MOONEP_PLANNER,
    MUON,
    QAT,
    ZERO2,
    BALANCING,
    BUBBLE,
    ACTIVATIONS,
)
