"""Layouts and ownership: what DDP's buckets hold, and which rank owns what. Pure functions of sizes; no tensors, no torch.

A layout is given; ownership is decided. The four policies:

* ``whole_bucket``: bucket *i* belongs to rank *i mod n*;
* ``by_parameter``: a bucket is cut between parameters, each run goes to the least loaded rank;
* ``by_element``: every bucket is cut into *n* nearly equal element ranges, rank *r* owns the *r*-th;
* ``greedy``: no buckets; parameters, largest first, go to the least loaded rank.

All are linear in the parameters and logarithmic in the ranks, and the same input gives the same owners on every rank.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple, NewType, Protocol

GroupRank = NewType("GroupRank", int)  # a rank's place in the process group the optimizer is sharded over
GlobalRank = NewType("GlobalRank", int)  # a rank's place in the whole job


class Policy(Enum):
    WHOLE_BUCKET = "whole_bucket"
    BY_PARAMETER = "by_parameter"
    BY_ELEMENT = "by_element"


# Slots, pieces and segments are tuples, not dataclasses: there may be a million, and these are built five times faster.
class Slot(NamedTuple):
    """One parameter's place in a bucket."""

    param: int  # index over all parameters of the optimizer, in param_groups order
    numel: int


class Piece(NamedTuple):
    """A run of one parameter's elements, counted in memory order."""

    param: int
    start: int
    stop: int


class Segment(NamedTuple):
    """Consecutive pieces of one bucket that one rank owns; a rank may own several segments of a bucket, or none."""

    owner: GroupRank
    pieces: tuple[Piece, ...]


Layout = tuple[tuple[Slot, ...], ...]  # buckets in the order DDP reduces them


class BucketOwners(Protocol):
    """Who owns what of one bucket. Segments cover it and do not overlap."""

    def segments(self) -> tuple[Segment, ...]: ...

    def owned_by(self, rank: GroupRank) -> tuple[Piece, ...]: ...


class Section(BucketOwners, Protocol):
    """Owners by rank: with its parameters in this order, what a rank owns is one range, behind that of the rank before."""

    def order(self) -> list[int]:
        """Its parameters, as they lie one behind the other."""

    def bounds(self) -> list[int]:
        """Where each rank's range begins, in elements, and where the last one ends."""

    def end(self, num_ranks: int) -> int:
        """Where the first ``num_ranks`` ranges end."""


@dataclass(frozen=True, slots=True)
class WholeParams:
    """A bucket cut between parameters, or not at all; its segments are in bucket order."""

    _segments: tuple[Segment, ...]

    def segments(self) -> tuple[Segment, ...]:
        return self._segments

    def owned_by(self, rank: GroupRank) -> tuple[Piece, ...]:
        return tuple(piece for segment in self._segments if segment.owner == rank for piece in segment.pieces)


@dataclass(frozen=True, slots=True)
class ByRank:
    """Whole parameters, those of the first rank first; a rank may own any number of them, and most may own none."""

    _owned: Mapping[GroupRank, tuple[Piece, ...]]  # by rank, in order
    _world_size: int

    @classmethod
    def of(cls, bucket: Sequence[Slot], owners: Sequence[GroupRank], *, world_size: int) -> ByRank:
        """``owners`` are those of the bucket's parameters."""
        owned: dict[GroupRank, list[Piece]] = {}
        for (param, numel), owner in zip(bucket, owners, strict=True):
            owned.setdefault(owner, []).append(Piece(param, 0, numel))
        return cls({rank: tuple(owned[rank]) for rank in sorted(owned)}, world_size)

    def segments(self) -> tuple[Segment, ...]:
        return tuple(Segment(rank, pieces) for rank, pieces in self._owned.items())

    def owned_by(self, rank: GroupRank) -> tuple[Piece, ...]:
        return self._owned.get(rank, ())

    def order(self) -> list[int]:
        return [piece.param for pieces in self._owned.values() for piece in pieces]

    def bounds(self) -> list[int]:
        sizes = [0] * self._world_size
        for rank, pieces in self._owned.items():
            sizes[rank] = sum(piece.stop for piece in pieces)
        return list(accumulate(sizes, initial=0))

    def end(self, num_ranks: int) -> int:
        return sum(piece.stop for rank, pieces in self._owned.items() if rank < num_ranks for piece in pieces)


@dataclass(frozen=True, slots=True)
class EqualRanges:
    """A bucket cut into one range per rank, each end at the allowed cut nearest to its equal share.

    Nothing is spelled out before it is asked for: a rank needs its own range, not those of 4095 others.
    """

    _slots: Sequence[Slot]
    _starts: Sequence[int]  # of each slot, and the bucket's total
    _world_size: int
    _cut: int | None  # None: only between parameters

    @classmethod
    def of(cls, bucket: Sequence[Slot], *, world_size: int, cut: int | None) -> EqualRanges:
        return cls(bucket, _starts(bucket), world_size, cut)

    def segments(self) -> tuple[Segment, ...]:
        ranks = (GroupRank(rank) for rank in range(self._world_size))
        return tuple(Segment(rank, pieces) for rank in ranks if (pieces := self.owned_by(rank)))

    def owned_by(self, rank: GroupRank) -> tuple[Piece, ...]:
        first, last = self.end(rank), self.end(rank + 1)
        pieces = []
        for place in range(bisect_right(self._starts, first) - 1, len(self._slots)):
            start, (param, numel) = self._starts[place], self._slots[place]
            if start >= last:
                break
            piece = Piece(param, max(first - start, 0), min(last - start, numel))
            if piece.start < piece.stop:
                pieces.append(piece)
        if rank == 0:  # parameters of no elements lie in no range, but an optimizer may keep a step count for them
            pieces += [Piece(slot.param, 0, 0) for slot in self._slots if slot.numel == 0]
        return tuple(pieces)

    def order(self) -> list[int]:
        return [slot.param for slot in self._slots]

    def bounds(self) -> list[int]:
        return [self.end(rank) for rank in range(self._world_size + 1)]

    def end(self, num_ranks: int) -> int:
        """Where the first ``num_ranks`` ranges end."""
        total = self._starts[-1]
        ideal = num_ranks * total // self._world_size
        if ideal == total:
            return total
        place = bisect_right(self._starts, ideal) - 1
        inside, numel = ideal - self._starts[place], self._slots[place].numel
        if self._cut is None:
            return self._starts[place] + (numel if 2 * inside > numel else 0)
        return self._starts[place] + min((inside + self._cut // 2) // self._cut * self._cut, numel)


@dataclass(frozen=True, slots=True)
class Sections:
    """A bucket some of whose parameters are cut by one rule, and others by another. A rank owns a range of each section."""

    sections: tuple[Section, ...]

    def segments(self) -> tuple[Segment, ...]:
        return tuple(segment for section in self.sections for segment in section.segments())

    def owned_by(self, rank: GroupRank) -> tuple[Piece, ...]:
        return tuple(piece for section in self.sections for piece in section.owned_by(rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Who owns what, bucket by bucket."""

    policy: Policy
    world_size: int
    buckets: tuple[BucketOwners, ...]

    def owner_of_whole_params(self) -> dict[int, GroupRank]:
        """Parameter index to owner, for policies that never cut a parameter."""
        assert self.policy is not Policy.BY_ELEMENT, "a parameter cut by element has several owners"
        segments = (segment for bucket in self.buckets for segment in bucket.segments())
        return {piece.param: segment.owner for segment in segments for piece in segment.pieces}


def assign_owners(layout: Layout, *, world_size: int, policy: Policy, cut: int | None = 1) -> Ownership:
    """Decide who owns what in ``layout``.

    ``by_element`` cuts a parameter only at multiples of ``cut`` elements from its start, or with None not at all.
    """
    if world_size < 1 or (cut is not None and cut < 1):
        raise ValueError(f"world_size and cut must be at least 1, got {world_size} and {cut}")
    buckets: tuple[BucketOwners, ...]
    match policy:
        case Policy.WHOLE_BUCKET:
            buckets = tuple(WholeParams(_whole(bucket, GroupRank(i % world_size))) for i, bucket in enumerate(layout))
        case Policy.BY_PARAMETER:
            buckets = tuple(WholeParams(segments) for segments in _by_parameter(layout, world_size))
        case Policy.BY_ELEMENT:
            buckets = tuple(EqualRanges.of(bucket, world_size=world_size, cut=cut) for bucket in layout)
    return Ownership(policy=policy, world_size=world_size, buckets=buckets)


def greedy_owners(group_sizes: Sequence[Sequence[int]], *, world_size: int) -> list[list[GroupRank]]:
    """Owner of each parameter of each group: in every group the largest first, always to the least loaded rank.

    Loads carry over from group to group, so appending a group never moves a parameter of an earlier one.
    """
    load = [(0, GroupRank(rank)) for rank in range(world_size)]  # sorted, hence a heap; ties go to the lowest rank
    owners: list[list[GroupRank]] = []
    for sizes in group_sizes:
        of_group = [GroupRank(0)] * len(sizes)
        for place in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
            size, rank = load[0]
            heapq.heapreplace(load, (size + sizes[place], rank))
            of_group[place] = rank
        owners.append(of_group)
    return owners


def _whole(bucket: Sequence[Slot], owner: GroupRank) -> tuple[Segment, ...]:
    return (Segment(owner, tuple(Piece(slot.param, 0, slot.numel) for slot in bucket)),) if bucket else ()


def _by_parameter(layout: Layout, world_size: int) -> tuple[tuple[Segment, ...], ...]:
    sizes = [sum(slot.numel for slot in bucket) for bucket in layout]
    threshold = sum(sizes) / world_size
    load = [(0, GroupRank(rank)) for rank in range(world_size)]
    owned: list[tuple[Segment, ...]] = [()] * len(layout)
    for index in sorted(range(len(layout)), key=lambda i: sizes[i]):
        segments: list[Segment] = []
        served: list[tuple[int, GroupRank]] = []  # ranks that own part of this bucket sit out until it is done
        for run in _runs_below(layout[index], threshold):
            if not load:  # more runs than ranks: every rank may be served again
                load, served = served, []
                heapq.heapify(load)
            size, owner = heapq.heappop(load)
            served.append((size + sum(slot.numel for slot in run), owner))
            segments += _whole(run, owner)
        for entry in served:
            heapq.heappush(load, entry)
        owned[index] = tuple(segments)
    return tuple(owned)


def _runs_below(bucket: Sequence[Slot], threshold: float) -> list[Sequence[Slot]]:
    """Cut a bucket before each parameter that would bring the run to the threshold; no run is empty."""
    runs: list[Sequence[Slot]] = []
    first, size = 0, 0
    for place, slot in enumerate(bucket):
        if size + slot.numel >= threshold and place > first:
            runs.append(bucket[first:place])
            first, size = place, 0
        size += slot.numel
    if bucket:
        runs.append(bucket[first:])
    return runs


def _starts(bucket: Sequence[Slot]) -> list[int]:
    return list(accumulate((slot.numel for slot in bucket), initial=0))


# With backward twice as long as forward, as it is by count of operations, all gathers are hidden if wire and compute take about
# equally long and a third of the gathers finds room in backward, beside the reductions. Where the wire is faster the rest fits
# into forward anyway. Where it is slower it must never be idle, so what forward needs last is gathered last: not the first buckets
# are gathered early, but those behind them.
_EARLY_FROM, _EARLY_TO = 1 / 6, 1 / 2


def early_buckets(sizes: Sequence[int]) -> range:
    """Which buckets are gathered while backward computes, if gathers are lazy."""
    ends, total = list(accumulate(sizes)), sum(sizes)
    first, last = (bisect_right(ends, total * share) for share in (_EARLY_FROM, _EARLY_TO))
    return range(max(first, 1), last)
