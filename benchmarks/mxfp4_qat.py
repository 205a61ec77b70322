"""What quantization-aware training costs: held-out loss with and without it, on the same batches from the same weights.

    python benchmarks/mxfp4_qat.py [--steps 300] [--layers 4] [--hidden-size 64] [--seeds 1] [--json]

A small LatentMoE model on the text of the language reference that ships with every Python (byte level, the last tenth
held out). Arms: plain; qat (experts in MXFP4 weights and MXFP8 inputs from the first step); joined (plain for two
thirds of the steps, then quantized); rounded after (the plain model, quantized without training). Prints the loss of
each arm after each tenth of the steps, its ratio to plain, and seconds per step.
Small models on one CPU core: the ratio says that training works, not what a trillion parameters would lose. Two runs of
qat and plain part after a few steps, and single seeds then differ by 4 % in either direction: read the mean (--seeds).
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

VOCABULARY, HEADS = 128, 4
ARMS = ("plain", "qat", "joined")


def text_bytes() -> bytes:
    """About 700 kB of English and code."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode("ascii", "ignore")


def build(options: argparse.Namespace, seed: int):  # noqa: ANN201 (torch is imported late)
    """A GPT model with experts in every layer, freshly initialised, without quantizers."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from k3_plugins.models.kimi_k3.layer_specs import MoEFeatures, block_spec
    from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    width = options.hidden_size
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=width,
        num_attention_heads=HEADS,
        ffn_hidden_size=2 * width,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=width,
        moe_latent_size=width // 2,
        moe_shared_expert_intermediate_size=width,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        moe_router_enable_expert_bias=True,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=0.0,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        transformer_impl="local",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    moe = MoEFeatures(latent_moe=LatentMoEConfig())
    return GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, None, kda=None, mla=None, moe=moe),
        vocab_size=VOCABULARY,
        max_sequence_length=options.seq_length,
        position_embedding_type="rope",
    )


def train(arm: str, options: argparse.Namespace, seed: int, data, held_out) -> dict[str, object]:
    """Held-out losses (nats per byte) after each tenth of the steps, and seconds per step."""
    import torch

    from k3_plugins.post_training.mxfp4_qat.config import MXFP4QATConfig
    from k3_plugins.post_training.mxfp4_qat.convert import quantize_routed_experts

    model = build(options, seed)
    joins = {"plain": None, "qat": 0, "joined": options.steps * 2 // 3}[arm]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
    draw = torch.Generator().manual_seed(1000 + seed)  # the same batches for every arm
    positions = torch.arange(options.seq_length).expand(options.batch_size, -1)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        value = sum(loss_of(batch).item() for batch in held_out) / len(held_out)
        model.train()
        return value

    curve, tenth, seconds = [], max(1, options.steps // 10), 0.0
    for step in range(options.steps):
        if step == joins:
            quantize_routed_experts(model, MXFP4QATConfig())
        share = min(1.0, (step + 1) / tenth) * (0.55 + 0.45 * math.cos(math.pi * step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = options.lr * share
        starts = torch.randint(len(data) - options.seq_length - 1, (options.batch_size,), generator=draw)
        batch = torch.stack([data[start : start + options.seq_length + 1] for start in starts])
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss_of(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds += time.perf_counter() - begun
        if (step + 1) % tenth == 0:
            curve.append(evaluate())
    found: dict[str, object] = {"curve": curve, "seconds_per_step": seconds / options.steps}
    if arm == "plain":
        quantize_routed_experts(model, MXFP4QATConfig())
        found["rounded_afterwards"] = evaluate()
    return found


def measure(options: argparse.Namespace) -> list[dict[str, dict]]:
    """For each seed the result of every arm; needs Megatron's process groups of one process."""
    import torch

    text = torch.frombuffer(bytearray(text_bytes()), dtype=torch.uint8).long()
    data, rest = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    size = options.batch_size * (options.seq_length + 1)
    held_out = [rest[i * size : (i + 1) * size].view(options.batch_size, -1) for i in range(6)]
    return [{arm: train(arm, options, seed, data, held_out) for arm in ARMS} for seed in range(options.seeds)]


def ratios(seeds: list[dict[str, dict]]) -> dict[str, float]:
    """Mean final loss of every arm over that of plain: one seed alone differs by per cents from the next."""
    means = {arm: sum(arms[arm]["curve"][-1] for arms in seeds) / len(seeds) for arm in ARMS}
    return {arm: mean / means["plain"] for arm, mean in means.items()}


def table(seeds: list[dict[str, dict]]) -> str:
    """For people."""
    lines = []
    for seed, arms in enumerate(seeds):
        plain = arms["plain"]["curve"][-1]
        head = f"{f'seed {seed}':<16}{'final loss':>12}{'over plain':>12}{'s/step':>9}"
        lines.append(f"{head}   after each tenth of the steps")
        for arm, found in arms.items():
            curve = " ".join(f"{loss:.3f}" for loss in found["curve"])
            final = found["curve"][-1]
            lines.append(f"{arm:<16}{final:>12.4f}{final / plain:>12.4f}{found['seconds_per_step']:>9.3f}   {curve}")
        afterwards = arms["plain"]["rounded_afterwards"]
        lines.append(f"{'rounded after':<16}{afterwards:>12.4f}{afterwards / plain:>12.4f}")
    if len(seeds) > 1:
        means = ", ".join(f"{arm} {ratio:.4f}" for arm, ratio in ratios(seeds).items())
        lines.append(f"mean over {len(seeds)} seeds, over plain: {means}")
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=64, help="a multiple of 64: the latent is half of it")
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser.parse_args(argv)


def main() -> int:
    """See the module docstring."""
    options = parse()
    from k3_plugins import platform

    logging.disable(logging.WARNING)  # Megatron warns about every model that is built
    warnings.simplefilter("ignore")
    platform.select("cpu")
    import torch
    from megatron.core import parallel_state

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29578"}.items():
        os.environ.setdefault(name, value)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    seeds = measure(options)
    print(json.dumps({"options": vars(options), "seeds": seeds}, indent=2) if options.json else table(seeds))
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
