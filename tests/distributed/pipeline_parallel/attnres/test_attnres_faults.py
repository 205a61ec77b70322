"""What must be an error: ranks that disagree, messages that are not the expected ones, entries that nobody collects."""

import dataclasses

import pytest

from tests.harness.spawn import spawn


def disagree(rank, world_size):
    """Every rank learns of every disagreement before the first step."""
    import torch.distributed as dist

    from k3_plugins.pipeline_parallel.attnres_payload.schedule import Signature, Stage, agree

    def signature(**changes):
        stage = Stage(first_layer=4 * rank, num_layers=4, aggregates_output=rank == 1)
        return dataclasses.replace(Signature(2, "on", 8, 16, "torch.float32", (stage,)), **changes)

    texts = {}
    for name, own in {
        "width": signature(width=16 + 16 * rank),
        "block": signature(block_size=2 + rank),
        "cache": signature(cache="on" if rank else "off"),
        "one rank only": signature() if rank == 0 else None,
        "gap": signature(stages=(Stage(5 * rank, 4, rank == 1),)),
        "two outputs": signature(stages=(Stage(4 * rank, 4, True),)),
        "too few layers": signature(num_layers=9),
    }.items():
        try:
            agree(own, dist.group.WORLD)
            texts[name] = "accepted"
        except ValueError as error:
            texts[name] = str(error)
    plan = agree(signature(), dist.group.WORLD)
    return texts, plan.rows_per_hop(), agree(None, dist.group.WORLD)


def test_ranks_that_differ_are_told_so_before_the_first_step():
    results = spawn(disagree, 2, timeout=600)
    for texts, rows, absent in results:
        assert texts == results[0][0], "the ranks are told different things"
        assert rows == [3] and absent is None
        assert "--hidden-size differs between pipeline ranks: [16, 32]" in texts["width"]
        assert "--attn-res-block-size differs" in texts["block"] and "--attn-res-pp-cache differs" in texts["cache"]
        assert "not on pipeline ranks [1]" in texts["one rank only"]
        assert "starts at layer 5, expected 4" in texts["gap"]
        assert "aggregated in 2 stages" in texts["two outputs"] and "8 of 9 layers" in texts["too few layers"]


def choices(rank, world_size):
    """--attn-res-two-phase auto where every rank would measure something else, and under --deterministic-mode."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from k3_plugins.transformer.attention_residuals import runtime
    from k3_plugins.transformer.attention_residuals.ops.two_phase import TwoPhaseChoice
    from tests.distributed.pipeline_parallel.attnres import models

    calls = []

    def measure(**sizes):
        calls.append(sizes)
        return TwoPhaseChoice(enabled=rank == 0, single_pass_ms=2.0, two_phase_ms=1.0)

    runtime.measure_two_phase = measure
    case = models.Case(pipeline=2, virtual=None, layers=8, block=3, two_phase="auto")
    report = []
    for deterministic in (False, True):
        chunks = models.build(case)
        chunks[0].config.deterministic_mode = deterministic
        own = runtime.Runtime()
        schedule = own.pipeline.wrap(get_forward_backward_func)()
        losses = [models.run_schedule(schedule, chunks, case) for _ in range(2)]
        assert losses[0] == losses[1]
        report.append((own.two_phase, [bank.two_phase for bank in runtime.banks(chunks)], losses[0]))
    return report, calls


def test_all_ranks_take_the_evaluation_that_rank_0_measured_to_be_faster():
    (first, calls), (second, none) = spawn(choices, 2, timeout=600)
    assert [entry[:2] for entry in first] == [entry[:2] for entry in second] == [(True, [True]), (False, [False])]
    # both evaluations are exact: fp64 rounding only
    assert second[0][2] == pytest.approx(second[1][2], rel=1e-13)
    assert none == [] and len(calls) == 1, "one benchmark in a job, on rank 0, and none in deterministic mode"
    sizes = {"num_queries": 6, "num_sources": 2, "num_tokens": 12, "hidden_size": 16}
    assert {name: calls[0][name] for name in sizes} == sizes


def without_deposits(rank, world_size):
    """Break the cache: the comparison with one process must notice lost deposits and forgotten entries."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from k3_plugins.pipeline_parallel.attnres_payload import cache
    from tests.distributed.pipeline_parallel.attnres import models

    case = models.Case(pipeline=2, virtual=2, layers=4, block=1, overlap=True)

    def gradients():
        chunks = models.build(case)
        models.run_schedule(models.machinery().wrap(get_forward_backward_func)(), chunks, case)
        return {name: p.grad for chunk in chunks for name, p in models.global_names(chunk).items()}

    right = gradients()
    collect = cache.BlockCache.collect

    def lose(self, *key):
        collect(self, *key)

    cache.BlockCache.collect = lose
    try:
        wrong = gradients()
        error = max(((wrong[name] - right[name]).abs().max() / right[name].abs().max()).item() for name in right)
        cache.BlockCache.collect = lambda self, *key: None
        try:
            gradients()
            leftover = "accepted"
        except RuntimeError as failure:
            leftover = str(failure)
    finally:
        cache.BlockCache.collect = collect
    return error, leftover


def test_lost_deposits_and_leftovers_are_noticed():
    results = spawn(without_deposits, 2, timeout=600)
    assert max(error for error, _ in results) > 0.1
    assert all("the step ended with cached blocks: block 0 of micro-batch 0" in text for _, text in results)


@pytest.mark.parametrize("broken", ["microbatch", "row_ids", "width", "chunk", "gradient"])
def test_a_message_that_is_not_the_expected_one_is_refused(broken):
    import torch

    from k3_plugins.pipeline_parallel.attnres_payload.plan import Hop
    from k3_plugins.pipeline_parallel.attnres_payload.wire import (
        Envelope,
        HeaderCheck,
        Label,
        PayloadError,
        pack,
        unpack,
    )

    hop = Hop(source=3, block_ids=(0, 2), partial_id=3, partial_finished=False)
    label = Label(False, 5, 3, 8, hop.row_ids)
    envelope = Envelope(hop, label, dataclasses.replace(label, gradient=True), HeaderCheck(), lambda block: None)
    rows = [torch.randn(4, 2, 8, dtype=torch.bfloat16) for _ in range(3)]
    message = pack(envelope, rows)
    assert message._base is None
    for sent, received in zip(rows, unpack(envelope, message, rows[0].shape), strict=True):
        assert torch.equal(sent, received)

    changed = {"microbatch": 6, "row_ids": (0, 1, 3), "width": 16, "chunk": 2, "gradient": True}[broken]
    other = dataclasses.replace(envelope, output=dataclasses.replace(label, **{broken: changed}))
    with pytest.raises(PayloadError, match="it expected") as error:
        unpack(other, message, rows[0].shape)
    assert "output of chunk 3, micro-batch 5, width 8, blocks [0, 2, 3]" in str(error.value)
    # the same on the way back: the receiver labels the gradients, the sender compares
    for told, fails in ((envelope.gradient, False), (dataclasses.replace(label, microbatch=6), True)):
        leaves = [row.float().requires_grad_() for row in rows]
        sent = pack(envelope, leaves)
        arrived = sent.detach().requires_grad_()
        received = unpack(dataclasses.replace(envelope, gradient=told), arrived, leaves[0].shape)
        sum((row * (index + 1)).sum() for index, row in enumerate(received)).backward()
        if fails:
            with pytest.raises(PayloadError, match=r"it expected\s+gradient of chunk 3, micro-batch 5"):
                sent.backward(arrived.grad)
        else:
            sent.backward(arrived.grad)
            assert [leaf.grad.unique().tolist() for leaf in leaves] == [[1.0], [2.0], [3.0]]
    with pytest.raises(PayloadError, match="received .* elements, expected"):
        unpack(envelope, message[:-1], rows[0].shape)
    with pytest.raises(PayloadError, match="cannot be sent"):
        pack(envelope, rows[:2])
