"""Pipeline traffic of Block Attention Residuals: what a token costs per hop, with and without the cache.

    python benchmarks/attnres_pipeline.py [P,V,N ...] [--measure] [--json]

(P, V, N): pipeline ranks, virtual stages per rank, blocks of layers per chunk. Counting needs no process; --measure
also starts P processes on the CPU for the layouts with P <= 4, trains one step through Megatron's interleaved schedule
and compares the bytes that were sent with the count. A standard residual stream costs one row per hop.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from k3_plugins.pipeline_parallel.attnres_payload.plan import PipelinePlan, cached_blocks, naive_blocks

LAYOUTS = [(4, 4, 8), (16, 4, 8), (4, 2, 1), (2, 4, 2), (8, 4, 1)]
MODES = ("off", "received", "on")


def layout(text: str) -> tuple[int, int, int]:
    """`P,V,N` from the command line.

    Raises:
        argparse.ArgumentTypeError: unless these are three whole numbers from 1 (P from 2: one rank sends nothing).
    """
    numbers = text.split(",")
    if len(numbers) != 3 or not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not P,V,N: three whole numbers from 1, such as 4,4,8")
    pipeline, virtual, blocks = map(int, numbers)
    if pipeline < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a pipeline has 2 ranks or more")
    return pipeline, virtual, blocks


def plan(pipeline: int, virtual: int, blocks: int, mode: str, block_size: int = 1) -> PipelinePlan:
    """`blocks` whole blocks of `block_size` layers in every chunk."""
    return PipelinePlan(pipeline, (blocks * block_size,) * (pipeline * virtual), block_size, mode)


def count(layouts: list[tuple[int, int, int]]) -> list[dict]:
    """Rows of [s, b, d] per micro-batch and direction, summed over all hops, in every mode."""
    counted = []
    for pipeline, virtual, blocks in layouts:
        chunks = pipeline * virtual
        rows = {mode: sum(plan(pipeline, virtual, blocks, mode).rows_per_hop()) for mode in MODES}
        # the paper counts blocks without the embedding
        assert rows["off"] == naive_blocks(chunks, blocks) + chunks - 1
        assert rows["received"] == cached_blocks(pipeline, virtual, blocks) + pipeline - 1
        ratios = {mode: rows["off"] / rows[mode] for mode in ("received", "on")}
        counted.append({"layout": [pipeline, virtual, blocks], "hops": chunks - 1, "rows": rows, "ratio": ratios})
    return counted


def table(counted: list[dict]) -> None:
    """The counts for people."""
    print(f"{'P,V,N':>10} {'hops':>5} {'no cache':>9} {'received':>9} {'on':>7} {'ratio rec.':>10} {'ratio on':>9}")
    for line in counted:
        rows, ratio = line["rows"], line["ratio"]
        print(
            f"{','.join(map(str, line['layout'])):>10} {line['hops']:>5} {rows['off']:>9} {rows['received']:>9}"
            f" {rows['on']:>7} {ratio['received']:>9.2f}x {ratio['on']:>8.2f}x"
        )
    print("rows of [s, b, d] per micro-batch and direction, summed over all hops; 'received' is the paper's scheme")


def one_step(rank: int, world_size: int, pipeline: int, virtual: int, blocks: int, mode: str) -> dict:
    """Bytes sent by this rank in one step of a real schedule, by direction and hop."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from tests.distributed.pipeline_parallel.attnres import models

    case = models.Case(
        pipeline, virtual, layers=pipeline * virtual * blocks, block=1, cache=mode, overlap=True, microbatches=pipeline
    )
    chunks = models.build(case)
    machinery = models.machinery()
    models.run_schedule(machinery.wrap(get_forward_backward_func)(), chunks, case)
    return dict(machinery.traffic.bytes)


def measure(layouts: list[tuple[int, int, int]]) -> list[dict]:
    """Run the layouts that fit and compare every hop with the count."""
    from k3_plugins.pipeline_parallel.attnres_payload.wire import header_length
    from tests.distributed.pipeline_parallel.attnres.models import HIDDEN, SEQUENCE
    from tests.harness.spawn import spawn

    row = SEQUENCE * 2 * HIDDEN * 8
    measured = []
    for pipeline, virtual, blocks in layouts:
        if pipeline > 4 or virtual < 2:
            continue
        for mode in MODES:
            sent: dict = {}
            for rank in spawn(one_step, pipeline, pipeline, virtual, blocks, mode, timeout=600):
                sent.update(rank)
            rows = plan(pipeline, virtual, blocks, mode).rows_per_hop()
            for hop, number in enumerate(rows):
                size = pipeline * (number * row + header_length(number) * 8)
                assert sent["forward", hop] == sent["backward", hop] == size, (pipeline, virtual, blocks, mode, hop)
            measured.append(
                {
                    "layout": [pipeline, virtual, blocks],
                    "cache": mode,
                    "bytes_per_direction": sum(sent.values()) // 2,
                    "payload": sum(rows) * row * pipeline,
                    "headers": sum(header_length(number) for number in rows) * 8 * pipeline,
                }
            )
    return measured


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help="P,V,N", type=layout)
    parser.add_argument("--measure", action="store_true", help="also run layouts with P <= 4 and V >= 2 on the CPU")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    layouts = options.layouts or LAYOUTS
    report = {"counted": count(layouts), "measured": measure(layouts) if options.measure else []}
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    table(report["counted"])
    for line in report["measured"]:
        print(
            f"{','.join(map(str, line['layout']))} cache {line['cache']}: {line['bytes_per_direction']} bytes per"
            f" direction in one step of {line['layout'][0]} micro-batches, as counted ({line['payload']} payload +"
            f" {line['headers']} headers)"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
