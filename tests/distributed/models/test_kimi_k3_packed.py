"""Packed documents through the whole model: each behaves as if it were alone, whatever lies beside it."""

import torch

from tests.harness.spawn import spawn

# fp32 rounding through four layers; measured 4e-7.
FP32 = 1e-5

PACKINGS = [[0, 24], [0, 5, 24], [0, 1, 2, 4, 7, 24], [0, 0, 9, 9, 24], [0, 3, 17]]


def build_model():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from k3_plugins.models.kimi_k3.layer_specs import block_spec
    from k3_plugins.transformer.gated_mla.config import GatedMLAConfig
    from k3_plugins.transformer.kda.config import KDAConfig

    parallel_state.initialize_model_parallel()
    torch.manual_seed(3)
    tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    config = MLATransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=2, ffn_hidden_size=64, kv_channels=16,
        linear_attention_freq=[1, 0, 1, 0], q_lora_rank=16, kv_lora_rank=12, qk_head_dim=8, qk_pos_emb_head_dim=4,
        v_head_dim=12, normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False, transformer_impl="local",
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, kda=KDAConfig(kda_gate="softplus"), mla=GatedMLAConfig()),
        vocab_size=64,
        max_sequence_length=64,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def packed_params(bounds):
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor(bounds, dtype=torch.int32)
    longest = int((cu[1:] - cu[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def check_packings(rank, world_size):
    model = build_model()
    tokens = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(9))

    def logits(ids, bounds=None):
        positions = torch.arange(ids.shape[1])[None]
        return model(ids, positions, None, packed_seq_params=None if bounds is None else packed_params(bounds))

    worst = 0.0
    for bounds in PACKINGS:
        packed = logits(tokens, bounds)
        for a, b in zip(bounds[:-1], bounds[1:], strict=True):
            if b == a:
                continue
            model.zero_grad()
            alone = logits(tokens[:, a:b])
            worst = max(worst, ((packed[:, a:b] - alone).abs().max() / alone.abs().max()).item())
            alone.square().sum().backward()
            expected = {name: p.grad.clone() for name, p in model.named_parameters()}
            model.zero_grad()
            packed[:, a:b].square().sum().backward(retain_graph=True)
            for name, p in model.named_parameters():
                error = (p.grad - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-12)
                worst = max(worst, error.item()) if expected[name].abs().max() > 1e-9 else worst
                assert expected[name].abs().max() > 1e-9 or p.grad.abs().max() < 1e-9, name
    return worst


def test_each_document_is_alone():
    assert spawn(check_packings, 1)[0] <= FP32
