"""Executed steps for `benchmarks/vision_bubble.py --execute`: the encoder inside stage 0 and in bubbles, in turn.

    run("real" or "emulated", steps)        # starts the processes; returns seconds and what was hidden

One training run through the product's door serves both: even steps run through the scheduler, odd ones bypass it, with
the same weights, processes and images. Images are decoded before anything is timed. With ``emulated``, the text of a
model chunk, and the encoder by number of patches, sleep for given times beside their (very small) real work; sleeping
processes do not compete for cores.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODULE = "benchmarks.vision_bubble_steps"
DOOR = "k3_plugins.pretrain_vlm"
SLEEP = {"text_forward": 0.04, "text_backward": 0.08, "encoder_forward": 0.04, "encoder_backward": 0.08}
"""Seconds: of a chunk, and of the encoder for a micro-batch of average size."""
PROCESSES = {"real": 2, "emulated": 4}
MICROBATCHES = 8

_COMMON = f"""
    --k3-plugins kda,gated-mla,moonvit,vision-bubble --k3-platform cpu --distributed-backend gloo
    --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12 --kda-num-heads 4
    --kda-head-dim 16 --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type none --attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 8
    --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --tokenizer-type NullTokenizer --vocab-size 258 --padded-vocab-size 320
    --micro-batch-size 1 --global-batch-size {MICROBATCHES} --eval-iters 0 --eval-interval 1000 --lr 1e-4
    --lr-decay-style constant --log-interval 1000 --seed 42 --num-workers 0
    --num-layers-per-virtual-pipeline-stage 1 --moonvit-head-dim 32
    --moonvit-position-grid 16 --moonvit-num-layers 3 --vision-bubble-pieces 3
"""
_SIZES = {
    "real": """
        --pipeline-model-parallel-size 2 --num-layers 4 --linear-attention-freq [0,0,0,0] --hidden-size 192
        --num-attention-heads 8 --ffn-hidden-size 768 --seq-length 512 --max-position-embeddings 512
        --moonvit-hidden-size 128 --moonvit-num-heads 4 --moonvit-ffn-size 512
    """,
    "emulated": """
        --pipeline-model-parallel-size 4 --num-layers 8 --linear-attention-freq [0,0,0,0,0,0,0,0] --hidden-size 32
        --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 160 --max-position-embeddings 160
        --moonvit-hidden-size 32 --moonvit-num-heads 1 --moonvit-ffn-size 64
    """,
}
_EDGES = {"real": (448, 560), "emulated": (84, 196)}
"""Smallest and largest edge of an image in pixels."""


def run(kind: str, steps: int) -> dict[str, Any]:
    """``steps`` timed steps of each way, after three that measure times for the planner.

    Returns:
        medians over steps of the slowest rank's seconds, their ratio, and by rank the share of the encoder hidden.
    """
    from tests.harness.launch import launch

    with tempfile.TemporaryDirectory(prefix="k3-bubble-") as folder:
        root = Path(folder)
        _write_pairs(root / "pairs", *_EDGES[kind])
        words = [*_COMMON.split(), *_SIZES[kind].split(), "--vision-data", root / "pairs"]
        words += ["--train-iters", 2 * (steps + 4)]
        launch(MODULE, [root, kind, DOOR, *words], nprocs=PROCESSES[kind], timeout=280)
        ranks = [
            [json.loads(line) for line in (root / f"steps{rank}.jsonl").read_text().splitlines()]
            for rank in range(PROCESSES[kind])
        ]
    slowest = [max(lines, key=lambda line: line["seconds"]) for lines in zip(*ranks, strict=True)][8:]
    scheduled = sorted(line["seconds"] for line in slowest if line["scheduled"])
    in_stage_0 = sorted(line["seconds"] for line in slowest if not line["scheduled"])
    hidden = [line["hidden"] for line in ranks[0][8:] if line["scheduled"]]
    return {
        "kind": kind,
        "p": PROCESSES[kind],
        "v": 2,
        "m": MICROBATCHES,
        "steps": len(scheduled),
        "in_stage_0_seconds": in_stage_0[len(in_stage_0) // 2],
        "scheduled_seconds": scheduled[len(scheduled) // 2],
        "ratio": in_stage_0[len(in_stage_0) // 2] / scheduled[len(scheduled) // 2],
        "hidden_by_rank": [sum(values) / len(values) for values in zip(*hidden, strict=True)],
    }


def _write_pairs(folder: Path, smallest: int, largest: int) -> None:
    """As many samples as a step has micro-batches, with images of many sizes and texts that fill a row."""
    import io
    import tarfile

    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number in range(MICROBATCHES):
            size = rng.integers(smallest, largest + 1, 2)
            stream = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(stream, "PNG")
            for suffix, content in (("png", stream.getvalue()), ("txt", b"x" * 90)):
                entry = tarfile.TarInfo(f"{number}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


# -- in the processes --------------------------------------------------------------------------------------------------


def main() -> None:
    """A rank: the door, with every step timed and every second one around the scheduler."""
    from tests.harness.recorded import before_training, hook_training

    directory, kind, *rest = sys.argv[1:]
    if kind == "real":
        cores = sorted(os.sched_getaffinity(0))
        rank = int(os.environ["RANK"])
        if len(cores) < PROCESSES[kind]:
            sys.exit(f"{PROCESSES[kind]} processes need a core each; this machine has {len(cores)}")
        os.sched_setaffinity(0, {cores[rank]})
    watch = functools.partial(_watch, directory=Path(directory), emulated=kind == "emulated")
    hook_training(rest[0], lambda module: before_training(module, watch))
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


def _watch(arguments: dict[str, Any], directory: Path, emulated: bool) -> None:
    import torch.distributed as dist

    from k3_plugins.pipeline_parallel.vision_bubble.runtime import RUNTIME

    path = directory / f"steps{os.environ['RANK']}.jsonl"
    _decode_once(RUNTIME.sources[False])
    if emulated:
        _sleep_instead(arguments["model"], RUNTIME)
    scheduled, count = RUNTIME._run, [0]

    def one_or_the_other(schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        through = count[0] % 2 == 0
        count[0] += 1
        dist.barrier()
        start = time.perf_counter()
        result = scheduled(schedule, call) if through else _in_stage_0(schedule, call, RUNTIME)
        dist.barrier()
        line = {"scheduled": through, "seconds": time.perf_counter() - start, "hidden": RUNTIME.hidden()}
        RUNTIME._replica.outdated()
        with path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        return result

    RUNTIME._run = one_or_the_other


def _decode_once(source) -> None:
    """Keep the patches of every pair; a row holds one."""
    read, kept = source.patches, {}
    for row, (pair,) in enumerate(source.rows):
        if pair not in kept:
            kept[pair] = read(row)
    source.patches = lambda row: kept[source.rows[row][0]]


def _in_stage_0(schedule: Callable[..., Any], call: dict[str, Any], runtime: Any) -> Any:
    """Megatron's schedule with the data that it gets without the feature."""
    rows = [next(call["data_iterator"][0]) for _ in range(call["num_microbatches"])]

    def with_images() -> Iterator[dict[str, Any]]:
        for row in rows:
            yield {**row, "patches": runtime.sources[False].patches(int(row["row"]))[None]}

    first = runtime._groups[0].rank() == 0
    iterators = [with_images() if first and chunk == 0 else iter(rows) for chunk in range(len(call["model"]))]
    return schedule(**{**call, "data_iterator": iterators})


def _sleep_instead(model: list[Any], runtime: Any) -> None:
    import torch
    from megatron.core.utils import unwrap_model

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, forward, backward):
            time.sleep(forward)
            ctx.backward = backward
            return x.clone()  # a view at the end of a chunk could not be freed by the schedule

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(ctx.backward)
            return gradient, None, None

    for chunk in unwrap_model(model):
        chunk.decoder.register_forward_hook(
            lambda module, inputs, output: Sleep.apply(output, SLEEP["text_forward"], SLEEP["text_backward"])
        )
    source, layers = runtime.sources[False], len(runtime.encoder.blocks)
    average = sum(len(source.patches(row)) for row in range(len(source))) / len(source)

    def block(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        share = len(output) / average / layers
        return Sleep.apply(output, SLEEP["encoder_forward"] * share, SLEEP["encoder_backward"] * share)

    for module in runtime.encoder.blocks:
        module.register_forward_hook(block)


if __name__ == "__main__":
    main()
