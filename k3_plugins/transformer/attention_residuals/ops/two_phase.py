"""Two-phase evaluation: all queries of a block visit the finished blocks together, then each meets the partial sum.

Attention Residuals (arXiv 2603.15031), section on two-phase computation. Phase 1 runs once per block of layers: for
Q queries over the S finished sources it keeps the un-normalised sum, the maximum and the denominator of the softmax.
Phase 2 merges one more source, the partial sum, by online softmax. The result is exact (the same sums in another
order); only the traffic changes: S sources are read once instead of Q times, for Q*T*d extra transient elements.

Shapes: Q queries, S sources, T tokens, d hidden size.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_plugins.transformer.attention_residuals.ops.aggregate import combine, key_scale_and_logit, math_dtype


@dataclass(frozen=True)
class InterBlock:
    """One query's statistics over the finished blocks: logits [S, T], maximum [T], denominator [T], total [T, d]."""

    logits: Tensor
    maximum: Tensor
    denominator: Tensor
    total: Tensor

    def merge(
        self, partial: Tensor | None, scaled_query: Tensor, eps: float, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add the partial sum (if any) and normalise -> (hidden shaped as `like`, weights [S or S+1, T])."""
        if partial is None:
            weights = torch.exp(self.logits - self.maximum) / self.denominator
            hidden = self.total / self.denominator.unsqueeze(-1)
            return hidden.to(like.dtype).view(like.shape), weights
        value = partial.reshape(-1, partial.shape[-1]).to(self.total.dtype)
        _, logit = key_scale_and_logit(value, scaled_query, eps)
        maximum = torch.maximum(self.maximum, logit)
        shrink, own = torch.exp(self.maximum - maximum), torch.exp(logit - maximum)
        denominator = self.denominator * shrink + own
        hidden = self.total * (shrink / denominator).unsqueeze(-1)
        hidden.addcmul_(value, (own / denominator).unsqueeze(-1))
        logits = torch.cat([self.logits, logit.unsqueeze(0)])
        weights = torch.exp(logits - maximum) / denominator
        return hidden.to(like.dtype).view(like.shape), weights


@torch.no_grad()
def inter_block_pass(scaled_queries: Tensor, sources: list[Tensor], eps: float) -> list[InterBlock]:
    """Phase 1. `scaled_queries` [Q, d] (query * key weight), S `sources` [..., d] -> one InterBlock per query."""
    dtype, hidden_size = math_dtype(sources[0]), sources[0].shape[-1]
    queries = scaled_queries.to(dtype)
    values = torch.stack([source.reshape(-1, hidden_size) for source in sources]).to(dtype)
    scale = torch.linalg.vector_norm(values, dim=-1).square_().div_(hidden_size).add_(eps).rsqrt_()
    logits = torch.einsum("qd,std->qst", queries, values).mul_(scale)
    maximum = logits.amax(dim=1)
    exponentials = torch.exp(logits - maximum.unsqueeze(1))
    denominator = exponentials.sum(dim=1)
    total = torch.einsum("qst,std->qtd", exponentials, values)
    return [
        InterBlock(logits[query], maximum[query], denominator[query], total[query])
        for query in range(queries.shape[0])
    ]


@dataclass(frozen=True)
class TwoPhaseChoice:
    """Outcome of the start-up benchmark, in milliseconds for one block of layers."""

    enabled: bool
    single_pass_ms: float
    two_phase_ms: float

    def __str__(self) -> str:
        name = "two-phase" if self.enabled else "single-pass"
        return (
            f"{name} (one block of layers: single pass {self.single_pass_ms:.2f} ms,"
            f" two-phase {self.two_phase_ms:.2f} ms)"
        )


@torch.no_grad()
def measure_two_phase(
    num_queries: int,
    num_sources: int,
    num_tokens: int,
    hidden_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    eps: float = 1e-5,
    repeats: int = 3,
) -> TwoPhaseChoice:
    """Time one block of layers (forward only: the backward is the same code) both ways, best of `repeats`.

    At most 4096 tokens are used, so that the benchmark stays short and small at any sequence length.
    """
    tokens = min(num_tokens, 4096)
    # values do not change the time, so the global random state is left alone
    ramp = torch.linspace(-1.0, 1.0, tokens * hidden_size, device=device).view(tokens, hidden_size)
    sources = [(ramp * (index + 1)).to(dtype) for index in range(num_sources)]
    partial = ramp.to(dtype)
    wide = math_dtype(partial)
    queries = torch.linspace(-0.1, 0.1, num_queries * hidden_size, device=device, dtype=wide).view(num_queries, -1)

    def single_pass() -> None:
        for query in queries:
            logits = torch.stack(
                [key_scale_and_logit(value.to(wide), query, eps)[1] for value in (*sources, partial)]
            )
            combine(torch.softmax(logits, dim=0), (*sources, partial))

    def two_phase() -> None:
        for query, inter in zip(queries, inter_block_pass(queries, sources, eps), strict=True):
            inter.merge(partial, query, eps, like=partial)

    def best(run: Callable[[], None]) -> float:
        times = []
        for _ in range(repeats + 1):  # the first run warms up
            if partial.is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if partial.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:]) * 1e3

    single_ms, two_ms = best(single_pass), best(two_phase)
    return TwoPhaseChoice(enabled=two_ms < single_ms, single_pass_ms=single_ms, two_phase_ms=two_ms)
