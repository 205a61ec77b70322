"""What a training command would do, without GPUs and without starting it.

    python -m k3_plugins.plan.dry_run --ranks 4096 --gpu-memory 80 -- --k3-plugins k3 --k3-model kimi_k3 [flags]

Lets the features and Megatron check the flags as in a job of so many ranks, then prints the resolved configuration
(every argument that differs from Megatron's default), the parallel layout with the layers of every stage, and the
memory plan by kind and pipeline rank. Exit code 0: it would start, and fits unless there is no memory plan, which is
said with the reason; 1: it does not fit by the estimate; 2: it would not start, with the reasons. Data and checkpoints
are not looked for. Assumptions: ``python -m k3_plugins.plan --help``.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from k3_plugins import platform
from k3_plugins.arguments import parse_control, plain
from k3_plugins.atomic import replacing
from k3_plugins.command_line import positive
from k3_plugins.diagnosis import Diagnosis, diagnose
from k3_plugins.failure import PREFIX, fail
from k3_plugins.feature import FeatureError
from k3_plugins.plan.__main__ import amount, check_output
from k3_plugins.plan.from_arguments import changed, job_of, layers_per_chunk, layout_of, model_of, options_of
from k3_plugins.plan.memory import Memory, of_rank
from k3_plugins.plan.report import GB, gigabytes, memory_table, print_numbers

DRAFT = "k3_plugins.draft_gpt"
DOORS = ("k3_plugins.pretrain_gpt", "k3_plugins.pretrain_vlm", "k3_plugins.finetune_gpt", DRAFT)


def parser() -> argparse.ArgumentParser:
    """The tool's own command line; the training flags stand behind ``--``."""
    result = argparse.ArgumentParser(
        prog="python -m k3_plugins.plan.dry_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--ranks", type=positive, required=True, help="GPUs of the job")
    result.add_argument("--gpu-memory", type=amount, default=80.0, metavar="GB", help="of one GPU (default 80)")
    result.add_argument("--host-memory", type=amount, default=128.0, metavar="GB", help="per GPU (default 128)")
    result.add_argument("--reserve-memory", type=amount, default=6.4, metavar="GB", help="set aside (default 6.4)")
    result.add_argument("--door", choices=DOORS, default=DOORS[0], help="the program to start (default pretrain_gpt)")
    result.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if the job does not fit; 2 if it would not start."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = parser()
    if "--" not in words:
        command.parse_args(words)
        command.error("the training flags stand behind --, for example: --ranks 8 -- --k3-plugins k3 --k3-model ...")
    place = words.index("--")
    own = command.parse_args(words[:place])
    check_output(command, "--json", own.json)
    try:
        control, flags = parse_control(words[place + 1 :])
        flags = without_own(own.door, flags)
        if not control.plugins:
            raise FeatureError("the training flags name no feature: add --k3-plugins")
        # which platform the checks use is no news about the job
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            platform.select(control.platform or "cpu")  # they need no GPU, wherever the job will run
    except (FeatureError, platform.PlatformError) as error:
        fail(str(error))
    warnings.simplefilter("ignore")
    with redirect_stdout(io.StringIO()):  # Megatron prints all its arguments
        found = diagnose(control, flags, own.ranks, own.door)
    if found.arguments is None or found.defaults is None:
        for problem in dict.fromkeys(found.problems):
            print(f"{PREFIX}{problem}", file=sys.stderr)
        return 2
    found.arguments.k3_plugins, found.arguments.k3_model = ",".join(control.plugins), control.model
    found.arguments.k3_platform = control.platform
    features = [line["name"] for line in found.features]
    try:
        if own.door == DRAFT:
            raise FeatureError("it describes a model that is trained whole, a draft's target is frozen")
        plan, refusal = memory_plan(found.arguments, features, control.model, own.reserve_memory * GB), None
    except FeatureError as error:
        plan, refusal = None, str(error)
    configuration = changed(found.arguments, found.defaults)
    _show(found, configuration, features, own, plan)
    if plan is None:
        print(f"no memory plan: {refusal}")
    if own.json:
        with replacing(own.json) as temporary:
            temporary.write_text(json.dumps(_values(found, configuration, features, plan, refusal), indent=1) + "\n")
    return int(plan is not None and not all(_fits(memory, own) for memory in plan["memory"]))


def _fits(memory: Memory, own: argparse.Namespace) -> bool:
    return memory.total <= own.gpu_memory * GB and memory.host <= own.host_memory * GB


def without_own(door: str, flags: list[str]) -> list[str]:
    """A door's command line as it hands it to Megatron: without the flags that are its own, those of its data."""
    parse = getattr(import_module(door), "parse", None)
    return flags if parse is None else parse(flags)[1]


def memory_plan(args: argparse.Namespace, features: Sequence[str], model: str | None, reserve: float) -> dict[str, Any]:
    """Layers of every chunk, memory of every pipeline rank, and what is not counted as it is.

    Raises:
        FeatureError: for a model or layout that the planner cannot describe.
    """
    config = model_of(args, model, features)
    layout = layout_of(args)
    sizes = layers_per_chunk(args, layout, config)
    options, notes = options_of(args, features, reserve)
    memory = tuple(of_rank(job_of(args, config), layout, options, sizes, rank) for rank in range(layout.pp))
    return {"layout": layout, "layers_per_chunk": sizes, "memory": memory, "notes": notes, "policy": options.policy}


def _values(
    found: Diagnosis,
    configuration: Mapping[str, Any],
    features: Sequence[str],
    plan: dict[str, Any] | None,
    refusal: str | None,
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "features": list(features),
        "configuration": {name: plain(value) for name, value in configuration.items()},
        "layout": found.layout,
    }
    if plan is None:
        values["no_memory_plan"] = refusal
    else:
        values["memory"] = {
            "layers_per_chunk": list(plan["layers_per_chunk"]),
            "activations": plan["policy"],
            "device_bytes_by_rank": [memory.device for memory in plan["memory"]],
            "host_bytes_by_rank": [memory.host for memory in plan["memory"]],
            "notes": plan["notes"],
        }
    return values


def _show(
    found: Diagnosis,
    configuration: Mapping[str, Any],
    features: Sequence[str],
    own: argparse.Namespace,
    plan: dict[str, Any] | None,
) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from k3_plugins.activation_report import output_width

    console = Console(width=output_width(), highlight=False)
    console.print(f"[bold]{own.door}[/bold] on {own.ranks} ranks with {', '.join(features)}")
    for note in found.left_out:
        console.print(f"left out: {escape(note)}")
    table = Table(title="Resolved configuration (what differs from Megatron's defaults)", title_justify="left")
    table.add_column("argument", overflow="fold")
    table.add_column("value", overflow="fold")
    for name, value in configuration.items():
        table.add_row(name, escape(str(value)))
    console.print(table)
    if plan is None:
        sizes = ", ".join(f"{name} {value}" for name, value in found.layout.items() if value not in (None, False))
        console.print(f"[bold]Parallel layout[/bold] {sizes}", soft_wrap=True)
        return
    layout, chunks = plan["layout"], plan["layers_per_chunk"]
    batches = f"{layout.num_microbatches} micro-batches of {layout.micro_batch}"
    console.print(f"[bold]Parallel layout[/bold] {layout}; {batches}")
    for rank in range(layout.pp):
        starts = [sum(chunks[:chunk]) + 1 for chunk in range(rank, layout.chunks, layout.pp)]
        held = zip(starts, chunks[rank :: layout.pp], strict=True)
        spans = ", ".join(_span(start, size) for start, size in held)
        if layout.pp <= 8 or rank < 4 or rank >= layout.pp - 4:
            console.print(f"  pipeline rank {rank}: layers {spans}")
    print_numbers(console, memory_table(plan["memory"], "Memory plan, GB per GPU by pipeline rank (estimate)"))
    fullest: Memory = max(plan["memory"], key=lambda memory: memory.total)
    verdict = "fits" if fullest.total <= own.gpu_memory * GB else "does NOT fit"
    console.print(f"{fullest.total / GB:.1f} GB on pipeline rank {fullest.rank}: {verdict} in {own.gpu_memory:g} GB")
    most: Memory = max(plan["memory"], key=lambda memory: memory.host)
    if most.host:
        verdict = "fits" if most.host <= own.host_memory * GB else "does NOT fit"
        size = f"{gigabytes(most.host)} GB of host memory on pipeline rank {most.rank}"
        console.print(f"{size}: {verdict} in {own.host_memory:g} GB")
    for note in plan["notes"]:
        console.print(f"note: {escape(note)}")


def _span(start: int, size: int) -> str:
    if size < 2:
        return str(start) if size else "none"
    return f"{start}-{start + size - 1}"


if __name__ == "__main__":
    raise SystemExit(main())
