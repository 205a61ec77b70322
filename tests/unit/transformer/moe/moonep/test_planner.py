"""The MoonEP planner: exact sums, the guarantee of m slots, near-optimality against HiGHS, numpy == torch.

Letters: R ranks, E experts, m = E / R home experts per rank, D_r redundant experts of rank r.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_plugins.transformer.moe.moonep import planner, planner_core, planner_torch
from k3_plugins.transformer.moe.moonep.loads import SHAPES, tight
from k3_plugins.transformer.moe.moonep.planner_reference import (
    alias_plan,
    one_piece_suffices,
    redundancy,
    solve_exactly,
)

SIZES = [(8, 2), (16, 4), (64, 8), (12, 3), (24, 4), (8, 8), (5, 1), (30, 6), (128, 16)]


def adversarial(rng: np.random.Generator, num_experts: int, ranks: int) -> np.ndarray:
    """Counts [R, E] of many kinds: few tokens, empty ranks, exact fits, one rank that owns everything, uneven rows."""
    per_rank = int(rng.choice([1, 2, 4, 17, 64, 1000, 131072]))
    m = num_experts // ranks
    kind = rng.integers(9)
    if kind < 6:
        counts = list(SHAPES.values())[kind](rng, num_experts, ranks, per_rank) if ranks > 1 else None
        if counts is not None:
            return counts
    weights = rng.lognormal(0, rng.uniform(0.1, 3), num_experts)
    if kind == 6:  # empty home ranks
        for r in rng.choice(ranks, rng.integers(0, ranks), replace=False):
            weights[r * m : (r + 1) * m] = 0
    elif kind == 7:  # sparse
        weights *= rng.random(num_experts) < rng.uniform(0.1, 0.9)
    if weights.sum() == 0:
        weights[rng.integers(num_experts)] = 1
    counts = rng.multinomial(per_rank, weights / weights.sum(), size=ranks)
    if kind == 8:  # ranks with fewer tokens, or none: the total need not be divisible by R
        counts = counts * rng.integers(0, 3, size=(ranks, 1))
    return counts


def check(counts: np.ndarray) -> planner.Plan:
    """Every promise that holds for any counts."""
    ranks, num_experts = counts.shape
    m = num_experts // ranks
    plan = planner.plan(counts)
    x = plan.assignment
    assert (x >= 0).all()
    assert (x.sum(1) == counts.sum(0)).all()
    assert x.sum(0).tolist() == planner.targets(int(counts.sum()), ranks)
    assert redundancy(x) == (plan.max_redundant, plan.total_redundant)
    assert plan.max_redundant <= m
    for r, experts in enumerate(plan.redundant):
        assert list(experts) == [e for e in range(num_experts) if x[e, r] and e // m != r]
        assert plan.slots[r].tolist() == list(experts) + [-1] * (m - len(experts))
    return plan


@given(st.data())
@settings(max_examples=150)
def test_any_counts(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    m = data.draw(st.integers(1, 5))
    value = data.draw(st.sampled_from([1, 3, 20, 10**6]))
    cells = data.draw(st.lists(st.integers(0, value), min_size=ranks * ranks * m, max_size=ranks * ranks * m))
    check(np.array(cells).reshape(ranks, ranks * m))


def _sweep(instances: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for i in range(instances):
        check(adversarial(rng, *SIZES[i % len(SIZES)]))


def test_sums_and_guarantee() -> None:
    _sweep(2000, seed=0)


@pytest.mark.slow
def test_sums_and_guarantee_100k() -> None:
    _sweep(100_000, seed=1)


@pytest.mark.parametrize("num_experts,ranks", [(8, 2), (16, 4), (64, 8), (896, 64)])
def test_the_tight_load_needs_what_the_proof_says(num_experts: int, ranks: int) -> None:
    m = num_experts // ranks
    plan = check(tight(np.random.default_rng(0), num_experts, ranks, 131072))
    assert plan.max_redundant == -(-m * (ranks - 1) // ranks)


def _against_optimum(num_experts: int, ranks: int, instances: int, seed: int) -> tuple[int, int]:
    """Our maximum must be the optimum wherever HiGHS proves it; returns both totals, summed where proven."""
    rng = np.random.default_rng(seed)
    ours = best = proven = 0
    for _ in range(instances):
        counts = adversarial(rng, num_experts, ranks)
        plan = check(counts)
        optimum = solve_exactly(counts, seconds=20)
        if optimum.max_redundant is not None:
            proven += 1
            assert plan.max_redundant == optimum.max_redundant, counts.sum(0).tolist()
        if optimum.proven:
            ours += plan.total_redundant
            best += optimum.total_redundant
    assert proven >= 0.9 * instances
    return ours, best


def test_maximum_is_optimal_and_total_near() -> None:
    totals = [_against_optimum(*size, instances, seed=3) for size, instances in (((8, 2), 30), ((16, 4), 20))]
    ours, best = map(sum, zip(*totals, strict=True))
    assert ours <= 1.05 * best, (ours, best)


@pytest.mark.slow
def test_maximum_is_optimal_and_total_near_at_length() -> None:
    totals = [
        _against_optimum(*size, instances, seed=4) for size, instances in (((8, 2), 300), ((16, 4), 300), ((64, 8), 60))
    ]
    print(totals)
    ours, best = map(sum, zip(*totals, strict=True))
    assert ours <= 1.05 * best, (ours, best)


def _bound(counts: np.ndarray) -> int:
    """A maximum that no plan can undercut: even with the largest experts the largest gap needs so many pieces."""
    ranks, num_experts = counts.shape
    loads = counts.sum(0)
    wanted = planner.targets(int(loads.sum()), ranks)
    gap = max(w - int(have) for w, have in zip(wanted, loads.reshape(ranks, -1).sum(1), strict=True))
    return 0 if gap <= 0 else int((np.cumsum(np.sort(loads)[::-1]) < gap).sum()) + 1


def _one_piece_suffices(counts: np.ndarray) -> bool:
    loads = counts.sum(0)
    return bool(one_piece_suffices(loads, np.array(planner.targets(int(loads.sum()), len(counts)))))


def test_one_piece_suffices_as_the_integer_program_says() -> None:
    rng, answers = np.random.default_rng(9), []
    for _ in range(60):
        counts = adversarial(rng, 16, 4)
        optimum = solve_exactly(counts, total=False).max_redundant
        assert _one_piece_suffices(counts) == (optimum <= 1), counts.sum(0).tolist()
        answers.append(optimum <= 1)
    assert {True, False} == set(answers)


@pytest.mark.slow
def test_maximum_is_optimal_on_many_of_64_experts() -> None:
    """At the bound there is nothing to prove; a maximum of two, dynamic programming proves; the others HiGHS must."""
    rng, pairs, others = np.random.default_rng(8), 0, 0
    for _ in range(6000):
        counts = adversarial(rng, 64, 8)
        plan = check(counts)
        if plan.max_redundant <= _bound(counts):
            continue
        if plan.max_redundant == 2:
            pairs += 1
            assert not _one_piece_suffices(counts), counts.sum(0).tolist()
        else:
            others += 1
            optimum = solve_exactly(counts, seconds=60, total=False).max_redundant
            assert optimum in (plan.max_redundant, None), (optimum, counts.sum(0).tolist())
    print(f"{pairs} and {others} above the bound")
    assert pairs >= 300 and others >= 5


# HiGHS proved the optimum; rules that fill one rank after the other miss it by one. `0x8` is a rank of empty experts.
# Few ranks with nothing, at the bound: only an even division of the largest experts among them is good enough. One
# piece per rank: several gaps must be packed into one expert.
HARD = (
    (3, "4 2 4 3 1 3 2 2 0x8 7 4 6 2 3 2 3 2 0x8 0x8 3 3 5 4 6 1 5 2 8 4 3 6 4 4 0 4 3 4 1 4 1 3 4 4"),
    (
        3,
        "11 8 10 15 11 14 7 15 27 16 15 25 18 12 21 17 0x8 17 12 22 12 17 23 13 23 0x8 0x8 0x8 22 12 "
        "22 14 15 21 13 12",
    ),
    (
        5,
        "0x8 142 126 183 172 199 163 152 130 154 154 184 177 153 163 125 139 170 153 201 181 144 182 194 192 159 132 "
        "175 167 168 204 157 170 0x8 162 160 217 157 194 222 180 177 166 138 155 201 130 154 160 162",
    ),
    (
        5,
        "162 151 186 159 195 167 166 176 166 160 178 177 219 157 211 178 152 179 163 158 174 175 173 160 153 211 215 "
        "188 171 145 133 150 112 184 202 136 161 140 184 193 0x8 0x8 138 121 142 147 184 149 129 170",
    ),
    (
        1,
        "230 603 2326 173 4080 600 1441 479 6019 2701 110338 22474 160146 2250 502 26293 896 5731 494 1045 564 "
        "3103 2781 1364 2916 19 5482 1571 1490 1742 2643 7275 22068 8723 13186 35596 32091 14638 26275 1095 2001 "
        "691 3371 2269 134 73922 656 3244 9121 90016 1267 1259 917 190 1205 1710 52462 546 4697 69 206 358 2260 "
        "418",
    ),
    (
        1,
        "0 7 61 0 1 45 1 4 0 0 1 0 0 0 0 4 2 0 0 0 0 1 0 0 0x8 0x8 0 1 0 0 3 0 0 1 0x8 4 0 0 0 0 0 0 0",
    ),
    (
        4,
        "0x8 237 209 186 135 296 170 266 267 0x8 195 274 250 191 184 154 167 214 194 176 193 187 273 198 198 200 "
        "0x8 237 196 117 219 185 235 155 152 210 105 234 165 175 199 184 218",
    ),
    # Found later, where everything must be drawn: two empty ranks that need the eight largest experts, with 184 tokens
    # of 262,144 to spare; an expert larger than a rank's share that several must divide; few tokens, one piece each.
    (
        4,
        "12087 19437 21596 19193 23587 17977 28166 12683 20011 28623 18545 11954 25313 34894 25786 29003 30014 25936 "
        "19119 29396 23945 18483 26884 18304 15189 35298 21697 19949 19844 15012 18861 27909 0x8 12556 31936 23565 "
        "20585 22487 9251 14265 15461 23910 17608 17818 20302 14058 25393 21522 43164 0x8",
    ),
    (
        2,
        "0x8 0x8 0x8 51 345 244 335 35 162 248 126 0x8 116 595 67 383 72 498 205 84 88 47 756 64 171 138 521 234 172 "
        "313 398 90 1010 366 17 49",
    ),
    (
        2,
        "0x8 0x8 0x8 0x8 532 264 582 103 321 225 205 71 125 86 115 250 226 202 936 470 0x8 354 883 1105 111 241 171 "
        "361 61",
    ),
    (
        1,
        "5 4 1 3 1 1 1 1 0 0 1 1 3 0 0 0 0 0 0 0 0 2 0 0 0 0 0 1 0 1 0 0 2 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 1 0 0 0 0 0 "
        "0 0 0 0 0 1 0 1 0 0",
    ),
    (
        1,
        "12 1 0 0 0 4 8 0 3 0 3 0 0 1 0 2 0 4 0 0 3 0 0 3 2 3 0 0 3 0 0 0 4 0 5 0 1 0 0 0 3 0 4 6 0 0 0 3 0 8 4 5 9 0 "
        "4 3 5 0 6 0 5 5 0 4",
    ),
    (
        1,
        "0 0 0 0 0 0 1 0 0 0 1 1 0 0 0 0 1 0 1 0 0 0 0 0 0 0 0 1 2 0 1 0 0 1 0 0 1 0 0 0 0 0 2 0 1 1 0 1 0 0 0 2 3 1 "
        "1 0 1 3 1 0 1 1 1 1",
    ),
    (
        1,
        "0 0 0 0 2 0 0 0 0 2 1 0 1 1 0 1 0 1 0 0 0 0 0 0 0 0 0 0 0 3 4 0 1 0 0 0 0 1 0 0 1 0 0 0 1 1 1 1 1 0 1 0 3 1 "
        "0 1 0 1 0 1 0 0 0 0",
    ),
)


@pytest.mark.parametrize("optimum,loads", HARD)
def test_packings_that_need_more_than_one_rule(optimum: int, loads: str) -> None:
    values = np.array([int(v) for v in loads.replace("0x8", "0 " * 8).split()])
    counts = np.zeros((8, 64), dtype=np.int64)
    counts[3] = values
    assert check(counts).max_redundant == optimum
    assert planner_torch.plan(torch.from_numpy(counts)).to_host().max_redundant == optimum


def test_never_worse_than_the_alias_method() -> None:
    rng = np.random.default_rng(5)
    for i in range(80):
        counts = adversarial(rng, *SIZES[i % len(SIZES)])
        assert planner.plan(counts).max_redundant <= redundancy(alias_plan(counts))[0]


def test_torch_makes_the_same_plan() -> None:
    rng = np.random.default_rng(6)
    cases = [adversarial(rng, *SIZES[i % (len(SIZES) - 1)]) for i in range(64)]
    cases += [shape(rng, 896, 64, 131072) for shape in (SHAPES["zipf_sorted"], tight)]
    for counts in cases:
        ours, device = planner.plan(counts), planner_torch.plan(torch.from_numpy(counts)).to_host()
        np.testing.assert_array_equal(ours.assignment, device.assignment)
        np.testing.assert_array_equal(ours.slots, device.slots)


def test_torch_follows_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that another variant beats, and in every step of theirs."""
    rng = np.random.default_rng(10)
    cases = [adversarial(rng, 64, 8) for _ in range(3)] + [adversarial(rng, 12, 3) for _ in range(2)]
    rules = [variant for variant in planner.VARIANTS if not variant.salt]
    for variant in (*rules, *planner.VARIANTS[len(rules) :: 31]):
        monkeypatch.setattr(planner, "VARIANTS", (variant,))
        for counts in cases:
            ours, device = planner.plan(counts), planner_torch.plan(torch.from_numpy(counts)).to_host()
            np.testing.assert_array_equal(ours.assignment, device.assignment, err_msg=str(variant))


def test_the_same_plan_in_another_process() -> None:
    """Every rank plans for itself: the plan may not depend on hash seeds, thread counts or the compiler."""
    program = (
        "import numpy as np, hashlib\n"
        "from k3_plugins.transformer.moe.moonep.planner import plan\n"
        "from k3_plugins.transformer.moe.moonep.loads import SHAPES\n"
        "h = hashlib.sha256()\n"
        "for shape in SHAPES.values():\n"
        "    p = plan(shape(np.random.default_rng(7), 64, 8, 4096))\n"
        "    h.update(p.assignment.tobytes()); h.update(p.slots.tobytes())\n"
        "print(h.hexdigest())\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed, "NUMBA_DISABLE_JIT": interpreted},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, interpreted in (("1", "0"), ("2", "1"))
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "counts,words",
    [
        (np.zeros((3, 8), dtype=int), "8 experts cannot be spread evenly over 3 ranks"),
        (np.zeros(8, dtype=int), r"shape \[ranks, experts\]"),
        (np.array([[1, -1]]), "negative"),
        (np.array([[0.5, 1.0]]), "integers"),
        (np.full((2, 4), 2**61), "more than 64-bit keys can hold"),
    ],
)
def test_bad_counts_are_refused(counts: np.ndarray, words: str) -> None:
    with pytest.raises(planner.PlanError, match=words):
        planner.plan(counts)


def test_more_than_m_slots_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the planner: a rule that needs too many pieces must raise, never be cut off."""
    monkeypatch.setattr(planner_core, "fill", lambda *_: (3, 3))
    with pytest.raises(planner.PlanError, match="3 redundant experts, more than the 2 slots"):
        planner.plan(np.array([[4, 4, 0, 0], [0, 0, 0, 0]]))


def test_torch_refuses_negative_counts() -> None:
    with pytest.raises(RuntimeError, match="must not be negative"):
        planner_torch.plan(torch.tensor([[1, -1]]))
