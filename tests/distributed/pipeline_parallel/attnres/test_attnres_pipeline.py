"""Residual payloads through Megatron's own schedules, in fp64: loss, every gradient and traffic.

A step that leaves an entry in the cache ends with an error (shown in test_attnres_faults.py), so none of these does.
"""

import pytest
import torch

from tests.harness.spawn import spawn

# fp64: a gradient is a sum of some 1e4 products; 1e-11 of its largest entry leaves three digits of room
EXACT = 1e-11

# Megatron itself forbids PP 2 with virtual stages and without overlap: two messages between the same pair would race.
TWO = [
    dict(pipeline=2, virtual=None, layers=8, block=3),
    dict(pipeline=2, virtual=None, layers=8, block=2, recompute=True),
    dict(pipeline=2, virtual=2, layers=8, block=3, cache="received", overlap=True),
    dict(pipeline=2, virtual=2, layers=8, block=1, overlap=True),
    dict(pipeline=2, virtual=2, layers=12, block=3, flush=True, two_phase="on"),
    dict(pipeline=2, virtual=4, layers=8, block=3, overlap=True),
    dict(pipeline=2, virtual=4, layers=8, block=1, overlap=True),
    dict(pipeline=2, virtual=4, layers=8, block=2, cache="off", overlap=True),
    dict(pipeline=2, virtual=4, layers=8, block=4, microbatches=6, flush=True),
    dict(pipeline=2, virtual=None, layers=9, block=2, first_stage_layers=3, last_stage_layers=6),
    dict(pipeline=2, virtual=None, layers=3, block=2, layout="Ettt|L"),
    dict(pipeline=2, virtual=2, layers=5, block=2, layout="Et|tt||ttL", overlap=True),
]
FOUR = [
    dict(pipeline=4, virtual=None, layers=8, block=3, microbatches=6),
    dict(pipeline=4, virtual=None, layers=8, block=2),
    dict(pipeline=4, virtual=2, layers=8, block=3, microbatches=8),
    dict(pipeline=4, virtual=2, layers=8, block=1, microbatches=8, flush=True),
    dict(pipeline=4, virtual=None, layers=10, block=4, first_stage_layers=1, last_stage_layers=3),
]


def sweep(rank, world_size, cases):
    """All cases in one set of processes."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from tests.distributed.pipeline_parallel.attnres import models

    report = []
    references = {}
    for words in cases:
        case = models.Case(**words)
        alone = models.Case(
            pipeline=1, virtual=None, layers=case.layers, block=case.block, microbatches=case.microbatches
        )
        if alone not in references:
            chunks = models.build(alone)
            losses = models.run_schedule(models.machinery().wrap(get_forward_backward_func)(), chunks, alone)
            gradients = {name: p.grad for name, p in models.global_names(chunks[0]).items()}
            evaluation = models.run_schedule(
                models.machinery().wrap(get_forward_backward_func)(), chunks, alone, batch=3, forward_only=True
            )
            references[alone] = losses, gradients, evaluation
        losses, gradients, evaluation = references[alone]

        chunks = models.build(case)
        machinery = models.machinery()
        schedule = machinery.wrap(get_forward_backward_func)()
        got = models.run_schedule(schedule, chunks, case)
        named = {name: p.grad for chunk in chunks for name, p in models.global_names(chunk).items()}
        missing = [name for name, gradient in named.items() if gradient is None]
        # the first query has one source and no choice: its gradient is zero up to rounding
        errors = {
            name: ((named[name] - gradients[name]).abs().max() / gradients[name].abs().max().clamp(min=1e-6)).item()
            for name in named
            if name not in missing
        }
        traffic = {
            f"{direction} {hop}": (machinery.traffic.messages[direction, hop], size)
            for (direction, hop), size in machinery.traffic.bytes.items()
        }
        with torch.no_grad():
            got_evaluation = models.run_schedule(schedule, chunks, case, batch=3, forward_only=True)
        repeat = models.run_schedule(schedule, chunks, case)
        report.append(
            {
                "losses": (got, losses),
                "repeat": repeat,
                "evaluation": (got_evaluation, evaluation),
                "missing": missing,
                "worst": max(errors.items(), key=lambda item: item[1], default=("none", 0.0)),
                "parameters": len(errors),
                "expected": len(gradients),
                "traffic": traffic,
                "rows": machinery.plan.rows_per_hop(),
            }
        )
    return report


@pytest.mark.parametrize("nprocs", [2, 4])
def test_every_layout_equals_one_process(nprocs):
    from k3_plugins.pipeline_parallel.attnres_payload.wire import header_length

    cases = TWO if nprocs == 2 else FOUR
    ranks = spawn(sweep, nprocs, cases, timeout=600)
    for index, words in enumerate(cases):
        reports = [rank[index] for rank in ranks]
        got, expected = reports[-1]["losses"]
        assert got == pytest.approx(expected, rel=1e-13), words
        assert reports[-1]["repeat"] == got, f"{words}: a second step from the same weights gives another loss"
        got, expected = reports[-1]["evaluation"]
        assert got == pytest.approx(expected, rel=1e-13), f"{words}: evaluation with another micro-batch size"
        assert sum(report["parameters"] for report in reports) == reports[0]["expected"]
        for rank, report in enumerate(reports):
            assert not report["missing"], f"{words}, rank {rank}: no gradient for {report['missing']}"
            name, error = report["worst"]
            assert error <= EXACT, f"{words}, rank {rank}: gradient of {name} differs by {error:.1e}"
        # every hop carries exactly the planned rows, once per micro-batch and direction
        sent = {}
        for report in reports:
            sent.update(report["traffic"])
        microbatches = words.get("microbatches", 4)
        row_bytes = 6 * 2 * 16 * 8  # s * b * d in fp64
        for hop, rows in enumerate(reports[0]["rows"]):
            size = microbatches * (rows * row_bytes + header_length(rows) * 8)
            assert sent.pop(f"forward {hop}") == (microbatches, size), (words, hop)
            assert sent.pop(f"backward {hop}") == (microbatches, size), (words, hop)
        assert not sent
