"""Plan a training job without GPUs: parameters, FLOPs, memory per rank, bubble, traffic, and the best layouts.

    python -m k3_plugins.plan --model kimi_k3 --gpus 4096 --gpu-memory 80 --context 262144

Every combination of power-of-two parallel sizes is estimated, each under the first activation policy that fits (keep,
selective recomputation, full recomputation, full recomputation with layer inputs in host memory). Parameters, FLOPs,
weights, gradients and optimizer states are counted; activations are what the backward needs with GPU kernels; times
follow from the hardware numbers below and the share of communication that is assumed to be hidden (TP and CP none, EP
50 %, PP 90 %, DP 80 %), not from measurements: they serve to compare layouts. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from k3_plugins.atomic import replacing
from k3_plugins.command_line import positive
from k3_plugins.models.kimi_k3.config import PRESETS
from k3_plugins.plan import report
from k3_plugins.plan.advice import explain
from k3_plugins.plan.cost import Hardware
from k3_plugins.plan.layout import Job
from k3_plugins.plan.memory import POLICIES, Options
from k3_plugins.plan.search import search

SIZES = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "pp": "pipeline-parallel",
    "vpp": "virtual-stages",
    "ep": "expert-parallel",
    "micro_batch": "micro-batch",
}


def amount(text: str) -> float:
    """For argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def check_output(command: argparse.ArgumentParser, flag: str, path: Path | None) -> None:
    """End with a sentence if a file cannot be written, before the work of which it is the result."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        command.error(f"{flag} {path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        command.error(f"{flag} {path} is no regular file, and a file would take its place; name another one")
    if not folder.is_dir():
        command.error(f"{flag} {path}: its folder does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        command.error(f"{flag} {path}: its folder cannot be written to; name another one")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m k3_plugins.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--model", choices=sorted(PRESETS), required=True, help="a preset")
    add("--gpus", type=positive, required=True, metavar="N", help="of the whole job")
    add("--gpu-memory", type=amount, default=80.0, metavar="GB", help="of one GPU (default 80)")
    add("--host-memory", type=amount, default=128.0, metavar="GB", help="host memory per GPU (default 128)")
    add("--context", type=positive, default=8192, metavar="TOKENS", help="sequence length (default 8192)")
    add("--global-batch-tokens", type=positive, default=2**26, metavar="N", help="tokens in a step (default 2^26)")
    for name, flag in SIZES.items():
        add(f"--{flag}", type=positive, metavar="N", dest=name, help="use only this size")
    every = ",".join(POLICIES)
    add("--policies", default=every, metavar="LIST", help=f"activation policies to try, in order (default {every})")
    add("--no-pipeline-zero2", action="store_true", help="whole gradient buffers on the GPU")
    add("--optimizer-on-host", action="store_true", help="master weights and moments in host memory")
    add("--no-moonep", action="store_true", help="Megatron's all-to-all in place of MoonEP")
    reserve = "of a GPU: CUDA context, workspaces, fragmentation (default 6.4)"
    add("--reserve-memory", type=amount, default=6.4, metavar="GB", help=reserve)
    add("--gpu-tflops", type=amount, default=989.0, help="dense bf16 peak of one GPU (default 989)")
    add("--efficiency", type=amount, default=0.5, help="share of the peak that kernels reach (default 0.5)")
    add("--gpus-per-node", type=positive, default=8, metavar="N", help="TP stays inside a node (default 8)")
    add("--bandwidth-inside", type=amount, default=450.0, metavar="GB/s", help="per GPU inside a node (default 450)")
    add("--bandwidth-between", type=amount, default=50.0, metavar="GB/s", help="per GPU between nodes (default 50)")
    add("--top", type=positive, default=8, help="layouts to show (default 8)")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--png", type=Path, metavar="FILE", help="draw memory and time there")
    return result


def main(argv: list[str] | None = None) -> int:
    """0; 1 if no layout fits; 2 for bad input."""
    command = parser()
    options = command.parse_args(argv)
    policies = [word.strip() for word in options.policies.split(",")]
    unknown = [word for word in policies if word not in POLICIES]
    if unknown:
        command.error(f"--policies {unknown[0]!r} is unknown; choose from {', '.join(POLICIES)}")
    if options.global_batch_tokens % options.context:
        command.error(
            f"--global-batch-tokens {options.global_batch_tokens} is no multiple of --context {options.context}; a step"
            " consists of whole sequences"
        )
    if options.efficiency > 1:
        command.error(f"--efficiency {options.efficiency:g} must not be above 1")
    for flag, path in (("--json", options.json), ("--png", options.png)):
        check_output(command, flag, path)
    if options.png and options.png.suffix.lower() != ".png":
        command.error(f"--png {options.png} must end in .png")
    config = PRESETS[options.model]
    job = Job(config, options.gpus, options.context, options.global_batch_tokens // options.context)
    hardware = Hardware(
        peak_flops=options.gpu_tflops * 1e12,
        efficiency=options.efficiency,
        inside_node=options.bandwidth_inside * report.GB,
        between_nodes=options.bandwidth_between * report.GB,
        gpus_per_node=options.gpus_per_node,
    )
    base = Options(
        pipeline_zero2=not options.no_pipeline_zero2,
        optimizer_on_host=float(options.optimizer_on_host),
        moonep=not options.no_moonep,
        reserve=options.reserve_memory * report.GB,
    )
    fixed = {name: value for name in SIZES if (value := getattr(options, name)) is not None}
    device_bytes, host_bytes = options.gpu_memory * report.GB, options.host_memory * report.GB
    result = search(job, hardware, device_bytes, host_bytes, base, policies, fixed)
    report.show(job, result, options.top, options.model, device_bytes, host_bytes)
    if options.json:
        contents = report.values(job, hardware, result, options.top, options.model)
        with replacing(options.json) as temporary:
            temporary.write_text(json.dumps(contents, indent=1) + "\n")
    if options.png:
        if not result.found:
            print("no picture: no layout fits", file=sys.stderr)
        else:
            try:
                report.draw(job, result, device_bytes, options.top, options.model, options.png)
            except RuntimeError as error:
                command.error(str(error))
    if not result.found and not result.nearest:
        flags = {name: f"--{flag}" for name, flag in SIZES.items()}
        command.error(explain(job, fixed, flags, options.gpus_per_node, options.model))
    return 0 if result.found else 1


if __name__ == "__main__":
    raise SystemExit(main())
