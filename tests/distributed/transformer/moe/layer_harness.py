"""One mixture-of-experts layer on N gloo ranks against the token-by-token oracle: output and EVERY gradient.

Each rank builds the layer through its spec, receives its share of one set of global weights and tokens, runs forward
and backward, and reduces the gradients as Megatron's data parallelism would. The oracle is `ops.naive` in fp64 on all
tokens.

Letters: T tokens of all ranks together, d width, l latent, E experts, k per token, f expert width, F shared width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3_plugins.transformer.moe.ops import naive


@dataclass(frozen=True)
class Case:
    """Sizes and routing of one comparison."""

    d: int = 12
    l: int | None = 8
    E: int = 8
    k: int = 2
    f: int = 6
    F: int | None = 10
    tokens_per_rank: int = 16
    batch: int = 2
    tp: int = 1
    ep: int = 1
    etp: int = 1
    routing: str = "plain"  # or balanced, zipf, single_hot, tight: offsets that the router's own weights produce
    padding: str = "none"  # or some, all, rank0
    dispatcher: str = "alltoall"
    dtype: torch.dtype = torch.float64
    beta_gate: float = 4.0  # infinite, both: SwiGLU
    beta_up: float = 25.0
    norm: bool = True
    norm_eps: float = 1e-5
    scaling: float | None = None
    options: dict[str, Any] = field(default_factory=dict)  # further TransformerConfig fields


_layout: tuple[int, int, int] | None = None


def start(case: Case) -> None:
    """Initialise Megatron's process groups for a case, unless its layout is the running one.

    Every gloo group has threads of its own and Megatron makes dozens of groups: cases of one layout share them.
    """
    global _layout
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    layout = (case.tp, case.ep, case.etp)
    if layout != _layout:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.etp,
        )
        _layout = layout
    model_parallel_cuda_manual_seed(123)


def by_layout(cases: Sequence[Case]) -> list[Case]:
    """Cases of one layout side by side."""
    return sorted(cases, key=lambda case: (case.tp, case.ep, case.etp))


def latent_config_of(case: Case, **settings: Any) -> Any:
    """The feature's settings of a case."""
    from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig

    if math.isfinite(case.beta_gate):
        settings |= {"k3_situ_beta_gate": case.beta_gate, "k3_situ_beta_up": case.beta_up}
    else:
        settings |= {"k3_activation": "swiglu"}
    return LatentMoEConfig(moe_latent_norm=case.norm, moe_latent_norm_eps=case.norm_eps, **settings)


def config_of(case: Case) -> Any:
    """The TransformerConfig of a case."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=case.d,
        num_attention_heads=2,
        ffn_hidden_size=24,
        num_moe_experts=case.E,
        moe_router_topk=case.k,
        moe_ffn_hidden_size=case.f,
        moe_latent_size=case.l,
        moe_shared_expert_intermediate_size=case.F,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp64" if case.dtype == torch.float64 else "fp32",
        moe_router_topk_scaling_factor=case.scaling,
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type=case.dispatcher,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        transformer_impl="local",
        params_dtype=case.dtype,
        bf16=case.dtype == torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=case.tp > 1,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        **case.options,
    )


def weights_of(case: Case) -> dict[str, Tensor]:
    """One global set of fp64 weights, by the oracle's names."""
    g = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) / shape[-1] ** 0.5

    width = case.l or case.d
    weights = {
        "router": draw(case.E, case.d),
        "w1": draw(case.E, 2 * case.f, width),
        "w2": draw(case.E, width, case.f),
    }
    if case.l:
        weights |= {"down": draw(case.l, case.d), "up": draw(case.d, case.l)}
        weights |= {"norm": 1 + 0.3 * draw(1, case.l)[0]} if case.norm else {}
    if case.F:
        weights |= {"shared1": draw(2 * case.F, case.d), "shared2": draw(case.d, case.F)}
    # The first channel of every token is 1 (see tokens_of): its router column is an offset per expert.
    e = torch.arange(case.E, dtype=torch.float64)
    offsets = {
        "plain": torch.zeros(case.E),
        "balanced": torch.zeros(case.E),
        "zipf": 2.5 - 1.5 * torch.log1p(e),
        "single_hot": torch.where(e == case.E - 1, 8.0, 0.0),
        "tight": torch.where(e < case.E // max(case.ep, 1), -8.0, 0.0),
    }[case.routing]
    if case.routing == "balanced":
        weights["router"] *= 0.05
    weights["router"][:, 0] = offsets
    return weights


def tokens_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """``x [T, d]``, upstream gradient ``[T, d]`` and padding mask ``[T]`` (True is padding), for all ranks."""
    g = torch.Generator().manual_seed(11)
    T = case.tokens_per_rank * dist.get_world_size()
    x = torch.randn(T, case.d, generator=g, dtype=torch.float64)
    x[:, 0] = 1.0
    upstream = torch.randn(T, case.d, generator=g, dtype=torch.float64)
    padding = torch.zeros(T, dtype=torch.bool)
    if case.padding == "some":
        padding = torch.rand(T, generator=g) < 0.3
    elif case.padding == "all":
        padding[:] = True
    elif case.padding == "rank0":
        padding[: case.tokens_per_rank] = True
    return x, upstream, padding


def oracle(case: Case, bias: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Output ``[T, d]``, gradients by name (with ``x``), and the chosen experts ``[T, k]``."""
    weights = {name: w.clone().requires_grad_() for name, w in weights_of(case).items()}
    x, upstream, padding = tokens_of(case)
    x = x.requires_grad_()
    zero = torch.zeros(case.E, dtype=torch.float64) if bias is None else bias
    experts, p = naive.route(x, weights["router"], zero, case.k, case.scaling or 1.0)
    experts = torch.where(padding[:, None], -1, experts)
    y = naive.latent_moe(
        x,
        experts,
        p,
        weights.get("down"),
        weights.get("up"),
        weights.get("norm"),
        weights["w1"],
        weights["w2"],
        (weights["shared1"], weights["shared2"]) if case.F else None,
        case.beta_gate,
        case.beta_up,
        case.norm_eps,
    )
    grads = torch.autograd.grad((y * upstream).sum(), [x, *weights.values()], allow_unused=True)
    named = dict(zip(["x", *weights], grads, strict=True))
    return y.detach(), {n: torch.zeros_like(weights[n]) if g is None else g for n, g in named.items()}, experts


def fill(layer: Any, case: Case) -> None:
    """Give a layer its share of the global weights."""
    for name, (parameter, cut) in shares(layer, case).items():
        parameter.data.copy_(cut(weights_of(case)[name]))


def shares(layer: Any, case: Case) -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Oracle name -> (parameter, its slice of the whole)."""
    from megatron.core import parallel_state as ps

    tp, t = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    etp, et = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
    ep = ps.get_expert_model_parallel_rank()
    m = case.E // case.ep
    mine = slice(ep * m, (ep + 1) * m)

    def glu(parts: int, index: int, dim: int) -> Callable[[Tensor], Tensor]:
        return lambda w: torch.cat([half.chunk(parts, dim)[index] for half in w.chunk(2, dim)], dim)

    found = {"router": (layer.router.weight, lambda w: w)}
    if hasattr(layer.experts, "weight1"):
        found["w1"] = (layer.experts.weight1, lambda w: glu(etp, et, 1)(w[mine]))
        found["w2"] = (layer.experts.weight2, lambda w: w[mine].chunk(etp, 2)[et])
    if case.l:
        down, up = layer.fc1_latent_proj, layer.fc2_latent_proj
        found["down"] = (down.weight, lambda w: w.chunk(tp)[t] if down.sharded else w)
        found["up"] = (up.weight, lambda w: w.chunk(tp)[t] if up.sharded else w)
        if case.norm:
            found["norm"] = (up.norm.weight, lambda w: w)
    if case.F:
        found["shared1"] = (layer.shared_experts.linear_fc1.weight, glu(tp, t, 0))
        found["shared2"] = (layer.shared_experts.linear_fc2.weight, lambda w: w.chunk(tp, 1)[t])
    return found


def local_tokens(case: Case) -> slice:
    """This rank's tokens among the T of all ranks: data-parallel ranks in order, sequence shards inside."""
    rank = dist.get_rank()
    return slice(rank * case.tokens_per_rank, (rank + 1) * case.tokens_per_rank)


def run(layer: Any, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward on this rank's tokens: the output ``[tokens, d]`` and this rank's share of gradients.

    Gradients are summed over the ranks that hold different tokens, as Megatron's DDP and its sequence-parallel
    all-reduce do.
    """
    from megatron.core import parallel_state as ps

    layer.train()
    x, upstream, padding = (t[local_tokens(case)] for t in tokens_of(case))
    rows = case.tokens_per_rank // case.batch
    hidden = x.to(case.dtype).view(rows, case.batch, case.d).clone().requires_grad_()
    mask = None if case.padding == "none" else padding.view(rows, case.batch).t()
    layer.zero_grad(set_to_none=True)
    output, _ = layer(hidden, padding_mask=mask)
    output.backward(upstream.to(case.dtype).view_as(output))
    gradients = {"x": hidden.grad.reshape(-1, case.d)}
    data = ps.get_data_parallel_group(with_context_parallel=True)
    expert_data = ps.get_expert_data_parallel_group()
    tensor = ps.get_tensor_model_parallel_group()
    for name, (parameter, _) in shares(layer, case).items():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if name in ("w1", "w2"):
            dist.all_reduce(grad, group=expert_data)
        else:
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(grad, group=tensor)
            dist.all_reduce(grad, group=data)
        gradients[name] = grad
    return output.detach().reshape(-1, case.d), gradients


def compare(layer: Any, case: Case, tolerance: float, bias: Tensor | None = None) -> None:
    """Assert that output and every gradient equal the oracle's, relative to each tensor's largest entry."""
    output, gradients = run(layer, case)
    want, expected, _ = oracle(case, bias)
    here = local_tokens(case)
    cuts = shares(layer, case)
    pairs = {"output": (output, want[here]), "x": (gradients["x"], expected["x"][here])}
    pairs |= {name: (gradients[name], cuts[name][1](expected[name])) for name in cuts}
    for name, (got, exact) in pairs.items():
        error = (got.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-12)
        assert error <= tolerance, f"{case}: {name} is off by {error:.2e}"
