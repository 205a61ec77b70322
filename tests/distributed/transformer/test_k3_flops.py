"""The FLOP count against PyTorch's own counter on the real layers, and against Megatron's formula for the rest."""

from argparse import Namespace

import torch

from tests.harness.spawn import spawn


def count_layers(rank, world_size):
    """Forward FLOPs that PyTorch counts in the linear layers of one KDA and one MLA layer, per token."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from torch.utils.flop_counter import FlopCounterMode

    from k3_plugins.transformer.gated_mla.config import GatedMLAConfig
    from k3_plugins.transformer.gated_mla.layer import GatedMLASelfAttention
    from k3_plugins.transformer.kda.config import KDAConfig
    from k3_plugins.transformer.kda.flops import kda_flops_per_token
    from k3_plugins.transformer.kda.layer import KimiDeltaAttention

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = MLATransformerConfig(
        num_layers=1, hidden_size=40, num_attention_heads=4, kv_channels=16, q_lora_rank=24, kv_lora_rank=20,
        qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=12, add_bias_linear=False, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, transformer_impl="local",
    )
    tokens = 6

    def linear_flops(layer):
        total = 0
        for name, module in layer.named_children():
            if name.startswith("linear"):
                width = module.weight.shape[1]
                with FlopCounterMode(display=False) as counter:
                    module(torch.randn(tokens, 1, width))
                total += counter.get_total_flops()
        return total / tokens

    measured = {}
    for kda in (KDAConfig(), KDAConfig(kda_output_gate="low-rank", kda_num_heads=2, kda_num_value_heads=4)):
        layer = KimiDeltaAttention(config, 1, kda)
        heads, value_heads = layer.sizes.num_heads, layer.sizes.num_value_heads
        convolution = 2 * 4 * (2 * heads * 16 + value_heads * 16)
        recurrence = 2 * 4 * value_heads * 16 * 16
        formula = kda_flops_per_token(kda, 40, 4, 16) / 3
        measured[kda.kda_output_gate] = (formula, linear_flops(layer) + convolution + recurrence)
    measured["mla"] = linear_flops(GatedMLASelfAttention(config, 1, GatedMLAConfig()))
    return measured


def test_formulas_count_what_the_layers_compute():
    measured = spawn(count_layers, 1)[0]
    for gate in ("full-rank", "low-rank"):
        formula, counted = measured[gate]
        assert formula == counted

    from megatron.training.training import num_floating_point_operations as stock

    from k3_plugins.transformer.gated_mla.flops import add_gate_flops
    from k3_plugins.transformer.kda.flops import correct_flops, kda_flops_per_token
    from tests.harness.toy_activation import active

    args = Namespace(
        num_layers=4, mtp_num_layers=None, hidden_size=40, num_attention_heads=4, num_query_groups=4, kv_channels=16,
        seq_length=10, ffn_hidden_size=64, swiglu=True, num_experts=None, moe_layer_freq=1, multi_latent_attention=True,
        q_lora_rank=24, kv_lora_rank=20, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=12, padded_vocab_size=96,
        group_query_attention=False, attention_output_gate=False, experimental_attention_variant=None,
        linear_attention_freq=[1, 0, 1, 1], moe_ffn_hidden_size=None, moe_latent_size=None, moe_router_topk=2,
        moe_shared_expert_intermediate_size=None, hybrid_layer_pattern=None,
    )
    with active("kda", "gated-mla") as activation:
        total = add_gate_flops(correct_flops(stock))(args, 2)
        kda_config = activation.config("kda")
    # The same number put together from one-layer models: Megatron's own MLA layer with the gate counted by PyTorch,
    # which has norms that the formula counts and PyTorch's counter does not (q and kv latent widths).
    tokens = 20
    rest = stock(Namespace(**{**vars(args), "multi_latent_attention": False, "kv_channels": 0}), 2)
    core = 3 * 2 * 4 * (12 + 12) / 2 * 2 * 10**2
    mla = 3 * (measured["mla"] + 2 * (24 + 20)) * tokens + core
    kda = 3 * kda_flops_per_token(kda_config, 40, 4, 16) / 3 * tokens
    assert abs(total - (rest + mla + 3 * kda)) <= 1e-9 * total
