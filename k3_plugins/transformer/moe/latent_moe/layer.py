"""``MoELayer`` whose routed experts work in a latent space of ``config.moe_latent_size`` (K3 report, equation 11).

    z = W_down x;   u = sum_{i in topk} p_i E_i(z);   y = Shared(x) + W_up RMSNorm(u)

Megatron's layer already routes on the full-width input, projects before dispatch and after combine, and adds
full-width shared experts; it only insists on Transformer Engine for the projections and has no norm. This subclass
builds the two projections itself and lets the inherited forward pass use them.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor

from k3_plugins.transformer.moe.latent_moe.config import LatentMoEConfig
from k3_plugins.transformer.moe.latent_moe.projection import LatentProjection


class LatentMoELayer(MoELayer):
    """See the module docstring. Arguments are those of ``MoELayer``, and:

    Args:
        latent_config: the feature's settings.

    Raises:
        ValueError: shared-expert overlap, which Megatron cannot combine with latent experts in training.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *args: Any,
        latent_config: LatentMoEConfig,
        **kwargs: Any,
    ) -> None:
        if config.moe_shared_expert_overlap and config.moe_latent_size:
            raise ValueError(
                "--moe-shared-expert-overlap cannot be combined with --moe-latent-size in Megatron; drop it."
            )
        if pg_collection is None:
            pg_collection = get_default_pg_collection()
        # The parent is built as if there were no latent space (it would assert Transformer Engine); the experts are
        # built with the true config.
        without_latent = copy.copy(config)
        without_latent.moe_latent_size = None
        experts = submodules.experts
        submodules = dataclasses.replace(
            submodules, experts=lambda count, _config, **options: experts(count, config, **options)
        )
        super().__init__(without_latent, submodules, layer_number, pg_collection, *args, **kwargs)
        self.latent_config = latent_config
        self.forward_calls = 0
        self.config = config
        self.token_dispatcher.config = config
        if config.moe_latent_size:
            project = partial(
                LatentProjection,
                config=config,
                pg_collection=pg_collection,
                sharded=latent_config.moe_latent_projection == "sharded",
            )
            self.fc1_latent_proj = project(config.hidden_size, config.moe_latent_size, init_method=config.init_method)
            self.fc2_latent_proj = project(
                config.moe_latent_size,
                config.hidden_size,
                init_method=config.output_layer_init_method,
                norm_eps=latent_config.moe_latent_norm_eps if latent_config.moe_latent_norm else None,
            )

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """``[s, b, d]`` to ``[s, b, d]``; see ``MoELayer.forward``."""
        self.forward_calls += 1
        return super().forward(hidden_states, *args, **kwargs)
