"""What the tests run in a process of its own: a checkpoint's model, by the product's loader, and what it computes.

    python -m tests.unit.post_training.mxfp4_qat.qat_logits CHECKPOINT OUT.pt [FEATURE_TO_ADD]

Writes logits, the names of all quantizers that are enabled, the names of all modules, and the operands that the
experts' GEMMs had, by expert.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def main() -> None:
    checkpoint, out, *also = sys.argv[1:]
    from k3_plugins.models.kimi_k3 import checkpoint_model
    from k3_plugins.transformer.moe.experts import GroupedExperts

    loaded = checkpoint_model.load(Path(checkpoint), platform="cpu", door="tests", also=also)
    model, vocab = loaded.model, loaded.args.vocab_size
    ids = torch.randint(0, vocab, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids, torch.arange(40).expand_as(ids), None)[..., :vocab]
        weights = {
            name: (module.rounding.weight1(module.weight1), module.rounding.weight2(module.weight2))
            for name, module in model.named_modules()
            if isinstance(module, GroupedExperts)
        }
    from modelopt.torch.quantization.nn import TensorQuantizer

    modules = dict(model.named_modules())
    enabled = {name: module.is_enabled for name, module in modules.items() if isinstance(module, TensorQuantizer)}
    torch.save({"logits": logits, "weights": weights, "quantizers": enabled, "modules": set(modules)}, out)


if __name__ == "__main__":
    main()
