"""Activations in other ranks' memory over Mooncake's tcp transport: the same bits, level peaks, and no hang or partial
data when a lender dies or stops."""

import json

import pytest

from tests.harness import losses
from tests.harness.launch import launch
from tests.harness.stock_flags import stock

pytestmark = pytest.mark.mooncake

RUN = "tests.distributed.memory.lender_run"
PIPELINE = {
    2: "--pipeline-model-parallel-size 2 --num-layers 8",
    4: "--pipeline-model-parallel-size 4 --num-layers 16",
    "vpp": "--pipeline-model-parallel-size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 2",
    "dp": "--pipeline-model-parallel-size 2 --num-layers 8 --use-distributed-optimizer",
}
PROCESSES = {2: 2, 4: 4, "vpp": 2, "dp": 4}


def train(folder, layout, rules, *groups, victim=(0, "NONE", 0), check=True):
    """One run; returns what `launch` returns, and every rank's report."""
    words = stock(
        "--k3-platform cpu --train-iters 4 --global-batch-size 16 --seq-length 64 --lr 1e-2 --log-interval 1",
        "--k3-plugins activation-manager --activation-min-bytes 0",
        PIPELINE[layout],
        *groups,
    )
    words += ["--activation-policy", rules, "--activation-report", folder / "report"]
    run = launch(RUN, [folder, *victim, *words], nprocs=PROCESSES[layout], timeout=200, check=check)
    reports = [json.loads(path.read_text()) for path in sorted((folder / "report").glob("rank*.json"))]
    return run, reports


def peaks(reports):
    """Device bytes of every rank: its own activations, and the most that it held for others."""
    total = [report["peak_device_bytes"] for report in reports]
    for report in reports:
        for lease in (report["remote"] or {"leases": []})["leases"]:
            total[lease["lender"]] += lease["peak"]
    return total


def check_remote(reports, lenders):
    """Bytes left the first ranks for the last ones and all came back."""
    borrowers = [report for report in reports if report["remote"]["leases"]]
    assert borrowers and {lease["lender"] for r in borrowers for lease in r["remote"]["leases"]} <= lenders
    for report in borrowers:
        assert 0 < report["remote"]["sent_bytes"] == report["remote"]["fetched_bytes"]


def test_a_killed_lender_and_the_run_after_it(tmp_path):
    """PP 2: the lender is killed in step 3; the run goes on from its checkpoint, with checksums, as if nothing had
    happened and nothing been remote."""
    train(tmp_path / "keep", 2, "*=keep")
    expected = losses.read(tmp_path / "keep")
    save = f"--save {tmp_path}/ckpt --save-interval 2 --ckpt-format torch_dist"
    struck, _ = train(tmp_path / "killed", 2, "*=remote", save, victim=(1, "KILL", 3), check=False)
    check_end(tmp_path / "killed", struck, survivors=[0])
    load = f"--load {tmp_path}/ckpt --ckpt-format torch_dist --activation-remote-checksum"
    _, reports = train(tmp_path / "resumed", 2, "*=remote", load)
    resumed = losses.read(tmp_path / "resumed")
    assert sorted(resumed) == [3, 4]
    # (the log of a resumed run averages its second loss with its first: parameters are compared)
    assert [resumed[i].parameters for i in (3, 4)] == [expected[i].parameters for i in (3, 4)]
    check_remote(reports, lenders={1})


def check_end(folder, run, survivors):
    """Every survivor ended by itself within 15 s, said why, and started no further step."""
    assert run.rc == 1, run.tail()
    struck = float((folder / "struck").read_text())
    for rank in survivors:
        assert float((folder / f"alive{rank}").read_text()) - struck <= 15, run.tail()
        log = run.logs[rank]
        assert "Start again from the last checkpoint" in log, run.tail()
    # not `losses.read`: with two pipelines a dead rank may lack the record of a step that others have
    steps = [json.loads(line)["iteration"] for file in folder.glob("rank*.jsonl") for line in file.open()]
    assert max(steps) <= 3


@pytest.mark.parametrize(
    ("layout", "rules", "lenders"),
    [
        (4, "*=remote", {2, 3}),
        pytest.param(4, "*=fp8+remote", {2, 3}, marks=pytest.mark.slow),
        pytest.param("vpp", "*=remote", {1}, marks=pytest.mark.slow),
    ],
)
def test_peaks_are_level(layout, rules, lenders, tmp_path):
    """Within 10 % over the ranks, measured, where KEEP differs by 2 and more; and as the plan foretold."""
    same = rules.replace("remote", "keep").replace("fp8+keep", "fp8")
    _, kept = train(tmp_path / "keep", layout, same)
    _, reports = train(tmp_path / "remote", layout, rules)
    assert losses.first_difference(losses.read(tmp_path / "remote"), losses.read(tmp_path / "keep")) is None
    check_remote(reports, lenders)
    before, after = peaks(kept), peaks(reports)
    print(f"\n{layout} {rules}: {before} -> {after}")
    plan = reports[0]["remote"]["plan"]
    assert all(report["remote"]["plan"] == plan for report in reports)
    if layout == 4 and "fp8" not in rules:  # (a layer's own values, not yet rounded, outweigh the codes of many)
        # (the plan counts a layer's tensors in whole pieces, and nothing that is on the device for a moment)
        for foretold, measured in ((plan["unlevelled"], before), (plan["levelled"], after)):
            assert all(abs(a / b - 1) <= 0.10 for a, b in zip(foretold, measured, strict=True)), (foretold, measured)
        assert max(before) >= 2 * min(before), before
        assert max(after) <= 1.10 * min(after), after
    assert max(after) < max(before)


def test_two_pipelines_lend_at_once(tmp_path):
    """PP 2 DP 2: ranks 0 and 1 are the first stage, and each borrows of the last stage of its own pipeline."""
    train(tmp_path / "keep", "dp", "*=keep")
    _, reports = train(tmp_path / "remote", "dp", "*=remote", "--activation-remote-checksum")
    assert losses.first_difference(losses.read(tmp_path / "remote"), losses.read(tmp_path / "keep")) is None
    check_remote(reports, lenders={2, 3})
    assert [[lease["lender"] for lease in report["remote"]["leases"]] for report in reports] == [[2], [3], [], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "victim", "signal"),
    [
        (4, 3, "STOP"),
        (4, 3, "KILL"),
        (4, 2, "KILL"),
        ("dp", 3, "KILL"),
        ("dp", 3, "STOP"),
        (2, 0, "STOP"),
        (2, 0, "KILL"),
    ],
)
def test_all_ranks_end_with_one(layout, victim, signal, tmp_path):
    """A rank is killed, or stopped (its connections stay open, only its silence tells), after step 2. Rank 0 serves the
    rendezvous store as well."""
    run, _ = train(tmp_path / "run", layout, "*=remote", victim=(victim, signal, 2), check=False)
    check_end(tmp_path / "run", run, survivors=[rank for rank in range(PROCESSES[layout]) if rank != victim])
