"""Which rank owns parameters that stay whole: one assignment over all of them, whatever bucket they are in. No tensors, no torch.

Parameters of equal size are dealt out in the order of the model, so that those of one bucket go to different ranks.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import gcd
from operator import add
from typing import NamedTuple

from zerolap.schedule.ownership import GroupRank

# The unit of work. An update that reads and writes every element once takes about as long as so many multiplications an element of a
# matrix product.
COST_PER_ELEMENT = 32
_GOOD_ENOUGH = 1.005  # of what the busiest rank has to do at least
_MOST_TRIES = 12
_MOST_PLACES = 100_000  # ranks times different sizes, in one try


class Load(NamedTuple):
    """What owning a parameter means for a rank."""

    num_bytes: int  # of state
    work: int  # of an update


class Balance(NamedTuple):
    """How much more the busiest rank has than the mean: 1.0 is even."""

    state: float
    work: float

    @classmethod
    def of(cls, loads: Sequence[Load]) -> Balance:
        """``loads`` are the ranks'."""
        return cls(*(_busiest_to_mean(each) for each in zip(*loads, strict=True)))


def assign_whole(loads: Sequence[Load], *, world_size: int) -> list[GroupRank]:
    """The owner of each parameter, so that no rank has much more state, or more work, than others.

    Tried by bytes, by work, and by both; the best is kept. Optimal where sizes allow it to be found: the largest first to whoever has
    least, and if that is not even, by first fit into ever smaller room.
    """
    if not loads:
        return []
    in_bytes, in_work = (list(each) for each in zip(*loads, strict=True))
    total_bytes, total_work = max(1, sum(in_bytes)), max(1, sum(in_work))
    by_bytes = [each * total_work for each in in_bytes]
    by_work = [each * total_bytes for each in in_work]
    ways = [in_bytes]
    if by_bytes != by_work:  # or all are the same
        ways += [in_work, list(map(add, by_bytes, by_work))]
    best: tuple[float, list[GroupRank]] | None = None
    for way in ways:
        owners = _assign(way, world_size)
        score = max(
            _busiest(owners, sizes, world_size) / max(1, at_least(sizes, world_size=world_size)) for sizes in ways[:2]
        )
        if best is None or score < best[0]:
            best = score, owners
        if score <= _GOOD_ENOUGH:
            break
    assert best is not None
    return best[1]


def rank_loads(loads: Sequence[Load], owners: Sequence[GroupRank], *, world_size: int) -> list[Load]:
    """What each rank has, if parameters belong to ``owners``."""
    num_bytes, work = [0] * world_size, [0] * world_size
    for load, owner in zip(loads, owners, strict=True):
        num_bytes[owner] += load[0]
        work[owner] += load[1]
    return [Load(*each) for each in zip(num_bytes, work, strict=True)]


def at_least(sizes: Sequence[int], *, world_size: int) -> int:
    """What the busiest rank has whoever owns what: the mean, in whole parameters; the largest one; two of them, where ranks are too few."""
    unit = gcd(*sizes) or 1
    largest = heapq.nlargest(world_size + 1, sizes)
    pair = largest[world_size - 1] + largest[world_size] if len(largest) > world_size else 0
    return max(-(-sum(sizes) // (world_size * unit)) * unit, largest[0], pair)


def _assign(sizes: Sequence[int], world_size: int) -> list[GroupRank]:
    owners = _largest_to_least_loaded(sizes, world_size)
    low, high = at_least(sizes, world_size=world_size), _busiest(owners, sizes, world_size)
    counts = sorted(Counter(size for size in sizes if size).items(), reverse=True)
    if high <= low * _GOOD_ENOUGH or len(counts) * world_size > _MOST_PLACES:
        return owners
    room = low  # the best there can be is tried first
    for _ in range(_MOST_TRIES):
        rows = _fit(counts, room, world_size)
        if rows is None:
            low = room + 1
        else:
            owners, high = _dealt(sizes, rows), room
        if high <= low * _GOOD_ENOUGH:
            break
        room = (low + high) // 2
    return owners


def _largest_to_least_loaded(sizes: Sequence[int], world_size: int) -> list[GroupRank]:
    load = [(0, rank) for rank in range(world_size)]
    owners = [GroupRank(0)] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):  # stable: equal ones in the model's order
        size, rank = load[0]
        heapq.heapreplace(load, (size + sizes[place], rank))
        owners[place] = GroupRank(rank)
    return owners


def _fit(counts: Sequence[tuple[int, int]], room: int, world_size: int) -> list[list[tuple[int, int]]] | None:
    """Fill rank by rank with the largest that fit; for each rank how many of which size, or None if some are left over."""
    left = [count for _, count in counts]
    rows = []
    for _ in range(world_size):
        free, row = room, []
        for place, (size, _) in enumerate(counts):
            num = min(left[place], free // size)
            if num:
                left[place] -= num
                free -= num * size
                row.append((size, num))
        rows.append(row)
    return None if any(left) else rows


def _dealt(sizes: Sequence[int], rows: Sequence[Sequence[tuple[int, int]]]) -> list[GroupRank]:
    """Owners by how many of each size a rank has: one to each in turn."""
    turns: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of each size: which turn, and the rank
    for rank, row in enumerate(rows):
        for size, num in row:
            turns[size] += [(turn, rank) for turn in range(num)]
    owners = {size: iter([GroupRank(rank) for _, rank in sorted(each)]) for size, each in turns.items()}
    return [next(owners[size]) if size else GroupRank(0) for size in sizes]


def _busiest(owners: Sequence[GroupRank], sizes: Sequence[int], world_size: int) -> int:
    held = [0] * world_size
    for owner, size in zip(owners, sizes, strict=True):
        held[owner] += size
    return max(held)


def _busiest_to_mean(held: Sequence[int]) -> float:
    *_, total = accumulate(held)
    return max(held) * len(held) / total if total else 1.0
