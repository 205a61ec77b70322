"""Yardsticks for the MoonEP planner, for tests and benchmarks only: exact optima and the plain alias method.

Letters as in `planner`: R ranks, E experts, m home experts per rank, x[E, R] the tokens of expert e on rank r.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k3_plugins.compat.compiled import compiled
from k3_plugins.transformer.moe.moonep.planner import check_counts, targets


@dataclass(frozen=True)
class Optimum:
    """Result of one exact solve.

    Attributes:
        max_redundant: the optimal ``max_r |D_r|``, or None if the time limit came first.
        total_redundant: the least ``sum_r |D_r|`` among plans with that maximum; where the time limit came first, the
            proven lower bound on it.
        proven: False where ``total_redundant`` is only a lower bound.
    """

    max_redundant: int | None
    total_redundant: int
    proven: bool


def solve_exactly(counts: np.ndarray, seconds: float = 30.0, total: bool = True) -> Optimum:
    """The fixed-charge transportation problem as a mixed-integer program, solved with HiGHS through scipy.

    ``x`` continuous, ``y[e, r]`` binary for ``e`` not at home on ``r``, ``x <= min(n_e, C_r) y``; first the smallest
    ``p`` with ``sum_e y[e, r] <= p`` feasible, then the least ``sum y`` for that p.

    Args:
        counts: integer ``[R, E]``.
        seconds: time limit of each solve.
        total: also minimise the total.
    """
    ranks, num_experts, m = check_counts(counts.shape)
    loads = np.asarray(counts, dtype=np.int64).sum(0)
    target = np.array(targets(int(loads.sum()), ranks))
    used = np.flatnonzero(loads)
    # `cap[i, r]` pieces are limited by both; home entries carry no binary variable.
    cap = np.minimum(loads[used][:, None], target[None, :])
    foreign = used[:, None] // m != np.arange(ranks)
    maximum = _minimise(loads[used], target, cap, foreign, None, seconds)
    if maximum is None:
        return Optimum(None, 0, False)
    best = round(maximum)
    if not total:
        return Optimum(best, 0, False)
    least = _minimise(loads[used], target, cap, foreign, best, seconds)
    if least is not None:
        return Optimum(best, round(least), True)
    short = np.maximum(target - loads.reshape(ranks, m).sum(1), 0)
    return Optimum(best, int((short > 0).sum()), False)


def _minimise(
    loads: np.ndarray, target: np.ndarray, cap: np.ndarray, foreign: np.ndarray, limit: int | None, seconds: float
) -> float | None:
    """The least maximum (``limit`` None), or the least total under a maximum; None unless proven in time."""
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    rows, ranks = cap.shape
    cells = rows * ranks
    eye = sparse.identity
    one = np.ones
    by_expert = sparse.kron(eye(rows), one((1, ranks)))
    by_rank = sparse.kron(one((1, rows)), eye(ranks))
    zero = sparse.csr_matrix
    # Columns: x [cells], y [cells], the maximum p [1].
    equal = sparse.vstack(
        [
            sparse.hstack([by_expert, zero((rows, cells + 1))]),
            sparse.hstack([by_rank, zero((ranks, cells + 1))]),
        ]
    )
    value = np.concatenate([loads, target])
    away = np.flatnonzero(foreign.ravel())
    limits = sparse.diags(cap.ravel().astype(float), format="csr")
    linked = sparse.hstack([eye(cells, format="csr")[away], -limits[away], zero((len(away), 1))])
    per_rank = sparse.hstack([zero((ranks, cells)), by_rank, -one((ranks, 1))])
    cost = np.zeros(2 * cells + 1)
    if limit is None:
        cost[-1] = 1
    else:
        cost[cells : 2 * cells] = 1
    result = milp(
        cost,
        constraints=[
            LinearConstraint(equal, value, value),
            LinearConstraint(sparse.vstack([linked, per_rank]), -np.inf, 0),
        ],
        bounds=Bounds(
            np.zeros(2 * cells + 1), np.concatenate([cap.ravel(), foreign.ravel(), [rows if limit is None else limit]])
        ),
        integrality=np.concatenate([np.zeros(cells), np.ones(cells + 1)]),
        options={"time_limit": seconds},
    )
    return result.fun if result.status == 0 else None


@compiled
def one_piece_suffices(loads: np.ndarray, target: np.ndarray) -> bool:
    """Whether a plan exists in which no rank has more than one redundant expert: exact, by dynamic programming.

    Donations on a cycle can be reduced until one is zero, so if there is such a plan there is one in which every rank
    has at most one donor and the ranks form a tree. What enters a subtree is what its ranks lack together, whatever its
    shape. Below rank r hangs a set of subtrees, each group of them fed by one expert of r that holds what they lack.

    Args:
        loads: int64 ``[E]``, tokens of each expert.
        target: int64 ``[R]``, tokens that each rank must compute; ``3^R E`` steps, so R is at most about 10.
    """
    ranks, m = len(target), len(loads) // len(target)
    sets = 1 << ranks
    lack = np.zeros(sets, dtype=np.int64)
    for s in range(1, sets):
        for r in range(ranks):
            if s >> r & 1:
                lack[s] += target[r] - loads[r * m : (r + 1) * m].sum()
    tree, forest = np.zeros(sets, dtype=np.bool_), np.zeros(sets, dtype=np.bool_)
    # fed[r, i, s]: the first i experts of rank r can feed the ranks s, all of which hang below r.
    fed = np.zeros((ranks, m + 1, sets), dtype=np.bool_)
    forest[0] = True
    fed[:, :, 0] = True
    for s in range(1, sets):
        for r in range(ranks):
            if lack[s] >= 0 and s >> r & 1 and fed[r, m, s ^ (1 << r)]:
                tree[s] = True
        lowest = s & -s
        rest = part = s ^ lowest
        while True:
            if tree[part | lowest] and forest[rest ^ part]:
                forest[s] = True
            if part == 0:
                break
            part = (part - 1) & rest
        for r in range(ranks):
            if s >> r & 1:
                continue
            for i in range(m):
                possible, part = fed[r, i, s], s
                while not possible and part > 0:
                    possible = forest[part] and lack[part] <= loads[r * m + i] and fed[r, i, s ^ part]
                    part = (part - 1) & s
                fed[r, i + 1, s] = possible
    return tree[sets - 1]


def alias_plan(counts: np.ndarray) -> np.ndarray:
    """``x[E, R]`` of the plain alias method: the emptiest rank is filled by the fullest, largest experts first."""
    ranks, num_experts, m = check_counts(counts.shape)
    left = np.asarray(counts, dtype=np.int64).sum(0).copy()
    spare = left.reshape(ranks, m).sum(1) - np.array(targets(int(left.sum()), ranks))
    x = np.zeros((num_experts, ranks), dtype=np.int64)
    while spare.min() < 0:
        r, q = int(spare.argmin()), int(spare.argmax())
        own = left[q * m : (q + 1) * m]
        for e in np.argsort(-own, kind="stable"):
            amount = min(int(own[e]), int(-spare[r]))
            own[e] -= amount
            x[q * m + e, r] += amount
            spare[q] -= amount
            spare[r] += amount
        # A finished rank keeps spare 0 and is neither emptiest nor fullest again while any gap is left.
    home = np.arange(num_experts) // m
    x[np.arange(num_experts), home] += left
    return x


def redundancy(assignment: np.ndarray) -> tuple[int, int]:
    """``(max_r |D_r|, sum_r |D_r|)`` of any ``x[E, R]``."""
    num_experts, ranks = assignment.shape
    home = np.arange(num_experts) // (num_experts // ranks)
    foreign = (assignment > 0) & (home[:, None] != np.arange(ranks))
    return int(foreign.sum(0).max()), int(foreign.sum())
