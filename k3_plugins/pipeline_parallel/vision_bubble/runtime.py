"""Runs Megatron's own schedules with encoder work in their bubbles: the wrapped `get_forward_backward_func`.

Before a step every rank reads all micro-batches' tokens, knows from them what every image costs, and computes the same
plan. The schedules' bodies are untouched: they get a communicator, data iterators, a forward step and a gradient
finaliser that wrap the given ones.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training import get_args, print_rank_0
from torch.distributed import ProcessGroup

from k3_plugins import activation
from k3_plugins.failure import fail
from k3_plugins.pipeline_parallel.vision_bubble import events, executed, planner, times
from k3_plugins.pipeline_parallel.vision_bubble.batch import StepBatch
from k3_plugins.pipeline_parallel.vision_bubble.clock import Clock
from k3_plugins.pipeline_parallel.vision_bubble.communicator import attach
from k3_plugins.pipeline_parallel.vision_bubble.config import VisionBubbleConfig
from k3_plugins.pipeline_parallel.vision_bubble.plan import Plan, Task
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem, Communication, PlanError
from k3_plugins.pipeline_parallel.vision_bubble.replica import Replica
from k3_plugins.pipeline_parallel.vision_bubble.session import Session, evaluation_owners
from k3_plugins.vision.dynamic_cp.cost import sample_of
from k3_plugins.vision.moonvit.encoder import MoonViT
from k3_plugins.vision.training.rows import PairRows

UNMEASURED = (1.0, 2.0, 1.0, 2.0)
"""What is planned with before anything is measured: an average micro-batch costs the encoder as much as a chunk."""


class BubbleRuntime:
    """The scheduler of a process."""

    def __init__(self) -> None:
        self.encoder: MoonViT | None = None
        """What this rank encodes with; set when the model is built."""
        self.source: MoonViT | None = None
        """The model's own, on pipeline rank 0."""
        self.sources: dict[bool, PairRows] = {}
        """Where images are read, by whether they are for evaluation; set when the data sets are built."""
        self.planner: Callable[[BubbleProblem], Plan] = planner.plan
        self.session: Session | None = None
        """Of the schedule that is running."""
        self.last: Session | None = None
        """Of the last training step."""
        self._prepared = False
        self._times: times.Times | None = None
        self._measured = 0
        """Steps with images so far, up to the last one that is measured."""
        self._checked = False

    # -- patches -------------------------------------------------------------------------------------------------------

    def wrap_schedule(self, get_forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        """Patch body for megatron.core.pipeline_parallel.schedules:get_forward_backward_func."""

        @functools.wraps(get_forward_backward_func)
        def wrapped(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            schedule = get_forward_backward_func(*args, **kwargs)

            @functools.wraps(schedule)
            def run(**call: Any) -> Any:
                return self._run(schedule, call)

            return run

        return wrapped

    def wrap_backward(self, backward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Patch body for megatron.core.pipeline_parallel.schedules:backward_step."""

        @functools.wraps(backward_step)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.session is None:
                return backward_step(*args, **kwargs)
            return self.session.backward_step(backward_step, *args, **kwargs)

        return wrapped

    # -- a step --------------------------------------------------------------------------------------------------------

    def _run(self, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        chunks = call["model"] if isinstance(call["model"], list) else [call["model"]]
        iterators = call["data_iterator"] if isinstance(call["data_iterator"], list) else [call["data_iterator"]]
        evaluates = call.get("forward_only", False)
        collection = call.get("pg_collection")
        group = getattr(collection, "pp", None) or parallel_state.get_pipeline_model_parallel_group()
        config = get_model_config(chunks[0])
        self._prepare(group)
        self._replica.refresh()
        batch = StepBatch(iterators[0], call["num_microbatches"], self.sources[evaluates])
        costs = self._costs(batch)
        plan = None if evaluates else self._plan(costs, group.size(), len(chunks), config)
        owner = evaluation_owners(costs, group.size()) if plan is None else plan.owner
        self._agree(batch, owner, plan)
        session = Session(
            self._replica, self._groups, batch, owner, plan, self._pieces(), self._device, Clock(self._on_cuda)
        )
        communicator = call.get("p2p_communicator")
        if communicator is None:
            communicator = P2PCommunicator(pp_group=group, config=config)
            collection = ProcessGroupCollection.use_mpu_process_groups()
        data = [session.rows(first_stage=session.rank == 0 and chunk == 0) for chunk in range(len(chunks))]
        finalize = config.finalize_model_grads_func

        def flush_and_finalize(*args: Any, **kwargs: Any) -> Any:
            session.flush()
            return finalize(*args, **kwargs)

        if finalize is not None:
            config.finalize_model_grads_func = flush_and_finalize
        self.session = session
        try:
            result = schedule(
                **{
                    **call,
                    "forward_step_func": session.forward_step(call["forward_step_func"]),
                    "data_iterator": data if isinstance(call["model"], list) else data[0],
                    "p2p_communicator": attach(communicator, session.run_due),
                    "pg_collection": collection,
                }
            )
            session.finish()
        finally:
            config.finalize_model_grads_func = finalize
            self.session = None
        if plan is not None:
            self._replica.outdated()
            self.last = session
            self._learn(session, costs, len(chunks))
        return result

    def _prepare(self, group: ProcessGroup) -> None:
        """Once: groups of the scheduler's own, and the replicas. Collective over all ranks of the job."""
        if self._prepared:
            return
        from k3_plugins.pipeline_parallel.vision_bubble.lanes import groups_beside

        active = activation.active()
        self._config: VisionBubbleConfig = active.config("vision-bubble")
        self._on_cuda = active.platform == "cuda"
        self._device = torch.device("cuda", torch.cuda.current_device()) if self._on_cuda else torch.device("cpu")
        self._groups = groups_beside(group, timedelta(minutes=get_args().distributed_timeout_minutes))
        trained = not active.config("moonvit").moonvit_frozen
        self._replica = Replica(
            self._encoder(), self.source, self._groups[0], self._device, trained, self._late_gradients()
        )
        self._tell_pieces()
        self._prepared = True

    def _encoder(self) -> MoonViT:
        if self.encoder is None:
            raise RuntimeError("vision-bubble: the model was built without the encoder of the feature moonvit")
        return self.encoder

    def _late_gradients(self) -> Callable[..., None] | None:
        """What takes gradients of the model's own parameters behind the last backward, if they do not themselves."""
        if self.encoder is self.source or self.source is None:
            return None
        from k3_plugins.distributed.pipeline_zero2.attach import CURRENT

        return CURRENT[0].add

    def _pieces(self) -> int:
        return min(self._config.vision_bubble_pieces, len(self._encoder().blocks))

    def _tell_pieces(self) -> None:
        pieces, asked = self._pieces(), self._config.vision_bubble_pieces
        if pieces < asked:
            print_rank_0(
                f"> vision-bubble: an encoder backward has {pieces} pieces, one for each layer, instead of"
                f" --vision-bubble-pieces {asked}"
            )

    def _costs(self, batch: StepBatch) -> list[float]:
        """Of every micro-batch's images. With expert parallelism, whose exchanges tie data-parallel replicas together
        inside text tasks, all replicas must follow one plan, which takes the mean of their costs."""
        encoder = self._encoder()
        width = encoder.projector.linear_fc2.output_size
        costs = [sum(sample_of(clip, encoder.vit, width).cost for clip in clips) for clips in batch.clips]
        return self._over_replicas(costs).tolist()

    def _over_replicas(self, values: Sequence[float]) -> np.ndarray:
        if get_args().expert_model_parallel_size == 1:
            return np.asarray(values)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=group)
        return total.cpu().numpy() / group.size()

    def _plan(self, costs: Sequence[float], p: int, v: int, config: Any) -> Plan:
        given = self._config.given_times
        if given is not None:
            known = times.given(given, costs, p, v)
        else:
            known = self._times or times.given(UNMEASURED, costs, p, v)
        communication: Communication = "overlap" if config.overlap_p2p_comm else "blocking"
        try:
            plan = self.planner(known.problem(costs, self._pieces(), self._replica.trained, communication))
            if not self._checked:
                events.check(plan)
                self._checked = True
        except (PlanError, events.DeadlockError) as error:
            fail(f"vision-bubble: {error}", at_once=True)
        return plan

    def _agree(self, batch: StepBatch, owner: Sequence[int], plan: Plan | None) -> None:
        """Compare data and plan over the pipeline: ranks with different plans would wait for each other for ever.

        Raises:
            RuntimeError: on every rank, naming those that differ from rank 0.
        """
        orders = [] if plan is None else [executed.order(tasks) for tasks in plan.ranks]
        content = repr((batch.numbers, batch.clips, tuple(owner), orders)).encode()
        digest = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
        group = self._groups[0]
        mine = torch.tensor([digest], dtype=torch.int64, device=self._device)
        all_ranks = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(all_ranks, mine, group=group)
        digests = torch.cat(all_ranks).tolist()
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise RuntimeError(
                f"vision-bubble: pipeline ranks {different} read other data or made another plan than rank 0; start"
                " every rank with the same --vision-* flags, data and package versions"
            )

    def _learn(self, session: Session, costs: Sequence[float], v: int) -> None:
        """Take this step's times for the next plan. Collective over the pipeline while steps are measured.

        A step without images tells nothing about the encoder, whose time would then be in other units than the text's.
        """
        measures = self._config.given_times is None and self._measured < self._config.vision_bubble_measure_steps
        if not measures or not any(costs):
            return
        self._measured += 1
        mine = times.measure(session.executed(), costs, v)
        ranks = [mine] * self._groups[0].size()
        dist.all_gather_object(ranks, mine, group=self._groups[0])
        combined = times.combine(ranks, self._times or times.given(UNMEASURED, costs, len(ranks), v))
        # Ranks that hold the same stage plan for themselves; they must plan with the same numbers.
        flat = np.array([*combined.forward.flat, *combined.backward.flat, combined.encoder_forward,
                         combined.encoder_backward])  # fmt: skip
        shared = torch.tensor(flat, dtype=torch.float64, device=self._device)
        stage = parallel_state.get_tensor_and_context_parallel_group()
        dist.broadcast(shared, group=stage, group_src=0)
        values = self._over_replicas(shared.tolist())
        text = values[:-2].reshape(2, *combined.forward.shape)
        self._times = times.Times(text[0], text[1], float(values[-2]), float(values[-1]))

    # -- reports -------------------------------------------------------------------------------------------------------

    def gather(self) -> list[list[Task]]:
        """The last training step's executed tasks of all ranks. Collective over the pipeline."""
        session, _ = self._last()
        mine = session.executed()
        ranks = [mine] * self._groups[0].size()
        dist.all_gather_object(ranks, mine, group=self._groups[0])
        return ranks

    def hidden(self) -> list[float]:
        """See ``executed.hidden``. Collective over the pipeline."""
        _, plan = self._last()
        return executed.hidden(plan, self.gather())

    def _last(self) -> tuple[Session, Plan]:
        if self.last is None or self.last.plan is None:
            raise RuntimeError("vision-bubble: no training step has run yet")
        return self.last, self.last.plan


RUNTIME = BubbleRuntime()
