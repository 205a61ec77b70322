"""The result of a search as JSON values, as tables and as a picture."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3_plugins.atomic import replacing
from k3_plugins.models.kimi_k3.config import KimiK3Config
from k3_plugins.plan.cost import HIDDEN, Hardware
from k3_plugins.plan.flops import ends_flops, layer_flops, model_flops
from k3_plugins.plan.layout import Job, layout_string
from k3_plugins.plan.memory import FULL, KINDS, Memory
from k3_plugins.plan.parameters import active, all_parts, total, vision
from k3_plugins.plan.search import Found, Result, TooLarge

GB = 1e9


def model_values(job: Job) -> dict[str, Any]:
    """Sizes of the model: parameters by part, FLOPs per token."""
    config = job.config
    parts: dict[str, int] = defaultdict(int)
    for part in all_parts(config):
        parts[part.name.split(",")[0]] += part.parameters
    parts.pop("router bias", None)
    return {
        "parameters": total(config),
        "active_parameters": round(active(config)),
        "vision_parameters": vision(config),
        "parameters_by_part": dict(parts),
        "forward_flops_per_token": model_flops(config, job.context),
        "training_flops_per_token": 3 * model_flops(config, job.context),
        "forward_flops_per_token_by_kind": _flops_by_kind(config, job.context),
    }


def _flops_by_kind(config: KimiK3Config, context: int) -> dict[str, float]:
    kinds: dict[str, float] = defaultdict(float)
    for layer in range(config.num_layers):
        attention = "KDA" if config.attention_pattern[layer] else "MLA"
        kinds[f"{attention} + {'MoE' if config.moe_pattern[layer] else 'dense'}"] += layer_flops(config, layer, context)
    kinds["output layer"] = ends_flops(config)
    kinds["attention residuals"] = model_flops(config, context) - sum(kinds.values())
    return dict(kinds)


def flags(job: Job, found: Found, name: str) -> list[str]:
    """The words that give a job of this preset this layout."""
    layout, config, options = found.layout, job.config, found.options
    on_host = options.policy == "full+cpu"
    features = list(config.required_features)
    if config.num_experts is not None:
        features += ["quantile-balancing", *(["moonep"] if options.moonep else [])]
    features += ["pipeline-zero2"] if options.pipeline_zero2 else []
    features += ["activation-manager"] if on_host else []
    words: list[str | int | float] = ["--k3-model", name, "--k3-plugins", ",".join(features)]
    if on_host:
        # `decoder` names the inputs that full recomputation keeps
        words += ["--activation-policy", "decoder=cpu", "--no-gradient-accumulation-fusion"]
    words += ["--tensor-model-parallel-size", layout.tp, "--context-parallel-size", layout.cp]
    words += ["--sequence-parallel"] if layout.tp > 1 else []
    words += ["--pipeline-model-parallel-size", layout.pp]
    if layout.pp > 1:
        words += ["--pipeline-model-parallel-layout", layout_string(found.layers_per_chunk)]
    if config.num_experts is not None:
        words += ["--expert-model-parallel-size", layout.ep, "--expert-tensor-parallel-size", 1]
    if "moonep" in features:
        words += ["--transformer-impl", "local"]  # its stacked experts are its own
    words += ["--micro-batch-size", layout.micro_batch, "--global-batch-size", job.global_batch]
    words += ["--seq-length", job.context, "--max-position-embeddings", job.context]
    words += ["--bf16", "--use-distributed-optimizer"]
    if options.optimizer_on_host:
        # Megatron's own offload starts from a precision-aware optimizer, and from a share of 0
        offload = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--optimizer-offload-fraction"]
        zero2 = ["--zero2-optimizer-device", "cpu"]
        words += zero2 if options.pipeline_zero2 else [*offload, str(options.optimizer_on_host)]
    if options.policy == "selective":
        words += ["--recompute-granularity", "selective", "--recompute-modules", *options.recompute_modules]
    elif options.policy in FULL:
        words += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
    return [str(word) for word in words]


def layout_values(job: Job, found: Found, name: str) -> dict[str, Any]:
    """One layout as JSON values."""
    layout, cost = found.layout, found.cost
    return {
        "tensor": layout.tp,
        "context": layout.cp,
        "pipeline": layout.pp,
        "virtual_stages": layout.vpp,
        "expert": layout.ep,
        "data": layout.dp,
        "expert_data": layout.expert_dp,
        "micro_batch": layout.micro_batch,
        "micro_batches": layout.num_microbatches,
        "layers_per_chunk": list(found.layers_per_chunk),
        "activations": found.options.policy,
        "device_bytes_by_rank": [memory.device for memory in found.memory],
        "host_bytes_by_rank": [memory.host for memory in found.memory],
        "seconds_per_step": cost.seconds,
        "compute_seconds": cost.compute_seconds,
        "bubble": cost.bubble,
        "stage_imbalance": cost.imbalance,
        "bytes_sent_per_step": cost.sent,
        "model_flops_utilisation": cost.model_flops_utilisation,
        "tokens_per_second_per_gpu": cost.tokens_per_second,
        "flags": flags(job, found, name),
    }


def values(job: Job, hardware: Hardware, result: Result, top: int, name: str) -> dict[str, Any]:
    """Everything, as JSON values."""
    return {
        "model": {"name": name, **model_values(job)},
        "job": {"gpus": job.gpus, "context": job.context, "global_batch": job.global_batch},
        "assumptions": {**vars(hardware), "hidden_share_of_communication": HIDDEN},
        "considered": result.considered,
        "fitting": len(result.found),
        "rejected": dict(result.rejected.most_common()),
        "layouts": [layout_values(job, found, name) for found in result.found[:top]],
        "nearest_that_do_not_fit": [
            {
                "layout": str(entry.layout),
                "activations": entry.policy,
                "bytes": entry.fullest.total,
                "device_bytes": entry.fullest.device,
                "host_bytes": entry.host,
            }
            for entry in result.nearest
        ],
    }


def show(job: Job, result: Result, top: int, name: str, device_bytes: float, host_bytes: float) -> None:
    """Print the tables.

    Args:
        device_bytes, host_bytes: what the search allowed a GPU.
    """
    from rich.console import Console
    from rich.table import Table

    from k3_plugins.activation_report import output_width

    console = Console(width=output_width(), highlight=False)
    model = model_values(job)
    console.print(
        f"[bold]{name}[/bold]: {model['parameters'] / GB:,.2f} B parameters, {model['active_parameters'] / GB:,.2f} B"
        f" active; {model['training_flops_per_token'] / GB:,.1f} GFLOP per token in training at {job.context:,} tokens"
    )
    if model["vision_parameters"]:
        console.print(
            f"its vision encoder (moonvit) has {model['vision_parameters'] / GB:,.4g} B parameters more; the layouts"
            " below are those of the language model alone"
        )
    console.print(
        f"{job.gpus:,} GPUs, {job.global_batch:,} sequences of {job.context:,} tokens per step;"
        f" {result.considered:,} combinations, {len(result.found):,} fit"
    )
    table = Table(title="Fastest layouts (estimates: see the assumptions in --help)", title_justify="left")
    for column in ("TP", "CP", "PP", "VPP", "EP", "DP", "micro", "activations", "GB", "host GB", "bubble", "MFU", "s"):
        table.add_column(column, justify="left" if column == "activations" else "right", no_wrap=True)
    for found in result.found[:top]:
        layout, cost = found.layout, found.cost
        sizes = (layout.tp, layout.cp, layout.pp, layout.vpp, layout.ep, layout.dp)
        table.add_row(
            *map(str, sizes),
            f"{layout.micro_batch} x {layout.num_microbatches}",
            found.options.policy,
            f"{found.fullest.total / GB:.1f}",
            f"{max(memory.host for memory in found.memory) / GB:.1f}",
            f"{cost.bubble:.1%}",
            f"{cost.model_flops_utilisation:.1%}",
            f"{cost.seconds:.2f}",
        )
    if result.found:
        print_numbers(console, table)
        best = result.found[0]
        print_numbers(console, memory_table(best.memory, "Memory of the fastest one, GB per GPU by pipeline rank"))
        sent = ", ".join(f"{group} {size / GB:,.1f}" for group, size in best.cost.sent.items() if size)
        console.print(f"the fastest one sends per GPU and step, in GB: {sent or 'nothing'}")
        console.print(f"layers per chunk: {' '.join(map(str, best.layers_per_chunk))}")
        console.print("flags: " + shlex.join(flags(job, best, name)), soft_wrap=True, markup=False)
    table = Table(title="Left out", title_justify="left")
    table.add_column("reason", overflow="fold")
    table.add_column("combinations", justify="right", no_wrap=True)
    for reason, count in result.rejected.most_common():
        table.add_row(reason, f"{count:,}")
    console.print(table)
    if not result.found:
        console.print("[bold]No layout fits.[/bold]")
        for entry in result.nearest[:3]:
            where = f"{entry.layout}, micro-batch {entry.layout.micro_batch}, activations {entry.policy}"
            console.print(f"nearest: {where}, {_needs(entry, device_bytes, host_bytes)}")


def _needs(entry: TooLarge, device_bytes: float, host_bytes: float) -> str:
    """What a layout that does not fit lacks, and the flag that would have to be larger."""
    device, host = f"{gigabytes(entry.fullest.total)} GB", f"{gigabytes(entry.host)} GB of host memory"
    parts = ", ".join(f"{kind} {gigabytes(value)}" for kind, value in entry.fullest.device.items() if value)
    lacks = []
    if entry.fullest.total > device_bytes:
        lacks.append(f"{device} of GPU memory ({parts}), --gpu-memory is {device_bytes / GB:g}")
    if entry.host > host_bytes:
        lacks.append(f"{host}, --host-memory is {host_bytes / GB:g}")
    else:
        lacks.append(host)
    return f"needs {'; '.join(lacks)}"


def memory_table(memories: Sequence[Memory], title: str) -> Any:
    """Bytes by kind of every pipeline rank, as a table of rich's; of a long pipeline its ends."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    shown = memories if len(memories) <= 8 else (*memories[:4], *memories[-4:])
    table.add_column("rank", no_wrap=True)
    for memory in shown:
        table.add_column(str(memory.rank), justify="right", no_wrap=True)
    for kind in KINDS:
        if any(memory.device[kind] for memory in memories):
            table.add_row(kind, *(gigabytes(memory.device[kind]) for memory in shown))
    table.add_section()
    table.add_row("total", *(gigabytes(memory.total) for memory in shown))
    table.add_row("host", *(gigabytes(memory.host) for memory in shown))
    return table


def print_numbers(console: Any, table: Any) -> None:
    """Print a table and never cut a number: where the terminal is narrow, without lines between the columns.

    Args:
        console, table: of rich's; a line that is still too long is left to the terminal.
    """
    from rich import box
    from rich.measure import Measurement

    def needed() -> int:
        return Measurement.get(console, console.options.update_width(10_000), table).maximum

    if needed() > console.width:
        table.box, table.padding = box.SIMPLE_HEAD, 0
    console.print(f"[italic]{table.title}[/italic]")
    table.title = None  # of which rich makes lines as long as the table
    console.width = max(width := console.width, needed())
    console.print(table)
    console.width = width


def gigabytes(size: float) -> str:
    """With one decimal; small models with two digits."""
    return f"{size / GB:.1f}" if size >= GB / 10 or not size else f"{size / GB:.2g}"


def draw(job: Job, result: Result, device_bytes: float, top: int, name: str, output: Path) -> None:
    """Write the PNG, atomically: memory by kind of the fullest rank, and where a step's time goes, layout by layout.

    Raises:
        RuntimeError: if matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("the picture needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = result.found[:top]
    labels = [str(found.layout) for found in shown]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(14, 1.8 + 0.45 * len(shown)), sharey=True, layout="constrained"
    )
    places = range(len(shown))
    start = [0.0] * len(shown)
    for kind in KINDS:
        sizes = [found.fullest.device[kind] / GB for found in shown]
        if any(sizes):
            left.barh(places, sizes, left=start, label=kind)
            start = [a + b for a, b in zip(start, sizes, strict=True)]
    left.axvline(device_bytes / GB, color="black", linestyle="--", linewidth=1)
    left.set_yticks(places, labels, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("GB on the fullest GPU (dashed: its memory)")
    left.legend(fontsize=7, ncols=2)
    start = [0.0] * len(shown)
    for kind in ("compute", "pipeline bubble", "communication not hidden"):
        sizes = []
        for found in shown:
            waiting = found.cost.bubble * found.cost.seconds
            rest = found.cost.seconds - found.cost.compute_seconds - waiting
            sizes.append({"compute": found.cost.compute_seconds, "pipeline bubble": waiting}.get(kind, rest))
        right.barh(places, sizes, left=start, label=kind)
        start = [a + b for a, b in zip(start, sizes, strict=True)]
    right.set_xlabel("seconds per step (estimate)")
    right.legend(fontsize=7)
    figure.suptitle(f"{name} on {job.gpus} GPUs, {job.context} tokens per sequence")
    try:
        with replacing(output) as temporary:
            figure.savefig(temporary, dpi=130, format="png")
    finally:
        pyplot.close(figure)
