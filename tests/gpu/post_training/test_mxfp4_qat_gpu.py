"""On a CUDA device: the torch arithmetic, ModelOpt's fused kernel, and Transformer Engine's grouped experts.

Written without a GPU at hand: NOT RUN yet.
"""

import socket

import pytest
import torch

from k3_plugins.post_training.mxfp4_qat import formats

pytestmark = pytest.mark.gpu

# Rows in bf16, two GEMMs: 2^-8 for each of the rows, hidden layer, activation and output.
BF16 = 0.03


def test_the_arithmetic_has_the_bits_of_the_cpu():
    x = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 256)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        values = x.to(dtype)
        for function in (formats.mxfp4, formats.mxfp8):
            assert torch.equal(function(values.cuda()).cpu(), function(values)), (dtype, function.__name__)
        for ours, theirs in zip(formats.pack_mxfp4(values.cuda()), formats.pack_mxfp4(values), strict=True):
            assert torch.equal(ours.cpu(), theirs), dtype


def test_modelopts_kernel_agrees_with_the_packed_tensors():
    """Where they disagree the backend must not be used for weights that are exported: the count is in the message."""
    pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.quantization.tensor_quant import dynamic_block_quant

    x = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)
    for bits, function in (((2, 1), formats.mxfp4), ((4, 3), formats.mxfp8)):
        kernel = dynamic_block_quant(x, formats.BLOCK, None, None, bits, (8, 0), None, None, True)
        differing = (kernel != function(x)).sum().item()
        assert differing == 0, f"{differing} of {x.numel()} values differ for {bits}"


@pytest.fixture
def one_process(monkeypatch):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_te_grouped_experts_equal_stacked_experts(one_process):
    """The same weights through `TEGroupedMLP` and `GroupedExperts`: outputs and weight gradients, with quantizers."""
    pytest.importorskip("transformer_engine.pytorch")
    pytest.importorskip("modelopt.torch.quantization")
    from megatron.core.transformer import TransformerConfig

    from k3_plugins.post_training.mxfp4_qat.config import MXFP4QATConfig
    from k3_plugins.post_training.mxfp4_qat.convert import quantize_routed_experts, quantizers
    from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig
    from k3_plugins.transformer.moe.latent_moe.spec import moe_module_spec

    def build(implementation):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=128,
            num_attention_heads=2,
            num_moe_experts=4,
            moe_router_topk=2,
            moe_ffn_hidden_size=128,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=True,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            bias_activation_fusion=False,
            transformer_impl=implementation,
            params_dtype=torch.bfloat16,
            bf16=True,
            gradient_accumulation_fusion=False,
        )
        layer = moe_module_spec(config, LatentMoEConfig())(config=config, layer_number=1).cuda()
        layer.set_layer_number(1)
        quantize_routed_experts(layer, MXFP4QATConfig())
        return layer

    stacked, grouped = build("local"), build("transformer_engine")
    assert len(quantizers(grouped)) == 2 * 4 + 2  # a weight quantizer for each expert, an input quantizer for each GEMM
    with torch.no_grad():
        grouped.router.weight.copy_(stacked.router.weight)
        for e in range(4):
            getattr(grouped.experts.linear_fc1, f"weight{e}").copy_(stacked.experts.weight1[e])
            getattr(grouped.experts.linear_fc2, f"weight{e}").copy_(stacked.experts.weight2[e])
    x = torch.randn(64, 2, 128, device="cuda", dtype=torch.bfloat16)
    outputs = []
    for layer in (stacked, grouped):
        output, _ = layer(x)
        output.float().square().mean().backward()
        outputs.append(output.detach().float())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=BF16, atol=BF16 * outputs[0].abs().max().item())
    for e in range(4):
        theirs, ours = getattr(grouped.experts.linear_fc1, f"weight{e}").grad, stacked.experts.weight1.grad[e]
        torch.testing.assert_close(theirs.float(), ours.float(), rtol=BF16, atol=BF16 * ours.abs().max().item())
