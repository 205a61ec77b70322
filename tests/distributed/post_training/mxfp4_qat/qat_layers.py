"""One mixture-of-experts layer under quantization-aware training, on ranks, against a loop over tokens.

The loop rounds with ModelOpt's own packed tensors, in fp64, gradients straight through. Whatever moves rows or weights
between ranks must show the experts the same rounded operands.

Letters: T tokens of all ranks, k choices, E experts, l input width, f expert width.
"""

from __future__ import annotations

import torch
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor
from torch import Tensor

from k3_plugins.post_training.mxfp4_qat.config import MXFP4QATConfig
from k3_plugins.transformer.moe.ops import naive
from tests.distributed.transformer.moe import layer_harness as harness
from tests.distributed.transformer.moe.layer_harness import Case


def mxfp4(x: Tensor) -> Tensor:
    """ModelOpt's values, straight through."""
    tensor, scale = MXFP4QTensor.quantize(x.detach().contiguous(), 32)
    return x + (tensor.dequantize(scale=scale, block_sizes={-1: 32}) - x).detach()


def mxfp8(x: Tensor) -> Tensor:
    """ModelOpt's values, straight through."""
    tensor, scale = MXFP8QTensor.quantize(x.detach().contiguous())
    return x + (tensor.dequantize(scale=scale) - x).detach()


def experts(x: Tensor, chosen: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """``sum_i Q8(p_i act(Q8(x) Q4(W1)^T)) Q4(W2)^T``: ``[T, l]``.

    Args:
        x: ``[T, l]``.
        chosen: int ``[T, k]``.
        p: ``[T, k]``.
        w1: ``[E, 2 f, l]``.
        w2: ``[E, l, f]``.
    """
    w1, w2, x = mxfp4(w1), mxfp4(w2), mxfp8(x)
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for e, weight in zip(chosen[t].tolist(), p[t], strict=True):
            gate, up = (w1[e] @ x[t]).chunk(2)
            total = total + w2[e] @ mxfp8((weight * naive.situ_glu(gate, up))[None])[0]
        rows.append(total)
    return torch.stack(rows)


def oracle(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Output ``[T, d]`` and gradients by name of the whole layer; as `layer_harness.oracle`, with rounding."""
    weights = {name: w.clone().requires_grad_() for name, w in harness.weights_of(case).items()}
    x, upstream, _ = harness.tokens_of(case)
    x = x.requires_grad_()
    chosen, p = naive.route(x, weights["router"], torch.zeros(case.E, dtype=torch.float64), case.k)
    u = experts(x @ weights["down"].T, chosen, p, weights["w1"], weights["w2"])
    u = u / torch.sqrt(u.pow(2).mean(-1, keepdim=True) + 1e-5) * weights["norm"]
    y = u @ weights["up"].T
    if case.F:
        gate, up = (x @ weights["shared1"].T).chunk(2, -1)
        y = y + naive.situ_glu(gate, up) @ weights["shared2"].T
    grads = torch.autograd.grad((y * upstream).sum(), [x, *weights.values()])
    return y.detach(), dict(zip(["x", *weights], grads, strict=True))


def build(case: Case, balanced: bool, memory_efficient: bool = True):
    """The layer with quantizers, and its weights."""
    from k3_plugins.post_training.mxfp4_qat.convert import quantize_routed_experts
    from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig
    from k3_plugins.transformer.moe.latent_moe.layer import LatentMoELayer
    from k3_plugins.transformer.moe.latent_moe.spec import moe_module_spec
    from k3_plugins.transformer.moe.moonep.config import MoonEPConfig
    from k3_plugins.transformer.moe.moonep.spec import layer_options

    harness.start(case)
    config = harness.config_of(case)
    settings = MoonEPConfig(moe_moonep_memory_efficient=memory_efficient)
    options = layer_options(LatentMoELayer, settings) if balanced else {}
    layer = moe_module_spec(config, LatentMoEConfig(), **options)(config=config, layer_number=1)
    layer.set_layer_number(1)
    harness.fill(layer, case)
    names = set(layer.state_dict())
    quantize_routed_experts(layer, MXFP4QATConfig())
    assert set(layer.state_dict()) == names  # quantizers hold no state
    return layer


def errors(layer, case: Case) -> dict[str, float]:
    """Relative error (over each tensor's largest entry) of the output and every gradient."""
    output, gradients = harness.run(layer, case)
    want, expected = oracle(case)
    here, cuts = harness.local_tokens(case), harness.shares(layer, case)
    pairs = {"output": (output, want[here]), "x": (gradients["x"], expected["x"][here])}
    pairs |= {name: (gradients[name], cuts[name][1](expected[name])) for name in cuts}
    return {
        name: float((got.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-12))
        for name, (got, exact) in pairs.items()
    }
