"""Run the draft's door unchanged; record losses and gradients, and how the draft stands before its first step.

    python -m tests.distributed.post_training.draft.draft_run RECORDS TARGET [arguments of TARGET]

Adds to `tests.harness.gradients` the file `RECORDS/start.json`.
"""

from __future__ import annotations

import functools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from tests.harness import gradients
from tests.harness.recorded import before_training, hook_training, record


def main() -> None:
    directory, *rest = sys.argv[1:]
    for watch in (look_at_the_start, gradients.write_gradients):
        watch = functools.partial(watch, directory=Path(directory))
        hook_training(rest[0], lambda module, watch=watch: before_training(module, watch))
    record(directory, digest=True, target=rest[0])
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


@torch.no_grad()
def look_at_the_start(arguments: dict[str, Any], directory: Path) -> None:
    """Is the fused feature the last block's output, and the first step what Megatron's own forward pass computes?"""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.utils import unwrap_model

    (model,) = unwrap_model(arguments["model"])
    ids = torch.randint(100, (2, 32), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(32).expand(2, -1).contiguous()
    model._freeze()
    features, _, inputs = model._target(ids, positions, None)
    fused = model.draft_fusion(features)
    (layer,) = model.mtp.layers
    own = {"input_ids": ids, "position_ids": positions, "hidden_states": fused, "embedding": model.embedding}
    ours, *_ = layer(**own, attention_mask=None, **inputs)
    seen: dict[str, torch.Tensor] = {}

    def keep(_module, _args, kwargs, output) -> None:
        seen.update(hidden=kwargs["hidden_states"], output=output[0])

    handle = layer.register_forward_hook(keep, with_kwargs=True)
    GPTModel.forward(model, ids, positions, None, labels=ids)
    handle.remove()
    directory.mkdir(parents=True, exist_ok=True)
    state = {
        "fused is last": torch.equal(fused, features[2]),
        "last is what the layer gets": torch.equal(features[2], seen["hidden"]),
        "first step": torch.equal(ours, seen["output"]),
        "features differ": not torch.equal(features[0], features[1]) and not torch.equal(features[1], features[2]),
        "trained": sorted({name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}),
    }
    (directory / "start.json").write_text(json.dumps(state))


if __name__ == "__main__":
    main()
