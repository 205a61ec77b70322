"""Run the product's door with the same batch in every step, and write what QK-clip saw and did.

    python -m tests.distributed.optimizer.qk_clip.clip_run FOLDER [arguments of k3_plugins.pretrain_gpt]

FOLDER/rank<N>.pt: for every softmax attention its maxima and clipped weights after each step, and how often maxima
were collected.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from tests.harness.k3_model import DOOR
from tests.harness.recorded import before_training, hook_training, record


class Replay:
    """The first step's micro-batches, again in every step."""

    def __init__(self, source) -> None:
        self.source, self.seen, self.place = source, [], 0

    def __next__(self):
        if self.place == len(self.seen):
            self.seen.append(next(self.source))
        self.place += 1
        return self.seen[self.place - 1]

    def __iter__(self):
        return self


def main() -> None:
    folder, *words = sys.argv[1:]
    watch_run = functools.partial(watch, folder=Path(folder))
    hook_training(DOOR, lambda module: before_training(module, watch_run))
    record(folder, digest=False, target=DOOR)
    sys.argv = [DOOR, *words]
    runpy.run_module(DOOR, run_name="__main__", alter_sys=True)


def watch(arguments: dict[str, Any], folder: Path) -> None:
    from megatron.core import parallel_state

    from k3_plugins.optimizer.qk_clip.training import RUNTIME
    from k3_plugins.transformer.logit_maxima import LogitMaxima

    clip, optimizer = RUNTIME.clip, arguments["optimizer"]
    iterators = arguments["train_data_iterator"]
    replays = []
    for iterator in iterators if isinstance(iterators, list) else [iterators]:  # one per virtual stage
        if iterator is not None:  # None on ranks that read no data
            iterator.iterable = Replay(iterator.iterable)
            replays.append(iterator.iterable)

    def weights():
        return [[rows.parameter.detach().clone() for rows in attention.rows] for attention in clip.attentions]

    report = {
        "names": [attention.name for attention in clip.attentions],
        "rows": [[(rows.head, rows.exponent) for rows in attention.rows] for attention in clip.attentions],
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "before": weights(),
        "steps": [],
        "collected": 0,
    }
    step, update = optimizer.step, LogitMaxima.update

    def counted(self, largest):
        report["collected"] += 1
        update(self, largest)

    def watched_step():
        result = step()
        for replay in replays:
            replay.place = 0
        maxima = [] if not clip.attentions else clip.last_maxima.split([a.heads for a in clip.attentions])
        report["steps"].append({"maxima": list(maxima), "weights": weights()})
        report["summary"] = clip.summary()
        torch.save(report, folder / f"rank{os.environ.get('RANK', '0')}.pt")
        return result

    LogitMaxima.update = counted
    optimizer.step = watched_step


if __name__ == "__main__":
    main()
