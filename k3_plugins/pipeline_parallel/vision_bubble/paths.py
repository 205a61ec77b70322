"""Longest paths through a set of tasks, kept up to date while tasks are inserted into the order of a rank.

Every task has at most one neighbour on each side in its rank's order (``before``, ``after``), at most one task whose
result it needs (``needs``) and at most one that needs its result (``feeds``); -1 is none. ``head`` is the earliest
start, ``tail`` the longest path from the end of the task to the end of the step. Then the makespan after inserting a
task between two neighbours is known without inserting it (the insertion estimate of job-shop scheduling), and the graph
stays free of cycles as long as the insertion respects heads (`best_place`).

Scalar loops over arrays, compiled by numba where it is installed, with the same result either way.
"""

from __future__ import annotations

import numpy as np

from k3_plugins.compat.compiled import compiled


@compiled
def longest_paths(
    time: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    needs: np.ndarray,
    feeds: np.ndarray,
    head: np.ndarray,
    tail: np.ndarray,
) -> int:
    """Fill ``head`` and ``tail`` from nothing; the number of tasks that could be ordered (fewer than all: a cycle)."""
    n = time.shape[0]
    order = np.empty(n, dtype=np.int64)
    waits = np.zeros(n, dtype=np.int64)
    count = 0
    for x in range(n):
        waits[x] = int(before[x] >= 0) + int(needs[x] >= 0)
        if waits[x] == 0:
            order[count] = x
            count += 1
    done = 0
    while done < count:
        x = order[done]
        done += 1
        start = 0.0
        if before[x] >= 0:
            start = max(start, head[before[x]] + time[before[x]])
        if needs[x] >= 0:
            start = max(start, head[needs[x]] + time[needs[x]])
        head[x] = start
        for y in (after[x], feeds[x]):
            if y >= 0:
                waits[y] -= 1
                if waits[y] == 0:
                    order[count] = y
                    count += 1
    for i in range(count - 1, -1, -1):
        x = order[i]
        rest = 0.0
        if after[x] >= 0:
            rest = max(rest, time[after[x]] + tail[after[x]])
        if feeds[x] >= 0:
            rest = max(rest, time[feeds[x]] + tail[feeds[x]])
        tail[x] = rest
    return count


@compiled
def _relax(
    first: int,
    second: int,
    time: np.ndarray,
    near: np.ndarray,
    source: np.ndarray,
    next_near: np.ndarray,
    target: np.ndarray,
    path: np.ndarray,
    queue: np.ndarray,
    queued: np.ndarray,
) -> None:
    """Grow ``path`` from two tasks on until it is the longest again; for heads, and with sides swapped for tails."""
    size = queue.shape[0]
    read, count = 0, 0
    for x in (first, second):
        if x >= 0 and not queued[x]:
            queue[(read + count) % size] = x
            queued[x] = True
            count += 1
    while count > 0:
        x = queue[read]
        read = (read + 1) % size
        count -= 1
        queued[x] = False
        longest = path[x]
        if near[x] >= 0:
            longest = max(longest, path[near[x]] + time[near[x]])
        if source[x] >= 0:
            longest = max(longest, path[source[x]] + time[source[x]])
        if longest > path[x]:
            path[x] = longest
            for y in (next_near[x], target[x]):
                if y >= 0 and not queued[y]:
                    queue[(read + count) % size] = y
                    queued[y] = True
                    count += 1


@compiled
def insert(
    x: int,
    a: int,
    b: int,
    time: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    needs: np.ndarray,
    feeds: np.ndarray,
    head: np.ndarray,
    tail: np.ndarray,
    queue: np.ndarray,
    queued: np.ndarray,
) -> None:
    """Put ``x`` between the neighbours ``a`` and ``b`` (-1: start or end of the rank) and update all paths."""
    before[x], after[x] = a, b
    if a >= 0:
        after[a] = x
    if b >= 0:
        before[b] = x
    _relax(x, b, time, before, needs, after, feeds, head, queue, queued)
    _relax(x, a, time, after, feeds, before, needs, tail, queue, queued)


@compiled
def best_place(
    x: int,
    a: int,
    b: int,
    latest: bool,
    goal: float,
    time: np.ndarray,
    after: np.ndarray,
    needs: np.ndarray,
    feeds: np.ndarray,
    head: np.ndarray,
    tail: np.ndarray,
    closed: np.ndarray,
    found: np.ndarray,
) -> int:
    """The best place for ``x`` in one rank's order, from between ``a`` and ``b`` on.

    Places are compared by the makespan they lead to, not counting up to ``goal``; then by how far ``x`` pushes what
    follows it; then by its start. A place is left out if the graph could get a cycle there: behind a task that starts
    after the one that needs ``x`` has ended, or ahead of a task that ends before the one that ``x`` needs has started.

    Args:
        latest: prefer late starts (forwards, whose outputs are kept from then on) over early ones (backwards).
        closed: tasks that nothing may be put directly ahead of.
        found: ``[3]``, filled with makespan, push and start of the best place.

    Returns:
        The task after which to insert (-1: start of the rank), or -2 if there is no place.
    """
    best = -2
    source, target = needs[x], feeds[x]
    # What an encoder forward feeds has its place; what a backward piece feeds, the next piece, has none yet.
    fixed = target >= 0 and source < 0
    while True:
        if fixed and a >= 0 and head[a] >= head[target] + time[target]:
            break
        ancestor = b >= 0 and source >= 0 and head[b] + time[b] <= head[source]
        if not ancestor and not (b >= 0 and closed[b]):
            start = 0.0
            if a >= 0:
                start = head[a] + time[a]
            if source >= 0:
                start = max(start, head[source] + time[source])
            end = start + time[x]
            rest, push = tail[x], 0.0
            if b >= 0:
                rest = max(rest, time[b] + tail[b])
                push = max(push, end - head[b])
            if target >= 0:
                rest = max(rest, time[target] + tail[target])
                if fixed:
                    push = max(push, end - head[target])
            makespan = max(end + rest, goal)
            better = best == -2 or makespan < found[0]
            if not better and makespan == found[0]:
                better = push < found[1] or (push == found[1] and latest and start > found[2])
            if better:
                best = a
                found[0], found[1], found[2] = makespan, push, start
                if not latest and makespan == goal and push == 0.0:
                    break
        if b < 0:
            break
        a = b
        b = after[b]
    return best
