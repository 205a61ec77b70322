"""What Megatron's schedules really post and wait for on 2 and 4 processes, against the programs of `events`."""

import pytest

from k3_plugins.pipeline_parallel.vision_bubble import events
from k3_plugins.pipeline_parallel.vision_bubble.plan import TaskKind
from k3_plugins.pipeline_parallel.vision_bubble.planner import plan
from k3_plugins.pipeline_parallel.vision_bubble.problem import BubbleProblem
from tests.harness.spawn import spawn

# p, v, m, communication. (4, 2, 4), (2, 4, 2) and (4, 1, 2) never leave the warm-up. Megatron refuses p = 2 with
# virtual stages and blocking messages.
TWO = [(2, 1, 1), (2, 1, 5), (2, 2, 2), (2, 2, 4), (2, 2, 8), (2, 3, 4), (2, 4, 2)]
FOUR = [
    (4, 1, 2), (4, 1, 4), (4, 1, 9), (4, 2, 4), (4, 2, 8), (4, 2, 16), (4, 3, 8),
    (4, 2, 4, "blocking"), (4, 2, 8, "blocking"), (4, 3, 8, "blocking"),
]  # fmt: skip
SILENT = {"encoder_forward": 0.0, "encoder_backward": 0.0}


def problem(p, v, m, communication="overlap"):
    return BubbleProblem(p, v, m, communication=communication, **SILENT)


def trace(rank, world_size, cases):
    """Every case's trace of this rank: ("post" or "wait", set of directions), ("forward" or "backward", number)."""
    return [_trace_case(rank, *case) for case in cases]


def _trace_case(rank, p, v, m, communication="overlap"):
    import torch
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    parallel_state.destroy_model_parallel()
    virtual = v if v > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=virtual
    )
    overlap = v > 1 and communication == "overlap"
    config = TransformerConfig(
        num_layers=p * v, hidden_size=4, num_attention_heads=1, pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=virtual,
        microbatch_group_size_per_vp_stage=p, deallocate_pipeline_outputs=True, overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
    )  # fmt: skip
    assert isinstance(config, ModelParallelConfig)
    seen = []

    class Chunk(MegatronModule):
        def __init__(self, stage):
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.stage, self.given, self.count, self.vp_stage = stage, None, 0, stage // p if v > 1 else None
            self.model_type = "encoder_or_decoder"

        def set_input_tensor(self, tensors):
            self.given = tensors[0] if isinstance(tensors, list) else tensors

        def forward(self):
            """Numbers that tell stage and micro-batch; what arrives must be the previous stage's of the same one."""
            number = 100.0 * self.count + self.stage + 1
            self.count += 1
            if self.stage == 0:
                return self.weight * torch.full((2, 1, 4), number)
            assert torch.equal(self.given.detach(), torch.full((2, 1, 4), number - 1)), (self.stage, self.count)
            return self.given + self.weight

    chunks = [Chunk(chunk * p + rank % p) for chunk in range(v)]

    def forward_step(data_iterator, model):
        seen.append(("forward", None))
        return model(), lambda output: (output.mean(), {})

    backward_step = schedules.backward_step

    def traced_backward(*args, **kwargs):
        seen.append(("backward", None))
        return backward_step(*args, **kwargs)

    class Handle:
        def __init__(self, handle, direction):
            self.handle, self.direction = handle, direction

        def wait(self):
            seen.append(("wait", self.direction))
            return self.handle.wait()

    class Traced(P2PCommunicator):
        def _communicate(self, **call):
            posted = {
                "send_next": call["tensor_send_next"] is not None, "send_prev": call["tensor_send_prev"] is not None,
                "recv_prev": call["recv_prev"], "recv_next": call["recv_next"],
            }  # fmt: skip
            directions = [direction for direction, there in posted.items() if there]
            seen.extend(("post", direction) for direction in directions)
            waits = call.get("wait_on_reqs", True)
            *tensors, handles = super()._communicate(**call)
            if waits:
                seen.extend(("wait", direction) for direction in directions)
            else:
                handles = {direction: Handle(handle, direction) for direction, handle in handles.items()}
            return (*tensors, handles)

    group = parallel_state.get_pipeline_model_parallel_group()
    schedules.backward_step = traced_backward
    try:
        schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(())] * v if v > 1 else iter(()),
            model=chunks if v > 1 else chunks[0],
            num_microbatches=m,
            seq_length=2,
            micro_batch_size=1,
            forward_only=False,
            p2p_communicator=Traced(group, config),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    finally:
        schedules.backward_step = backward_step
    assert all(float(chunk.weight.grad) != 0 for chunk in chunks)
    return _grouped(seen)


def _grouped(seen):
    """Neighbouring posts and neighbouring waits as one entry each: their order among themselves is of no effect."""
    entries = []
    for what, direction in seen:
        if what in ("forward", "backward"):
            entries.append((what, frozenset()))
        elif entries and entries[-1][0] == what:
            entries[-1] = what, entries[-1][1] | {direction}
        else:
            entries.append((what, frozenset([direction])))
    return entries


def modelled(program):
    seen = []
    directions = {
        ("activation", True): "send_next", ("activation", False): "recv_prev",
        ("gradient", True): "send_prev", ("gradient", False): "recv_next",
    }  # fmt: skip
    for step in program:
        seen.extend(("post", directions[message.what, message.sends]) for message in step.posts)
        seen.extend(("wait", directions[message.what, message.sends]) for message in step.waits)
        if step.task is not None:
            seen.append(("forward" if step.task.kind is TaskKind.TEXT_FORWARD else "backward", None))
    return _grouped(seen)


@pytest.mark.parametrize(("world_size", "cases"), [(2, TWO), (4, FOUR)])
def test_megatron_posts_and_waits_as_modelled(world_size, cases):
    traces = spawn(trace, world_size, cases)
    for number, case in enumerate(cases):
        for rank, program in enumerate(events.programs(plan(problem(*case)))):
            actual, expected = traces[rank][number], modelled(program)
            place = next((k for k, pair in enumerate(zip(actual, expected, strict=False)) if pair[0] != pair[1]), None)
            assert actual == expected, (
                f"{case}, rank {rank}, entry {place}: Megatron {actual[(place or 0) - 3 : (place or 0) + 4]}, model"
                f" {expected[(place or 0) - 3 : (place or 0) + 4]}"
            )
