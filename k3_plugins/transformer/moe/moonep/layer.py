"""MoonEP in Megatron's ``MoELayer``: a dispatcher of its own, and routed experts computed across the group.

Megatron chooses its dispatcher in a closed if-chain, so the layer is built with a stock one that is then replaced. The
mixin works on any ``MoELayer`` subclass whose experts are `GroupedExperts`: ``balanced(LatentMoELayer)``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from k3_plugins.transformer.moe.experts import GroupedExperts
from k3_plugins.transformer.moe.moonep.balanced import Report, balanced_experts
from k3_plugins.transformer.moe.moonep.config import MoonEPConfig
from k3_plugins.transformer.moe.moonep.transport import AllToAll


class MoonEPDispatcher(MoETokenDispatcher):
    """Turns Megatron's routing map into choices; the rows move inside `balanced_experts`.

    Letters: T tokens, E experts, k choices, l width.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config, pg_collection)
        self.transport = AllToAll(self.ep_group)
        self.hidden_shape: torch.Size | None = None
        self.experts: Tensor | None = None

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """``[s, b, l]``, bool ``[T, E]`` and ``[T, E]`` to rows ``[T, l]`` and weights ``[T, k]``."""
        self.hidden_shape = tokens.shape
        num_experts, k = routing_map.shape[1], self.config.moe_router_topk
        # Ascending expert ids; rows of the map without a choice (padding) give -1.
        falling = num_experts - torch.arange(num_experts, device=routing_map.device)
        ranked = torch.where(routing_map, falling, 0).topk(k, dim=1).values
        self.experts = torch.where(ranked > 0, num_experts - ranked, -1)
        weights = probs.gather(1, self.experts.clamp(min=0))
        return tokens.reshape(-1, tokens.shape[-1]), torch.where(self.experts >= 0, weights, 0)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing yet."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The choices take the place of token counts."""
        return hidden_states, self.experts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Already combined."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Already combined."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """``[T, l]`` to ``[s, b, l]``."""
        return hidden_states.view(self.hidden_shape)


class _MoonEP:
    """The mixin; see `balanced`."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *args: Any,
        moonep_config: MoonEPConfig,
        **kwargs: Any,
    ) -> None:
        check_config(config)
        if pg_collection is None:
            pg_collection = get_default_pg_collection()
        super().__init__(config, submodules, layer_number, pg_collection, *args, **kwargs)
        if not isinstance(self.experts, GroupedExperts):
            raise ValueError(
                f"moonep computes stacked experts, not {type(self.experts).__name__}; pass --transformer-impl local."
            )
        self.moonep_config = moonep_config
        self.token_dispatcher = MoonEPDispatcher(config, pg_collection)
        self.report: Report | None = None

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The router's choices, without those of padding tokens (mask ``[s, b]``, True at padding)."""
        probs, routing_map = super().route(hidden_states, padding_mask)
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        return probs, routing_map

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """``[T, l]`` and ``[T, k]`` to the combined ``[T, l]``."""
        hidden_states, chosen, probs = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        output, self.report = balanced_experts(
            hidden_states,
            probs.to(torch.promote_types(probs.dtype, torch.float32)),
            chosen,
            self.experts.weight1,
            self.experts.weight2,
            self.experts.activation,
            self.token_dispatcher.transport,
            self.moonep_config.moe_moonep_memory_efficient,
        )
        return output, None


@functools.cache
def balanced(layer: type[MoELayer]) -> type[MoELayer]:
    """``layer`` with MoonEP; its constructor takes ``moonep_config`` as well.

    Raises (from the constructor):
        ValueError: experts that are not `GroupedExperts`, expert tensor parallelism, or dropped tokens.
    """
    return type(f"MoonEP{layer.__name__}", (_MoonEP, layer), {})


def is_balanced(module: object) -> bool:
    """Whether a module is a layer made by `balanced`."""
    return isinstance(module, _MoonEP)


def check_config(config: TransformerConfig) -> None:
    """Refuse what the balanced layer cannot do.

    Raises:
        ValueError: naming the flag and what to pass.
    """
    problems = (
        (config.expert_tensor_parallel_size > 1, "--expert-tensor-parallel-size must be 1"),
        (config.moe_expert_capacity_factor is not None, "--moe-expert-capacity-factor drops tokens; drop it"),
        (config.moe_shared_expert_overlap, "--moe-shared-expert-overlap belongs to Megatron's dispatchers; drop it"),
        (config.add_bias_linear, "experts have no biases; pass --disable-bias-linear"),
        (config.moe_router_topk > config.num_moe_experts, "--moe-router-topk is more than --num-experts; lower it"),
    )
    for wrong, advice in problems:
        if wrong:
            raise ValueError(f"moonep: {advice}.")
