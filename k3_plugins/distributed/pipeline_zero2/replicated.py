"""Which parameters' gradients Megatron's `finalize_model_grads` reduces over other groups than data parallelism.

Everything else commutes with sharding; these are given a temporary gradient on the device. The conditions are those of
`megatron/core/distributed/finalize_model_grads.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config, get_pg_size


def parameters_finalize_reads(ddp: Any, params: Collection[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """In the order of the model's parameters.

    - tied word embeddings (also those that multi-token prediction ties) and position embeddings, over their groups;
    - copies of one parameter on all tensor-parallel ranks: under sequence parallelism, q/k norms, averaged ones;
    - conditional embedders and flextron routers that every pipeline stage holds.

    Args:
        ddp: the chunk in Megatron's DDP wrapper.
        params: its trainable parameters.
    """
    config = get_model_config(ddp)
    embeddings = _embeddings(ddp, config)
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    pipeline_parallel = parallel_state.get_pipeline_model_parallel_world_size() > 1
    found = []
    for name, param in ddp.named_parameters():
        if param not in params:
            continue
        over_tensor_parallel = tensor_parallel and (
            getattr(param, "average_gradients_across_tp_domain", False)
            or (config.sequence_parallel and getattr(param, "sequence_parallel", False))
            or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))
        )
        over_pipeline = pipeline_parallel and (
            (getattr(config, "has_cond_embedder", False) and getattr(param, "pipeline_parallel", False))
            or getattr(param, "flextron_router_pp_sync", False)
        )
        if over_tensor_parallel or over_pipeline or any(param is embedding for embedding in embeddings):
            found.append(param)
    return found


def _embeddings(ddp: Any, config: Any) -> list[torch.nn.Parameter]:
    model = get_attr_wrapped_model(ddp, "pre_process", return_model_obj=True)
    found = []
    if _size(parallel_state.get_embedding_group(check_initialized=False)) > 1 and (
        model.share_embeddings_and_output_weights or getattr(config, "mtp_num_layers", 0)
    ):
        found.append(model.shared_embedding_or_output_weight())
    if _size(parallel_state.get_position_embedding_group(check_initialized=False)) > 1 and hasattr(
        model, "position_embeddings"
    ):
        found.append(model.position_embeddings.weight)
    return [weight for weight in found if weight is not None]


def _size(group: Any) -> int:
    return 1 if group is None else get_pg_size(group)
