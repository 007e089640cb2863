"""Layouts and plans: what DDP's buckets hold, and which rank owns what. Pure functions of sizes; no tensors, no torch.

A layout is given; a plan is decided. The four policies:

* ``whole_bucket``: bucket *i* belongs to rank *i mod n*;
* ``by_parameter``: a bucket is cut between parameters, each run goes to the least loaded rank;
* ``by_element``: every bucket is cut into *n* nearly equal element ranges, rank *r* owns the *r*-th;
* ``greedy``: no buckets; parameters, largest first, go to the least loaded rank.

All are linear in the parameters and logarithmic in the ranks, and the same input gives the same plan on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

GroupRank = NewType("GroupRank", int)  # a rank's place in the process group the optimizer is sharded over
GlobalRank = NewType("GlobalRank", int)  # a rank's place in the whole job


class Policy(Enum):
    WHOLE_BUCKET = "whole_bucket"
    BY_PARAMETER = "by_parameter"
    BY_ELEMENT = "by_element"


# Slots, pieces and segments are tuples, not dataclasses: a plan may hold a million, and these are built five times faster.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who owns what. Segments of a bucket are in bucket order, cover it and do not overlap."""

    policy: Policy
    world_size: int
    buckets: tuple[tuple[Segment, ...], ...]

    def owner_of_whole_params(self) -> dict[int, GroupRank]:
        """Parameter index to owner, for policies that never cut a parameter."""
        assert self.policy is not Policy.BY_ELEMENT, "a parameter cut by element has several owners"
        return {piece.param: segment.owner for bucket in self.buckets for segment in bucket for piece in segment.pieces}


def make_plan(layout: Layout, *, world_size: int, policy: Policy, cut: int = 1) -> Plan:
    """Decide who owns what in ``layout``; ``by_element`` cuts a parameter only at multiples of ``cut`` from its start."""
    if world_size < 1 or cut < 1:
        raise ValueError(f"world_size and cut must be at least 1, got {world_size} and {cut}")
    match policy:
        case Policy.WHOLE_BUCKET:
            buckets = tuple(_whole(bucket, GroupRank(i % world_size)) for i, bucket in enumerate(layout))
        case Policy.BY_PARAMETER:
            buckets = _by_parameter(layout, world_size)
        case Policy.BY_ELEMENT:
            buckets = tuple(_by_element(bucket, world_size, cut) for bucket in layout)
    return Plan(policy=policy, world_size=world_size, buckets=buckets)


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
    plan: list[tuple[Segment, ...]] = [()] * len(layout)
    for index in sorted(range(len(layout)), key=lambda i: sizes[i]):
        segments: list[Segment] = []
        served: list[tuple[int, GroupRank]] = []  # ranks that own part of this bucket sit out until it is done
        for run in _runs_below(layout[index], threshold):
            if not load:  # more runs than ranks: everybody may be served again
                load, served = served, []
                heapq.heapify(load)
            size, owner = heapq.heappop(load)
            served.append((size + sum(slot.numel for slot in run), owner))
            segments += _whole(run, owner)
        for entry in served:
            heapq.heappush(load, entry)
        plan[index] = tuple(segments)
    return tuple(plan)


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


def _by_element(bucket: Sequence[Slot], world_size: int, cut: int) -> tuple[Segment, ...]:
    """Walk the slots once; close rank r's segment at the allowed cut nearest to (r + 1) / n of the bucket."""
    total = sum(slot.numel for slot in bucket)
    segments: list[Segment] = []
    pieces: list[Piece] = []
    rank = 0
    base = 0  # where the slot at hand starts in the bucket
    for slot in bucket:
        start = 0
        while rank < world_size - 1:
            ideal = (rank + 1) * total // world_size - base
            if ideal >= slot.numel:
                break
            stop = max(start, min((ideal + cut // 2) // cut * cut, slot.numel))
            if stop > start:
                pieces.append(Piece(slot.param, start, stop))
            if pieces:
                segments.append(Segment(GroupRank(rank), tuple(pieces)))
            pieces, start, rank = [], stop, rank + 1
        if start < slot.numel or slot.numel == 0:
            pieces.append(Piece(slot.param, start, slot.numel))
        base += slot.numel
    if pieces:
        segments.append(Segment(GroupRank(rank), tuple(pieces)))
    return tuple(segments)
