"""MoonEP in Megatron's ``MoELayer``: a dispatcher of its own, and routed experts computed across the group.

Megatron chooses its dispatcher in a closed if-chain, so the layer is built with a stock one that is then replaced. The
mixin works on any ``MoELayer`` subclass whose experts are `GroupedExperts`: ``balanced(LatentMoELayer)``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from k3_plugins.transformer.moe.experts import GroupedExperts
from k3_plugins.transformer.moe.moonep.balanced import Flight
from k3_plugins.transformer.moe.moonep.config import MoonEPConfig
from k3_plugins.transformer.moe.moonep.exchange import CollectiveExchange, Exchange, Report
from k3_plugins.transformer.moe.moonep.transport import AllToAll


class MoonEPDispatcher(MoETokenDispatcher):
    """Megatron's dispatcher interface over a `Flight`.

    Letters: T tokens, E experts, k choices, l width.

    Args:
        exchange: over the expert-parallel group.
    """

    hidden_shape: torch.Size
    """of the tokens that were dispatched"""
    experts: Tensor
    """int64 ``[T, k]``, from `depart`: ascending, -1 for nowhere"""
    flight: Flight
    """from `depart` until the layer has its result"""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection, exchange: Exchange) -> None:
        super().__init__(config, pg_collection)
        self.exchange = exchange

    @torch.no_grad()
    def depart(self, routing_map: Tensor, experts: GroupedExperts, memory_efficient: bool) -> None:
        """Turn a bool map ``[T, E]`` into choices and start to exchange counts and weights."""
        num_experts, k = routing_map.shape[1], self.config.moe_router_topk
        # Ascending expert ids; rows of the map without a choice (padding) give -1.
        falling = num_experts - torch.arange(num_experts, device=routing_map.device)
        ranked = torch.where(routing_map, falling, 0).topk(k, dim=1).values
        self.experts = torch.where(ranked > 0, num_experts - ranked, -1)
        weights = experts.weight1, experts.weight2
        self.flight = Flight(self.exchange, *weights, experts.activation, memory_efficient, experts.rounding)
        self.flight.depart(self.experts, num_experts)

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """``[s, b, l]``, the map of `depart` and ``[T, E]`` to rows ``[T, l]`` and weights ``[T, k]``."""
        del routing_map
        self.hidden_shape = tokens.shape
        weights = probs.gather(1, self.experts.clamp(min=0))
        weights = torch.where(self.experts >= 0, weights, 0)
        return tokens.reshape(-1, tokens.shape[-1]), weights.to(torch.promote_types(weights.dtype, torch.float32))

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The rows set out; what comes back in their place is the token of `Flight.send`."""
        return self.flight.send(hidden_states, probs), probs

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


class _MoonEP(MoELayer):
    """The mixin; see `balanced`.

    ``MoELayer.forward`` computes the shared experts first. Here they wait until the rows are on their way
    (`routed_experts_compute`), and the counts set out before the latent projection (`preprocess`).
    """

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
        exchange = _exchange(moonep_config, pg_collection.ep)
        self.token_dispatcher = MoonEPDispatcher(config, pg_collection, exchange)
        self.report: Report | None = None
        self._shared_input: Tensor | None = None
        self._shared_output: Tensor | None = None

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The router's choices, without those of padding tokens (mask ``[s, b]``, True at padding).

        Raises:
            ValueError: a mask, with a transport that must route every token.
        """
        probs, routing_map = super().route(hidden_states, padding_mask)
        if padding_mask is not None:
            if self.moonep_config.moe_moonep_transport == "moonep":
                raise ValueError(
                    "--moe-moonep-transport moonep routes every token, and this batch has padding; pass "
                    "--moe-moonep-transport torch."
                )
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        return probs, routing_map

    def shared_experts_compute(self, hidden_states: Tensor) -> None:
        """Put off until the rows are on their way."""
        self._shared_input = hidden_states

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """``MoELayer.preprocess`` (the latent projection) while counts and weights travel."""
        self.token_dispatcher.depart(routing_map, self.experts, self.moonep_config.moe_moonep_memory_efficient)
        return super().preprocess(hidden_states, probs, routing_map)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """The token of `MoonEPDispatcher.token_dispatch` to the combined ``[T, l]``; first the shared experts."""
        del probs
        self._shared_output = super().shared_experts_compute(self._shared_input)
        self._shared_input = None
        flight = self.token_dispatcher.flight
        output = flight.finish(hidden_states)
        self.report = flight.report
        del self.token_dispatcher.flight
        return output, None

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """``MoELayer.postprocess`` with the shared experts' output."""
        del shared_expert_output
        shared, self._shared_output = self._shared_output, None
        return super().postprocess(output, shared)


def _exchange(settings: MoonEPConfig, group: dist.ProcessGroup) -> Exchange:
    """The exchange that ``--moe-moonep-transport`` names."""
    if settings.moe_moonep_transport == "moonep":
        from k3_plugins.transformer.moe.moonep.package import PackageExchange

        return PackageExchange(group, settings.moe_moonep_overlap)
    return CollectiveExchange(AllToAll(group, settings.moe_moonep_overlap))


@functools.cache
def balanced(layer: type[MoELayer]) -> type[_MoonEP]:
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
        (
            config.overlap_moe_expert_parallel_comm or config.overlap_dispatch_backward_with_experts_wgrad,
            "--overlap-moe-expert-parallel-comm and its relatives split Megatron's layer in another place; drop them "
            "(moonep overlaps by itself)",
        ),
        (config.cuda_graph_impl != "none", "--cuda-graph-impl must be none"),
        (config.add_bias_linear, "experts have no biases; pass --disable-bias-linear"),
        (config.moe_router_topk > config.num_moe_experts, "--moe-router-topk is more than --num-experts; lower it"),
    )
    for wrong, advice in problems:
        if wrong:
            raise ValueError(f"moonep: {advice}.")
