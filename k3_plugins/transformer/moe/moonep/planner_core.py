"""The greedy rules of `planner` as scalar loops over arrays, compiled by numba where it is installed.

Every function is plain Python with the same result either way; compiled, a plan takes a tenth of a millisecond,
interpreted it takes a hundred times longer. Experts are carried as keys ``size * E + expert``, so that ordering by size
has one tie-break everywhere; all tables of keys are kept sorted in ascending order.

Letters as in `planner`: R ranks, E experts, m home experts per rank; d the gap of the rank at hand.
"""

from __future__ import annotations

import numpy as np

from k3_plugins.compat.compiled import compiled


@compiled
def _place(table: np.ndarray, count: int, key: int) -> int:
    """First index of the first ``count`` entries with ``table[i] >= key``."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if table[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _remove(table: np.ndarray, count: int, key: int) -> int:
    """Take ``key`` out; the new count."""
    for i in range(_place(table, count, key), count - 1):
        table[i] = table[i + 1]
    return count - 1


@compiled
def _insert(table: np.ndarray, count: int, key: int) -> int:
    """Put ``key`` in; the new count."""
    i = count
    while i > 0 and table[i - 1] > key:
        table[i] = table[i - 1]
        i -= 1
    table[i] = key
    return count + 1


@compiled
def totals(counts: np.ndarray, loads: np.ndarray) -> int:
    """Add the rows of ``counts [R, E]`` into ``loads [E]``; the smallest count."""
    least = 0
    for r in range(counts.shape[0]):
        for e in range(counts.shape[1]):
            loads[e] += counts[r, e]
            least = min(least, counts[r, e])
    return least


@compiled
def lower_bound(loads: np.ndarray, spare: np.ndarray) -> int:
    """No plan has a smaller maximum: the largest gap needs this many pieces even of the largest experts."""
    gap = -spare.min()
    if gap <= 0:
        return 0
    by_size = np.sort(loads)
    pieces = 0
    while gap > 0:
        pieces += 1
        gap -= by_size[len(by_size) - pieces]
    return pieces


@compiled
def _split(keys: np.ndarray, count: int, gap: int, num_experts: int, out: np.ndarray) -> int:
    """Use the keys in order, the last one only as far as needed: rows ``(tokens, key)`` of ``out``; how many."""
    used = 0
    for i in range(count):
        amount = min(keys[i] // num_experts, gap)
        if amount <= 0:
            break
        out[used, 0] = amount
        out[used, 1] = keys[i]
        used += 1
        gap -= amount
    return used


@compiled
def _window(pool: np.ndarray, count: int, p: int, gap: int, num_experts: int) -> int:
    """Start of the first ``p`` consecutive keys of the ascending ``pool`` that hold ``gap`` together."""
    low, high = 0, count - p  # the sum grows with the start
    while low < high:
        middle = (low + high) // 2
        held = 0
        for i in range(middle, middle + p):
            held += pool[i] // num_experts
        if held < gap:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _held(pool: np.ndarray, count: int, p: int, num_experts: int) -> int:
    """Tokens in the ``p`` largest keys."""
    total = 0
    for i in range(count - p, count):
        total += pool[i] // num_experts
    return total


@compiled
def _recap(
    q: int, spare: np.ndarray, own: np.ndarray, rank_caps: np.ndarray, rank_count: np.ndarray, caps: np.ndarray,
    count: int, num_experts: int,
) -> int:  # fmt: skip
    """Split what rank ``q`` can spare over its experts, largest first; the new number of all ranks' caps."""
    m = own.shape[1]
    for i in range(rank_count[q]):
        count = _remove(caps, count, rank_caps[q, i])
    fresh, left = 0, spare[q]
    for i in range(m - 1, -1, -1):
        size, e = own[q, i] // num_experts, own[q, i] % num_experts
        if left <= 0 or size == 0:
            break
        cap = min(size, left) * num_experts + e
        rank_caps[q, fresh] = cap
        fresh += 1
        count = _insert(caps, count, cap)
        left -= size
    rank_count[q] = fresh
    return count


@compiled
def _without_dip(
    caps: np.ndarray, count: int, limit: int, gap: int, num_experts: int, work: np.ndarray, out: np.ndarray
) -> int:
    """The smallest at most ``limit`` consecutive caps that hold ``gap``, largest first; 0 pieces if there are none."""
    i = _place(caps, count, gap * num_experts)
    if i < count:
        out[0, 0], out[0, 1] = gap, caps[i]
        return 1
    for p in range(2, min(limit, count) + 1):
        if _held(caps, count, p, num_experts) >= gap:
            start = _window(caps, count, p, gap, num_experts)
            for j in range(p):
                work[j] = caps[start + p - 1 - j]
            return _split(work, p, gap, num_experts, out)
    return 0


@compiled
def _smallest_dip(spare: np.ndarray, own: np.ndarray, gap: int, num_experts: int) -> int:
    """The smallest expert that fills ``gap`` alone, of the donor with most to spare; -1 if there is none."""
    ranks, m = own.shape
    best = -1
    for q in range(ranks):
        able = spare[q] > 0 and own[q, m - 1] >= gap * num_experts
        if able and (best < 0 or spare[q] >= spare[best]):
            best = q
    return -1 if best < 0 else own[best, _place(own[best], m, gap * num_experts)]


@compiled
def _spread(
    spare: np.ndarray, own: np.ndarray, gap: int, p: int, num_experts: int, work: np.ndarray, taken: np.ndarray
) -> bool:
    """``p`` experts that each hold at least ``gap / p``, from as many donors as possible: in ``work``, largest first.

    Donors come in order of what they can spare, each with its largest expert, then each with its second largest, ...
    """
    ranks, m = own.shape
    least = -(-gap // p) * num_experts
    found = 0
    for place in range(m):
        taken[:] = False
        while found < p:
            best = -1
            for q in range(ranks):
                able = not taken[q] and spare[q] > 0 and own[q, m - 1 - place] >= least
                if able and (best < 0 or spare[q] >= spare[best]):
                    best = q
            if best < 0:
                break
            taken[best] = True
            work[found] = -own[best, m - 1 - place]
            found += 1
        if found == p:
            work[:p].sort()
            for i in range(p):
                work[i] = -work[i]
            return True
    return False


@compiled
def mixed(salt: int, step: int, item: int) -> int:
    """A number from 0 to 2^31 - 1 that looks random; the same in `planner_torch`."""
    value = (salt * 7919 + step * 104729 + item * 1299709) % 2147483648
    for _ in range(2):
        value = (value ^ (value >> 15)) * 1103515245 % 2147483648
    return value ^ (value >> 13)


@compiled
def _joint(
    spare: np.ndarray, rank: int, p: int, offered: np.ndarray, count: int, num_experts: int, need: np.ndarray,
    taken: np.ndarray, work: np.ndarray, salt: int,
) -> bool:  # fmt: skip
    """Share the largest experts out among all g ranks that need ``p`` pieces, in p rounds, and take ``rank``'s share.

    In each round the neediest rank gets the largest of the next g experts, and so on; with a salt, needs are blurred by
    up to a piece, a half, a quarter or an eighth of one, as the salt says. False if there is only this rank,
    or if its share does not fill the gap; else its share is in ``work``, largest first.
    """
    ranks = len(spare)
    enough = _held(offered, count, p - 1, num_experts)  # a rank with a smaller gap needs fewer pieces
    group = 0
    for r in range(ranks):
        taken[r] = -spare[r] <= enough
        need[r] = -spare[r]
        group += not taken[r]
    if group < 2 or group * p > count:
        return False
    outside = taken.copy()
    blur = -spare[rank] // p // (1 << salt % 4) + 1
    held = 0
    for turn in range(p):
        for i in range(group):
            best, highest = -1, 0
            for r in range(ranks):
                if not taken[r]:
                    value = need[r] + (mixed(salt, turn, r) % blur if salt else 0)
                    if best < 0 or value >= highest:
                        best, highest = r, value
            taken[best] = True
            key = offered[count - 1 - turn * group - i]
            need[best] -= key // num_experts
            if best == rank:
                work[turn] = key
                held += key // num_experts
        taken[:] = outside
    return held >= -spare[rank]


@compiled
def _whole(offered: np.ndarray, count: int, p: int, gap: int, num_experts: int, work: np.ndarray) -> bool:
    """The ``p - 1`` largest experts that do not fill ``gap`` alone and the smallest that completes them: ``work``."""
    end = _place(offered, count, gap * num_experts)
    first = end - (p - 1)
    if p < 2 or first < 0:
        return False
    rest = gap
    for i in range(p - 1):
        work[i] = offered[end - 1 - i]
        rest -= work[i] // num_experts
    if rest <= 0:
        return False
    last = _place(offered, count, rest * num_experts)
    if first <= last < end:
        last = end
    if last == count:
        return False
    work[p - 1] = offered[last]
    return True


@compiled
def _drawn(
    offered: np.ndarray, count: int, fewest: int, limit: int, gap: int, num_experts: int, salt: int, step: int,
    taken: np.ndarray, work: np.ndarray,
) -> int:  # fmt: skip
    """Pieces for ``gap`` by lot, in ``work``: how many, or 0 if those drawn do not fill it exactly.

    Between ``fewest`` and ``limit`` pieces. All but the last are used up; they are drawn among as many of the largest
    experts that do not fill the gap alone, and up to 7 more. The last one completes them: the smallest that can, or one
    drawn among those that can.
    """
    lot = mixed(salt, step, num_experts)
    pieces = fewest + (lot >> 3) % (limit - fewest + 1) if limit > fewest else fewest
    end = _place(offered, count, gap * num_experts)
    first = max(end - (pieces - 1 + (lot >> 8) % 8), 0)
    if end - first < pieces - 1:
        return 0
    taken[:count] = False
    rest = gap
    for piece in range(pieces):
        chosen, highest = -1, -1
        last = piece + 1 == pieces
        if last and rest <= 0:
            return 0
        start = _place(offered, count, rest * num_experts) if last else first
        for i in range(start, count if last else end):
            if not taken[i]:
                e = offered[i] % num_experts
                value = mixed(salt, step, e) * num_experts + e
                if value > highest:
                    chosen, highest = i, value
                if last and lot & 1:
                    break
        if chosen < 0:
            return 0
        taken[chosen] = True
        work[piece] = offered[chosen]
        rest -= offered[chosen] // num_experts
    return pieces


@compiled
def fill(
    loads: np.ndarray, spare: np.ndarray, bound: int, level: int, no_dip: bool, forced: bool, from_all: bool,
    largest: bool, top: bool, smallest_gap: bool, joint: bool, whole: bool, drawn: bool,
    salt: int, moves: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """One run of one variant.

    Args:
        loads: int64 ``[E]``.
        spare: int64 ``[R]``, load minus target of each rank; changed in place.
        bound: the lower bound L.
        level, no_dip, forced, from_all, largest, top, smallest_gap, joint, whole, drawn, salt: see
            `planner.Variant`.
        moves: int64 ``[(R - 1) m, 3]``; receives rows ``(rank, expert, tokens)`` of what leaves home.

    Returns:
        The largest number of pieces on a rank, and the number of moves.
    """
    E, R = len(loads), len(spare)
    m = E // R
    limit = min(bound + level, m)
    keys = loads * E + np.arange(E)
    start = keys.copy()
    own = keys.copy().reshape(R, m)
    for q in range(R):
        own[q].sort()
    pool = np.sort(keys)
    opened = np.ones(R, dtype=np.bool_)
    caps, cap_count = np.empty(E, dtype=np.int64), 0
    rank_caps, rank_count = np.empty((R, m), dtype=np.int64), np.zeros(R, dtype=np.int64)
    if no_dip:
        for q in range(R):
            cap_count = _recap(q, spare, own, rank_caps, rank_count, caps, cap_count, E)
    offered, work, taken = np.empty(E, dtype=np.int64), np.empty(E, dtype=np.int64), np.empty(R, dtype=np.bool_)
    lots = np.empty(E, dtype=np.bool_)
    pieces, need = np.empty((E, 2), dtype=np.int64), np.empty(R, dtype=np.int64)
    worst = total = step = 0
    while True:
        step += 1
        rank, urgent = -1, 0
        for r in range(R):
            if spare[r] < 0:
                value = spare[r] if smallest_gap else -spare[r]
                if drawn:
                    value *= mixed(salt, step, r) % 8 + 1
                if rank < 0 or (value > urgent if smallest_gap else value >= urgent):
                    rank, urgent = r, value
        if rank < 0:
            return worst, total
        gap = -spare[rank]
        opened[rank] = False
        used = 0
        if no_dip:
            used = _without_dip(caps, cap_count, limit, gap, E, work, pieces)
            if used == 0:
                key = _smallest_dip(spare, own, gap, E)
                if key >= 0:
                    pieces[0, 0], pieces[0, 1] = gap, key
                    used = 1
        if used == 0:
            count = 0
            for i in range(_place(pool, E, E), E):  # without experts that have no token left
                q = pool[i] % E // m
                if opened[q] if from_all else spare[q] > 0:
                    offered[count] = pool[i]
                    count += 1
            fewest = 1
            while _held(offered, count, fewest, E) < gap:
                fewest += 1
            if drawn:
                used = _drawn(offered, count, fewest, limit, gap, E, salt, step, lots, work)
            if used:
                used = _split(work, used, gap, E, pieces)
            elif whole and _whole(offered, count, limit, gap, E, work):
                used = _split(work, limit, gap, E, pieces)
            elif forced and 1 < limit <= count and _held(offered, count, limit, E) >= gap:
                first = _window(offered, count, limit, gap, E)
                used = _split(offered[first:], limit, gap, E, pieces)
            elif fewest == 1:
                i = _place(offered, count, gap * E)
                key = offered[i]
                if salt and key // E != gap:
                    highest = -1
                    for j in range(i, count):
                        lot = mixed(salt, step, offered[j] % E) * E + offered[j] % E
                        if lot > highest:
                            key, highest = offered[j], lot
                elif largest and key // E != gap:
                    for j in range(i, count):
                        if start[offered[j] % E] > start[key % E]:
                            key = offered[j]
                pieces[0, 0], pieces[0, 1] = gap, key
                used = 1
            elif joint and _joint(spare, rank, fewest, offered, count, E, need, taken, work, salt):
                used = _split(work, fewest, gap, E, pieces)
            elif no_dip and _spread(spare, own, gap, fewest, E, work, taken):
                used = _split(work, fewest, gap, E, pieces)
            elif top:
                for i in range(fewest - 1):
                    work[i] = offered[count - 1 - i]
                rest = gap - _held(offered, count, fewest - 1, E)
                work[fewest - 1] = offered[_place(offered, count - fewest + 1, rest * E)]
                used = _split(work, fewest, gap, E, pieces)
            else:
                first = _window(offered, count, fewest, gap, E)
                for i in range(fewest):
                    work[i] = offered[first + fewest - 1 - i]
                used = _split(work, fewest, gap, E, pieces)
        for i in range(used):
            amount, e = pieces[i, 0], pieces[i, 1] % E
            q = e // m
            moves[total, 0], moves[total, 1], moves[total, 2] = rank, e, amount
            total += 1
            old = keys[e]
            keys[e] = old - amount * E
            spare[q] -= amount
            _insert(pool, _remove(pool, E, old), keys[e])
            if no_dip:
                _insert(own[q], _remove(own[q], m, old), keys[e])
                cap_count = _recap(q, spare, own, rank_caps, rank_count, caps, cap_count, E)
        spare[rank] = 0
        worst = max(worst, used)


@compiled
def assemble(loads: np.ndarray, moves: np.ndarray, x: np.ndarray, slots: np.ndarray) -> None:
    """Write the plan: what does not move stays at home.

    Args:
        loads: int64 ``[E]``.
        moves: int64 ``[n, 3]`` from `fill`.
        x: int64 ``[E, R]``, zeros; receives the assignment.
        slots: int64 ``[R, m]``, -1; receives the redundant experts of each rank in ascending order.
    """
    E, R = x.shape
    m = E // R
    for e in range(E):
        x[e, e // m] = loads[e]
    count = np.zeros(R, dtype=np.int64)
    for i in range(len(moves)):
        rank, e, amount = moves[i]
        x[e, rank] = amount
        x[e, e // m] -= amount
        count[rank] = _insert(slots[rank], count[rank], e)
