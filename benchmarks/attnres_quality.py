"""Does Attention Residuals learn faster than the residual sum? Two arms, the same data, steps and parameter count.

    python benchmarks/attnres_quality.py [--steps 240] [--layers 12] [--block-size 3] [--seeds 1] [--json]

Text is the language reference that ships with every Python (byte level), the last tenth held out. Each arm gets the
learning rate that was best for IT in a sweep of runs of full length (short ones favour rates that are too high);
both curves are printed whatever they show. The standard arm's MLP is widened so that the numbers of parameters agree
within half a per cent. Small models on one CPU core show whether the mechanism trains, not what it is worth at scale.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HEADS, VOCABULARY = 4, 128
LARGEST_DIFFERENCE = 0.005
"""Of the arms' numbers of parameters, relative."""


def text_bytes() -> bytes:
    """About 700 kB of English and code."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode("ascii", "ignore")


def build(arm: str, options: argparse.Namespace, seed: int):  # noqa: ANN201 (torch is imported late)
    """A GPT model of one arm, freshly initialised."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from k3_plugins.models.kimi_k3.layer_specs import block_spec
    from k3_plugins.transformer.attention_residuals.block import install
    from k3_plugins.transformer.attention_residuals.config import AttentionResidualsConfig
    from k3_plugins.transformer.attention_residuals.spec import wrap_block_spec

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    width = options.hidden_size
    # a query and a key norm per sublayer and for the output, spread over three matrices per MLP unit and layer
    extra = round((4 * options.layers + 2) * width / (3 * width * options.layers)) if arm == "standard" else 0
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=width,
        num_attention_heads=HEADS,
        ffn_hidden_size=2 * width + extra,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        transformer_impl="local",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    spec = block_spec(config, None, kda=None, mla=None)
    residuals = AttentionResidualsConfig(attn_res_block_size=options.block_size, attn_res_two_phase="off")
    model = GPTModel(
        config=config,
        transformer_layer_spec=wrap_block_spec(spec, residuals) if arm == "attnres" else spec,
        vocab_size=VOCABULARY,
        max_sequence_length=options.seq_length,
        position_embedding_type="rope",
    )
    if arm == "attnres":
        install(model.decoder, residuals)
    return model


def train(arm: str, options: argparse.Namespace, lr: float, steps: int, seed: int, data, held_out) -> list[float]:
    """Held-out loss (nats per byte) at the start and after each tenth of the run."""
    import torch

    model = build(arm, options, seed)
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    draw = torch.Generator().manual_seed(1000 + seed)  # the same batches for every arm and learning rate
    positions = torch.arange(options.seq_length).expand(options.batch_size, -1)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        value = sum(loss_of(batch).item() for batch in held_out) / len(held_out)
        model.train()
        return value

    curve = [evaluate()]
    for step in range(1, steps + 1):
        share = min(1.0, step / max(1, steps // 10)) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * share
        starts = torch.randint(len(data) - options.seq_length - 1, (options.batch_size,), generator=draw)
        batch = torch.stack([data[start : start + options.seq_length + 1] for start in starts])
        optimizer.zero_grad(set_to_none=True)
        loss_of(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, steps // 10) == 0:
            curve.append(evaluate())
    return curve


def table(arms: dict, options: argparse.Namespace) -> str:
    """The comparison for people."""
    lines = []
    for arm, found in arms.items():
        sweep = ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in found["sweep"].items())
        finals = ", ".join(f"{loss:.4f}" for loss in found["final_of_each_seed"])
        lines.append(
            f"{arm}: {found['parameters']} parameters; sweep {{{sweep}}} -> lr"
            f" {found['lr']:g}; final loss of each seed {finals}; {found['seconds']:.0f} s"
        )
        if found["lr_at_the_edge_of_the_sweep"]:
            lines.append(f"  its best learning rate is at the edge of the sweep: widen --lrs before judging {arm}")
    lines.append(f"{'step':>6} {'standard':>9} {'attnres':>9} {'difference':>11}   held-out loss, nats per byte")
    tenth = max(1, options.steps // 10)
    for index, pair in enumerate(zip(arms["standard"]["curve"], arms["attnres"]["curve"], strict=True)):
        lines.append(f"{index * tenth:>6} {pair[0]:>9.4f} {pair[1]:>9.4f} {pair[1] - pair[0]:>+11.4f}")
    return "\n".join(lines)


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="optimizer steps of the comparison")
    lrs = [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]
    parser.add_argument("--lrs", type=float, nargs="+", default=lrs, help="learning rates of the sweep")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--block-size", type=int, default=3, help="layers per block of Attention Residuals")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1, help="repeat the comparison with this many seeds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()

    from k3_plugins import platform

    logging.disable(logging.WARNING)  # Megatron warns about every model that is built
    warnings.simplefilter("ignore")
    platform.select("cpu")
    import torch
    from megatron.core import parallel_state

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}.items():
        os.environ.setdefault(name, value)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()

    text = torch.frombuffer(bytearray(text_bytes()), dtype=torch.uint8).long()
    data, rest = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    size = options.batch_size * (options.seq_length + 1)
    held_out = [rest[i * size : (i + 1) * size].view(options.batch_size, -1) for i in range(6)]

    parameters = {arm: sum(p.numel() for p in build(arm, options, 0).parameters()) for arm in ("standard", "attnres")}
    difference = abs(parameters["attnres"] / parameters["standard"] - 1)
    if difference > LARGEST_DIFFERENCE:
        parser.error(
            f"the arms would have {parameters} parameters, {difference:.2%} apart; choose a --hidden-size at which"
            f" whole MLP units bring them within {LARGEST_DIFFERENCE:.1%}"
        )
    arms = {}
    for arm in parameters:
        start = time.perf_counter()
        first = {lr: train(arm, options, lr, options.steps, 0, data, held_out) for lr in options.lrs}
        sweep = {lr: curve[-1] for lr, curve in first.items()}
        best = min(sweep, key=sweep.__getitem__)
        more = [train(arm, options, best, options.steps, seed, data, held_out) for seed in range(1, options.seeds)]
        runs = [first[best], *more]
        arms[arm] = {
            "parameters": parameters[arm],
            "sweep": sweep,
            "lr": best,
            "lr_at_the_edge_of_the_sweep": len(sweep) > 1 and best in (min(sweep), max(sweep)),
            "curve": [sum(values) / len(values) for values in zip(*runs, strict=True)],
            "final_of_each_seed": [run[-1] for run in runs],
            "seconds": time.perf_counter() - start,
        }
    print(json.dumps({"options": vars(options), "arms": arms}, indent=2) if options.json else table(arms, options))
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
