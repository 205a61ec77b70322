"""Feature ``vision-bubble``: the vision encoder's work in the bubbles of the text pipeline."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from k3_plugins.feature import FeatureError, Witness
from k3_plugins.patching import Patch, PatchKind
from k3_plugins.pipeline_parallel.vision_bubble.config import VisionBubbleConfig
from k3_plugins.training.metrics import logs, written_anywhere


def _wrap_schedule(original: Any) -> Any:
    from k3_plugins.pipeline_parallel.vision_bubble.runtime import RUNTIME

    return RUNTIME.wrap_schedule(original)


def _wrap_backward(original: Any) -> Any:
    from k3_plugins.pipeline_parallel.vision_bubble.runtime import RUNTIME

    return RUNTIME.wrap_backward(original)


def _scalars() -> dict[str, float]:
    """``k3/vit-bubble-hidden``: the mean over the pipeline's ranks, and every rank's."""
    from k3_plugins.pipeline_parallel.vision_bubble.runtime import RUNTIME

    if not written_anywhere():
        return {}
    shares = RUNTIME.hidden()
    by_rank = {f"k3/vit-bubble-hidden/rank-{rank}": share for rank, share in enumerate(shares)}
    return {"k3/vit-bubble-hidden": sum(shares) / len(shares), **by_rank}


class VisionBubble:
    """See the module docstring."""

    name = "vision-bubble"
    requires: Sequence[str] = ("moonvit",)
    conflicts: Sequence[str] = ()
    config = VisionBubbleConfig
    changes_parameters = False

    def patches(self) -> Sequence[Patch]:
        """The schedules, the end of a text backward, and a report."""
        wrap = functools.partial(Patch, kind=PatchKind.WRAP, feature=self.name)
        return (
            wrap(
                id="vision-bubble.schedule",
                target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
                implementation=_wrap_schedule,
                reason="pretrain takes a communicator only before the process groups exist that one is made of, and has"
                " no call before and after a step.",
                remove_when="pretrain takes a factory of communicators and a callback around the schedule",
            ),
            wrap(
                id="vision-bubble.backward",
                target="megatron.core.pipeline_parallel.schedules:backward_step",
                implementation=_wrap_backward,
                reason="The schedules take a forward step from the caller, but call their own backward step.",
                remove_when="the schedules take a backward step or call a hook around theirs",
            ),
            wrap(
                id="vision-bubble.metrics",
                target="megatron.training.training:training_log",
                implementation=logs(_scalars, on_every_rank=True, slow=True),
                reason="The training loop has no callback for user metrics.",
                remove_when="Megatron offers a registry of metrics or a logging callback",
            ),
        )

    def validate(self, args: Namespace, config: VisionBubbleConfig) -> None:
        """Refuse layouts without bubbles, and schedules and reductions that the plan does not describe."""
        _ = config.given_times
        for flag, value in (
            ("--vision-bubble-pieces", config.vision_bubble_pieces),
            ("--vision-bubble-measure-steps", config.vision_bubble_measure_steps),
        ):
            if value < 1:
                raise FeatureError(f"{flag} {value} must be at least 1")
        size = args.pipeline_model_parallel_size
        if size < 2:
            raise FeatureError(
                f"--pipeline-model-parallel-size {size} has no bubbles for vision-bubble to fill; give at least 2, or"
                " drop vision-bubble from --k3-plugins"
            )
        for problem in _conflicting_flags(args):
            raise FeatureError(problem)

    def witness(self, model_chunks: Sequence[Any], args: Namespace) -> Witness:
        """Encoder tasks that ran where the plan had them."""
        from k3_plugins.pipeline_parallel.vision_bubble.plan import TaskKind
        from k3_plugins.pipeline_parallel.vision_bubble.runtime import RUNTIME

        session = RUNTIME.last
        if session is None or session.plan is None:
            return Witness("no schedule ran through the scheduler", ok=False)
        share = RUNTIME.hidden()[session.rank]
        tasks = session.executed()
        encoded = sum(task.kind is TaskKind.ENCODER_FORWARD for task in tasks)
        return Witness(
            f"{encoded} of {len(session.owner)} micro-batches encoded here, {len(tasks)} tasks in the planned order,"
            f" {100 * share:.0f} % of the encoder hidden, {session.peak_activations} activations kept at most",
            ok=True,
            details={
                "encoded": encoded,
                "tasks": len(tasks),
                "hidden": share,
                "peak_activations": session.peak_activations,
                "planned_activations": session.plan.peak_activations[session.rank],
            },
        )


def _conflicting_flags(args: Namespace) -> Sequence[str]:
    """One sentence for every Megatron flag that cannot be combined with the feature."""
    problems = []
    if args.overlap_grad_reduce or args.overlap_param_gather:
        problems.append(
            "--overlap-grad-reduce and --overlap-param-gather reduce before the other pipeline ranks' encoder gradients"
            " have come, and gather while these take the weights; drop both, or vision-bubble"
        )
    if args.overlap_moe_expert_parallel_comm:
        problems.append("--overlap-moe-expert-parallel-comm runs another schedule than vision-bubble plans; drop it")
    if args.overlap_p2p_comm_warmup_flush:
        problems.append(
            "--overlap-p2p-communication-warmup-flush is another order of messages than vision-bubble plans; drop it"
        )
    group = args.microbatch_group_size_per_vp_stage
    if group not in (None, args.pipeline_model_parallel_size):
        problems.append(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group}: vision-bubble plans with the pipeline size"
            f" {args.pipeline_model_parallel_size} only; drop the flag"
        )
    if args.use_ring_exchange_p2p:
        problems.append("--use-ring-exchange-p2p cannot be waited for after other work; drop it")
    if args.cuda_graph_impl != "none" or args.enable_cuda_graph or args.external_cuda_graph:
        problems.append("CUDA graphs fix the order of work, which vision-bubble plans anew in every step; drop them")
    if args.use_megatron_fsdp or args.use_torch_fsdp2:
        problems.append("FSDP splits the encoder that vision-bubble copies to every pipeline rank; drop it")
    return problems


FEATURE = VisionBubble()
