"""``TopKRouter`` with Quantile Balancing: routes with the bias, counts margins, and is updated once per step.

What is counted: every valid token of a training forward pass, once. Evaluation is not (the module is not training), nor
is a forward pass that activation recomputation repeats (it runs inside the backward pass), nor padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from k3_plugins.transformer.moe.quantile_balancing import estimator
from k3_plugins.transformer.moe.quantile_balancing.config import QuantileBalancingConfig


class QuantileBalancingRouter(TopKRouter):
    """Sigmoid scores; the bias selects experts and does not enter the routing weights.

    The bias is the buffer ``expert_bias`` (fp32, in checkpoints under the name Megatron uses for its own bias rule).

    Args:
        config: Megatron's.
        pg_collection: read for the tensor, context and data-parallel groups.
        is_mtp_layer: passed on.
        qb_config: the feature's settings.

    Raises:
        ValueError: options that contradict the rule (another score function, another balancing rule, groups, ...).
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        is_mtp_layer: bool = False,
        *,
        qb_config: QuantileBalancingConfig,
    ) -> None:
        check_config(config)
        super().__init__(config, pg_collection, is_mtp_layer)
        self.qb_config = qb_config
        # Under sequence parallelism, and only there, tensor-parallel ranks hold different tokens.
        split = config.sequence_parallel or pg_collection.tp.size() == 1
        self.count_group = pg_collection.tp_dp_cp if split else pg_collection.dp_cp
        if self.count_group is None:  # would mean all ranks, pipeline stages with other layers among them
            self.count_group = (
                parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
                if split
                else parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
        device = self.weight.device
        del self.expert_bias
        self.register_buffer("expert_bias", torch.zeros(self.num_experts, dtype=torch.float32, device=device))
        # The last column counts the tokens that selected the expert.
        self.register_buffer(
            "qb_counts",
            torch.zeros(self.num_experts, estimator.NUM_BINS + 1, dtype=torch.int32, device=device),
            persistent=False,
        )
        self.counted_forwards = 0
        self.last_metrics: Tensor | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``TopKRouter.routing`` for ``logits [s, b, E]``; ``padding_mask`` is True at padding."""
        logits = logits.view(-1, self.num_experts)
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits, padding_mask=padding)
        with torch.no_grad():
            scores = torch.sigmoid(logits.float())
            indices, cutoff = estimator.select(scores, self.expert_bias, self.topk)
        probs, routing_map = topk_routing_with_score_function(
            logits,
            self.topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function="sigmoid",
            precomputed_indices=indices,
        )
        if self.training and torch._C._current_graph_task_id() == -1:
            self._count(scores, cutoff, routing_map, padding)
        return probs, routing_map

    @torch.no_grad()
    def _count(self, scores: Tensor, cutoff: Tensor, routing_map: Tensor, padding: Tensor | None) -> None:
        bins = self.qb_config.moe_qb_bins
        valid = None if padding is None else ~padding
        edges = estimator.bin_edges(self.expert_bias, bins)
        histogram = torch.zeros_like(self.qb_counts[:, :-1])
        if self.topk < self.num_experts:
            estimator.count(scores, cutoff, self.expert_bias, edges, bins, valid, histogram)
        chosen = routing_map if valid is None else routing_map & valid[:, None]
        self.qb_counts[:, :-1] += histogram
        self.qb_counts[:, -1] += chosen.sum(0, dtype=torch.int32)
        self.counted_forwards += 1


def check_config(config: TransformerConfig) -> None:
    """Refuse router options that contradict Quantile Balancing.

    Raises:
        ValueError: naming the flag and what to pass.
    """
    problems = (
        (config.moe_router_score_function != "sigmoid", "--moe-router-score-function must be sigmoid"),
        (config.moe_router_load_balancing_type != "none", "--moe-router-load-balancing-type must be none"),
        (config.moe_router_enable_expert_bias, "--moe-router-enable-expert-bias is another bias rule; drop it"),
        (config.moe_router_num_groups is not None, "--moe-router-num-groups is not supported; drop it"),
        (config.moe_expert_capacity_factor is not None, "--moe-expert-capacity-factor is not supported; drop it"),
        (config.moe_router_fusion, "--moe-router-fusion is not supported; drop it"),
        (config.moe_enable_routing_replay, "--moe-enable-routing-replay is not supported; drop it"),
    )
    for wrong, advice in problems:
        if wrong:
            raise ValueError(f"quantile-balancing: {advice}.")


def routers_of(model_chunks: Sequence[Any]) -> list[QuantileBalancingRouter]:
    """This rank's Quantile Balancing routers, in the order of layers."""
    return [m for chunk in model_chunks for m in chunk.modules() if isinstance(m, QuantileBalancingRouter)]


@torch.no_grad()
def update(routers: Sequence[QuantileBalancingRouter]) -> None:
    """Set every router's bias from the counts of the step, with one all-reduce for all of them, and clear the counts.

    Called on all ranks of the counting group, after the optimizer step.
    """
    routers = [router for router in routers if router.training]
    if not routers:
        return
    counts = torch.stack([router.qb_counts for router in routers])
    dist.all_reduce(counts, group=routers[0].count_group)
    for router, count in zip(routers, counts, strict=True):
        router._maintain_float32_expert_bias()
        bias, settings = router.expert_bias, router.qb_config
        if router.topk < router.num_experts:
            edges = estimator.bin_edges(bias, settings.moe_qb_bins)
            fresh = estimator.estimate(count[:, :-1], bias, edges, settings.moe_qb_bins, router.topk)
            fresh = settings.moe_qb_ema * bias + (1 - settings.moe_qb_ema) * fresh
            bias.copy_(fresh - fresh.mean())
        load = count[:, -1].float()
        tokens = count[0, :-1].sum()
        router.last_metrics = torch.stack(
            (load.max() / load.mean().clamp(min=1e-20), bias.max() - bias.min(), tokens, load.sum())
        )
        router.qb_counts.zero_()


def counted_tokens(routers: Sequence[QuantileBalancingRouter]) -> list[int]:
    """Tokens of the global batch that each router counted: in the last update, or so far in a step without one yet.

    Called on all ranks of the counting group; waits for the device.
    """
    if not routers:
        return []
    pending = torch.stack([router.qb_counts[0, :-1].sum() for router in routers])
    dist.all_reduce(pending, group=routers[0].count_group)
    updated = [0 if router.last_metrics is None else int(router.last_metrics[2]) for router in routers]
    return [new or old for new, old in zip(pending.tolist(), updated, strict=True)]


def clear(routers: Sequence[QuantileBalancingRouter]) -> None:
    """Forget the counts of a step whose optimizer update was skipped (an overflow): its batch is not balanced on."""
    for router in routers:
        router.qb_counts.zero_()
