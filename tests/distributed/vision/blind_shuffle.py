"""What the tests run in a process of its own: the comparison twice with the model's encoder, once with zeros for it.

    python -m tests.distributed.vision.blind_shuffle CHECKPOINT PAIRS OUT.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    checkpoint, data, out = sys.argv[1:]
    from k3_plugins.models.kimi_k3 import checkpoint_model
    from k3_plugins.vision import image_shuffle

    args = image_shuffle.arguments(["--load", checkpoint, "--vision-data", data, "--k3-platform", "cpu"])
    loaded = []
    load = checkpoint_model.load

    def once(*arguments, **keywords):  # Megatron starts once in a process
        if not loaded:
            loaded.append(load(*arguments, **keywords))
        return loaded[0]

    checkpoint_model.load = once
    results = [asdict(image_shuffle.run(args)[0]) for _ in range(2)]
    loaded[0].model.vision_model.register_forward_hook(lambda module, inputs, tokens: tokens * 0)
    results.append(asdict(image_shuffle.run(args)[0]))
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
