"""Runs Megatron's own schedules with residual payloads: the wrapped `get_forward_backward_func`.

The schedules accept a communicator and a process-group collection; this module supplies both. The bodies of the
schedules are untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

from k3_plugins.pipeline_parallel.attnres_payload import session as payload
from k3_plugins.pipeline_parallel.attnres_payload.communicator import attach
from k3_plugins.pipeline_parallel.attnres_payload.plan import CacheMode, PipelinePlan
from k3_plugins.pipeline_parallel.attnres_payload.session import PayloadSession, Traffic


@dataclass(frozen=True)
class Stage:
    """What one chunk of a rank says about itself: `first_layer` is its index in the model."""

    first_layer: int
    num_layers: int
    aggregates_output: bool


@dataclass(frozen=True)
class Signature:
    """What every rank must agree on, and this rank's stages."""

    block_size: int
    cache: CacheMode
    num_layers: int
    width: int
    dtype: str
    stages: tuple[Stage, ...]


def agree(signature: Signature | None, group: Any) -> PipelinePlan | None:
    """Exchange the signatures of a pipeline group and derive the plan. Collective over `group`.

    Args:
        signature: None for a rank whose model has no Attention Residuals.

    Returns:
        the plan, or None if no rank has Attention Residuals.

    Raises:
        ValueError: on every rank, if they differ or the stages are no contiguous stack of layers.
    """
    answers: list[Signature | None] = [None] * group.size()
    torch.distributed.all_gather_object(answers, signature, group=group)
    everybody = [other for other in answers if other is not None]
    if not everybody:
        return None
    _require_everybody(answers)
    _require_equal(everybody)
    virtual = len(everybody[0].stages)
    in_order = [everybody[rank].stages[stage] for stage in range(virtual) for rank in range(len(everybody))]
    reached = 0
    for chunk, stage in enumerate(in_order):
        if stage.num_layers and stage.first_layer != reached:
            raise ValueError(
                f"attention residuals: chunk {chunk} of the pipeline starts at layer {stage.first_layer}, expected"
                f" {reached}; the layers of the stages must follow each other"
            )
        reached += stage.num_layers
    if reached != everybody[0].num_layers:
        raise ValueError(f"attention residuals: the stages hold {reached} of {everybody[0].num_layers} layers")
    outputs = [chunk for chunk, stage in enumerate(in_order) if stage.aggregates_output]
    if len(outputs) != 1:
        raise ValueError(f"attention residuals: the output is aggregated in {len(outputs)} stages instead of one")
    return PipelinePlan(
        pipeline_size=len(everybody),
        layers_per_chunk=tuple(stage.num_layers for stage in in_order),
        block_size=everybody[0].block_size,
        cache=everybody[0].cache,
        output_chunk=outputs[0],
    )


def _require_everybody(answers: Sequence[Signature | None]) -> None:
    """Raises ValueError naming the pipeline ranks without Attention Residuals."""
    missing = [rank for rank, other in enumerate(answers) if other is None]
    if missing:
        raise ValueError(
            f"attention residuals are on in some pipeline stages but not on pipeline ranks {missing}; start every rank"
            " with the same --k3-plugins"
        )


def _require_equal(everybody: Sequence[Signature]) -> None:
    """Raises ValueError naming the field in which pipeline ranks differ, and its values in their order."""
    flags = {
        "block_size": "--attn-res-block-size",
        "cache": "--attn-res-pp-cache",
        "num_layers": "--num-layers",
        "width": "--hidden-size",
        "dtype": "the pipeline dtype",
    }
    for name, flag in flags.items():
        values = [getattr(other, name) for other in everybody]
        if len(set(values)) > 1:
            raise ValueError(
                f"attention residuals: {flag} differs between pipeline ranks: {values}; start every rank with the same"
                " arguments"
            )
    counts = [len(other.stages) for other in everybody]
    if len(set(counts)) > 1:
        raise ValueError(f"attention residuals: the number of virtual stages differs between pipeline ranks: {counts}")


class PipelinePayload:
    """The payload machinery of a process: agrees on a plan once, then opens a session per call of a schedule.

    Args:
        describe: model chunks -> this rank's Signature, or None for a model without Attention Residuals.
        prepare: called with the model chunks before every run of a schedule, pipeline or not: (chunks, forward_only).
    """

    def __init__(
        self,
        describe: Callable[[Sequence[torch.nn.Module]], Signature | None],
        prepare: Callable[[Sequence[torch.nn.Module], dict[str, Any]], None],
    ):
        self._describe = describe
        self._prepare = prepare
        self._plans: dict[tuple[Signature | None, int], PipelinePlan | None] = {}
        self.plan: PipelinePlan | None = None
        self.traffic = Traffic()
        """Of the last step with a pipeline."""
        self.cached_entries = 0
        """Entries left in the cache after the last step (a step that leaves any fails)."""

    def wrap(self, get_forward_backward_func: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
        """Patch body for megatron.core.pipeline_parallel.schedules:get_forward_backward_func."""

        @functools.wraps(get_forward_backward_func)
        def wrapped(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            schedule = get_forward_backward_func(*args, **kwargs)

            @functools.wraps(schedule)
            def run(**call: Any) -> Any:
                return self._run(schedule, call)

            return run

        return wrapped

    def _run(self, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        model = call["model"]
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        self._prepare(chunks, call)
        collection = call.get("pg_collection")
        group = getattr(collection, "pp", None) or parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return schedule(**call)
        signature = self._describe(chunks)
        key = signature, id(group)
        if key not in self._plans:
            self._plans[key] = agree(signature, group)
        plan = self._plans[key]
        if plan is None:
            return schedule(**call)
        self.plan = plan
        config = megatron_config(chunks[0])
        communicator = call.get("p2p_communicator")
        if communicator is None:
            communicator = P2PCommunicator(pp_group=group, config=config)
            collection = ProcessGroupCollection.use_mpu_process_groups()
        virtual = plan.num_chunks // plan.pipeline_size
        if virtual > 1:
            table = get_schedule_table(
                call["num_microbatches"], virtual, config.microbatch_group_size_per_vp_stage
            )
        else:
            table = [(microbatch, 0) for microbatch in range(call["num_microbatches"])]
        session = PayloadSession(plan, group.rank(), table, config.hidden_size)
        with payload.active(session):
            result = schedule(**{**call, "p2p_communicator": attach(communicator), "pg_collection": collection})
        self.traffic = session.traffic
        self.cached_entries = len(session.cache)
        return result


def megatron_config(chunk: torch.nn.Module) -> Any:
    """The transformer config of a (wrapped) model chunk."""
    from megatron.core.utils import get_model_config

    return get_model_config(chunk)
