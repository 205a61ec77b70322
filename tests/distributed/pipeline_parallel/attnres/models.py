"""Small GPT models with Attention Residuals, built on Megatron-Core alone, whose weights follow from their names."""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer import TransformerConfig, transformer_block

from k3_plugins.models.kimi_k3.layer_specs import block_spec
from k3_plugins.pipeline_parallel.attnres_payload.schedule import PipelinePayload
from k3_plugins.transformer.attention_residuals.block import install
from k3_plugins.transformer.attention_residuals.config import AttentionResidualsConfig
from k3_plugins.transformer.attention_residuals.recompute import wrap_checkpointed_forward
from k3_plugins.transformer.attention_residuals.runtime import Runtime
from k3_plugins.transformer.attention_residuals.spec import wrap_block_spec, wrap_mtp_spec

HIDDEN, VOCABULARY, SEQUENCE = 16, 24, 6


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout and what to run on it."""

    pipeline: int
    virtual: int | None
    layers: int
    block: int
    cache: str = "on"
    overlap: bool = False
    flush: bool = False
    microbatches: int = 4
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    two_phase: str = "off"
    recompute: bool = False
    layout: str | None = None
    mtp: int | None = None

    def __str__(self) -> str:
        changed = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        }
        return " ".join(f"{name}={value}" for name, value in changed.items())


def patch_recompute() -> None:
    """What the engine does for a whole job."""
    if not hasattr(transformer_block.checkpointed_forward, "knows_attention_residuals"):
        transformer_block.checkpointed_forward = wrap_checkpointed_forward(transformer_block.checkpointed_forward)


def build(case: Case, **flags: str) -> list[GPTModel]:
    """The model chunks of this rank; parallel state is initialised for the case. fp64."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=case.pipeline, virtual_pipeline_model_parallel_size=case.virtual
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    patch_recompute()
    overlap = case.overlap or case.flush
    config = TransformerConfig(
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=24,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        use_cpu_initialization=True,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.virtual,
        num_layers_in_first_pipeline_stage=case.first_stage_layers,
        num_layers_in_last_pipeline_stage=case.last_stage_layers,
        pipeline_model_parallel_layout=case.layout,
        microbatch_group_size_per_vp_stage=max(case.pipeline, 1),
        mtp_num_layers=case.mtp,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=overlap,
        overlap_p2p_comm_warmup_flush=case.flush,
        batch_p2p_comm=not overlap,
        **({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
           if case.recompute else {}),
    )
    residuals = AttentionResidualsConfig(
        attn_res_block_size=case.block, attn_res_pp_cache=case.cache, attn_res_two_phase=case.two_phase, **flags
    )
    chunks = []
    for stage in range(case.virtual or 1):
        vp_stage = stage if case.virtual else None
        pre = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        post = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        spec = block_spec(config, vp_stage, kda=None, mla=None)
        depths = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=wrap_block_spec(spec, residuals),
            mtp_block_spec=wrap_mtp_spec(depths, residuals),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=pre,
            post_process=post,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        install(chunk.decoder, residuals)
        chunk.model_type = "encoder_or_decoder"
        _fill(chunk)
        chunks.append(chunk)
    return chunks


def global_names(chunk: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Parameters by the name they have in an unsplit model."""
    offset = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
    named = {}
    for name, parameter in chunk.named_parameters():
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(int(words[2]) + offset)
        named[".".join(words)] = parameter
    return named


def _fill(chunk: GPTModel) -> None:
    with torch.no_grad():
        for name, parameter in global_names(chunk).items():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            norm = "norm" in name
            parameter.copy_((1.0 if norm else 0.0) + (0.3 if parameter.dim() == 1 else 0.2) * noise)


def tokens(microbatch: int, batch: int) -> torch.Tensor:
    """Token ids [b, s] of a micro-batch."""
    generator = torch.Generator().manual_seed(100 + microbatch)
    return torch.randint(0, VOCABULARY, (batch, SEQUENCE), generator=generator)


def forward_step(iterator, model):
    """A smooth fp64 loss of the logits: Megatron's own cross entropy works in fp32."""
    microbatch, batch = next(iterator)
    ids = tokens(microbatch, batch)
    positions = torch.arange(SEQUENCE).expand(batch, -1)
    output = model(ids, positions, None)

    def loss(logits):
        picked = torch.log_softmax(logits, dim=-1).gather(-1, ids.roll(-1, 1).unsqueeze(-1))
        value = -picked.mean()
        return value, {"loss": value.detach().item()}

    return output, loss


def run_schedule(schedule, chunks, case: Case, *, batch: int = 2, forward_only: bool = False) -> list[float]:
    """One step; losses of the micro-batches on the last stage."""
    numbered = [iter([(m, batch) for m in range(case.microbatches)]) for _ in chunks]
    result = schedule(
        forward_step_func=forward_step,
        data_iterator=numbered if len(chunks) > 1 else numbered[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=case.microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=batch,
        forward_only=forward_only,
    )
    return [entry["loss"] for entry in result]


def machinery() -> PipelinePayload:
    """A fresh process-wide runtime's pipeline part."""
    return Runtime().pipeline
