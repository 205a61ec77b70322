"""What the patches of this feature share in a process: config, pipeline machinery, evaluation choice, statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config, unwrap_model

from k3_plugins.pipeline_parallel.attnres_payload.schedule import PipelinePayload, Signature, Stage
from k3_plugins.transformer.attention_residuals.aggregator import AttentionResidual
from k3_plugins.transformer.attention_residuals.bank import ResidualBank
from k3_plugins.transformer.attention_residuals.block import AttentionResidualBlock
from k3_plugins.transformer.attention_residuals.config import num_blocks
from k3_plugins.transformer.attention_residuals.mtp import AttentionResidualMTPLayer
from k3_plugins.transformer.attention_residuals.ops.two_phase import TwoPhaseChoice, measure_two_phase


def decoder(chunk: torch.nn.Module) -> AttentionResidualBlock | None:
    """The decoder of a (wrapped) model chunk if it has Attention Residuals."""
    block = getattr(unwrap_model(chunk), "decoder", None)  # a chunk of another kind of model has none
    return block if isinstance(block, AttentionResidualBlock) else None


def decoders(chunks: Sequence[torch.nn.Module]) -> list[AttentionResidualBlock]:
    """The decoders with Attention Residuals of these model chunks."""
    return [block for chunk in chunks if (block := decoder(chunk)) is not None]


def aggregations(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, AttentionResidual]]:
    """(name, module) of every aggregation on this rank."""
    for chunk in chunks:
        for name, module in unwrap_model(chunk).named_modules():
            if isinstance(module, AttentionResidual):
                yield name, module


def banks(chunks: Sequence[torch.nn.Module]) -> Iterator[ResidualBank]:
    """The bank of every stack of layers on this rank: the decoders' and the MTP depths'."""
    for chunk in chunks:
        for module in unwrap_model(chunk).modules():
            if isinstance(module, (AttentionResidualBlock, AttentionResidualMTPLayer)):
                yield module.residual_bank


class Runtime:
    """One per process; the patches call its methods."""

    def __init__(self) -> None:
        self.pipeline = PipelinePayload(describe=self.describe, prepare=self.prepare)
        self.choice: TwoPhaseChoice | None = None
        """Outcome of the benchmark, if --attn-res-two-phase auto ran it."""
        self.two_phase: bool | None = None
        """What is used; None before the first step."""
        self._chunks: Sequence[torch.nn.Module] = ()

    def describe(self, chunks: Sequence[torch.nn.Module]) -> Signature | None:
        """What this rank tells the others of its pipeline group."""
        blocks = decoders(chunks)
        if len(blocks) < len(chunks):
            return None
        config, own = get_model_config(chunks[0]), blocks[0].attention_residuals
        return Signature(
            block_size=own.attn_res_block_size,
            cache=own.attn_res_pp_cache,
            num_layers=config.num_layers,
            width=config.hidden_size,
            dtype=str(config.pipeline_dtype),
            stages=tuple(
                Stage(
                    first_layer=block.layers[0].layer_number - 1 if len(block.layers) else -1,
                    num_layers=len(block.layers),
                    aggregates_output=block.aggregates_output,
                )
                for block in blocks
            ),
        )

    def prepare(self, chunks: Sequence[torch.nn.Module], call: dict[str, Any]) -> None:
        """Before every run of a schedule: choose the evaluation (once), and ask for fresh statistics."""
        blocks = decoders(chunks)
        if not blocks:
            return
        if self.two_phase is None:
            self.two_phase = self._choose(blocks[0], call)
        for bank in banks(chunks):
            bank.two_phase = self.two_phase
        if not call.get("forward_only"):
            for block in blocks:
                block.request_measurement()
        self._chunks = chunks

    def _choose(self, block: AttentionResidualBlock, call: dict[str, Any]) -> bool:
        """Whether to evaluate in two phases. Collective over all ranks with 'auto': rank 0 measures, all follow."""
        mode, config = block.attention_residuals.attn_res_two_phase, block.config
        if mode != "auto":
            return mode == "on"
        if config.deterministic_mode:
            self._announce("single-pass, because of --deterministic-mode")
            return False
        answer: list[Any] = [None]
        if torch.distributed.get_rank() == 0:
            size = block.attention_residuals.attn_res_block_size
            sequence_shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
            split = config.context_parallel_size * sequence_shards
            answer[0] = measure_two_phase(
                num_queries=2 * min(size, config.num_layers),
                num_sources=max(1, (num_blocks(config.num_layers, size) + 1) // 2),
                num_tokens=max(1, call["seq_length"] * call["micro_batch_size"] // split),
                hidden_size=config.hidden_size,
                dtype=config.params_dtype,
                device=next(block.parameters()).device,
            )
        torch.distributed.broadcast_object_list(answer, src=0)
        choice: TwoPhaseChoice = answer[0]
        self.choice = choice
        self._announce(str(choice))
        return choice.enabled

    @staticmethod
    def _announce(text: str) -> None:
        if torch.distributed.get_rank() == 0:
            print(f"attention residuals: evaluation {text}", flush=True)

    def mean_relative_entropy(self) -> float | None:
        """Mean over all aggregations of the model with more than one source. Collective over all ranks.

        Every rank contributes what it measured in the first micro-batch of the last step; replicas count equally.
        """
        values = [m.relative_entropy for _, m in aggregations(self._chunks) if m.relative_entropy is not None]
        device = next(unwrap_model(self._chunks[0]).parameters()).device if self._chunks else "cpu"
        total = torch.zeros(2, dtype=torch.float32, device=device)
        if values:
            total[0], total[1] = torch.stack(values).float().sum(), len(values)
        torch.distributed.all_reduce(total)
        return (total[0] / total[1]).item() if total[1] > 0 else None

    def publish_source_weights(self) -> None:
        """Average `measured` over all ranks that hold the same layers, into the buffers that a checkpoint saves.

        What was not measured (a frozen decoder, the same on all of them) keeps what was loaded.
        """
        measured = [(one, one.measured) for _, one in aggregations(self._chunks) if one.measured is not None]
        if not measured:
            return
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        weights = torch.stack([own for _, own in measured])
        torch.distributed.all_reduce(weights, group=group)
        for (module, _), mean in zip(measured, weights / group.size(), strict=True):
            module.source_weights.copy_(mean)


RUNTIME = Runtime()
