"""Plans: every policy covers every element once, balances as it promises, and equals torch's where torch has one."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer as Upstream
from torch.distributed.optim import zero_redundancy_optimizer as upstream_module

from zerolap.schedule.ownership import GroupRank, Layout, Ownership, Policy, Slot, assign_owners, greedy_owners


def random_layout(rng: random.Random, *, num_params: int, largest: int = 3000) -> Layout:
    sizes = [rng.choice([0, 1, rng.randrange(1, 64), rng.randrange(1, largest)]) for _ in range(num_params)]
    order = list(range(num_params))
    rng.shuffle(order)
    buckets: list[tuple[Slot, ...]] = []
    while order:
        size = rng.randrange(1, 9)
        buckets.append(tuple(Slot(i, sizes[i]) for i in order[:size]))
        order = order[size:]
    return tuple(buckets)


def assert_covers(plan: Ownership, layout: Layout) -> None:
    for slots, planned in zip(layout, plan.buckets, strict=True):
        segments = planned.segments()
        for rank in range(plan.world_size):
            owned = tuple(piece for segment in segments if segment.owner == rank for piece in segment.pieces)
            assert planned.owned_by(GroupRank(rank)) == owned
        pieces = [piece for segment in segments for piece in segment.pieces]
        elements = [(p.param, e) for p in pieces for e in ([None] if p.start == p.stop else range(p.start, p.stop))]
        expected = [(s.param, e) for s in slots for e in ([None] if s.numel == 0 else range(s.numel))]
        if plan.policy is Policy.BY_ELEMENT:  # there, parameters of no elements come last on rank 0
            empty = [element for element in expected if element[1] is None]
            assert sorted(element for element in elements if element[1] is None) == sorted(empty)
            elements, expected = ([e for e in es if e[1] is not None] for es in (elements, expected))
        assert elements == expected
        assert all(segment.pieces for segment in segments)
        assert all(0 <= segment.owner < plan.world_size for segment in segments)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
def test_every_element_has_exactly_one_owner(policy: Policy, world_size: int) -> None:
    rng = random.Random(world_size)
    for _ in range(20):
        layout = random_layout(rng, num_params=rng.randrange(1, 30), largest=300)
        assert_covers(
            assign_owners(layout, world_size=world_size, policy=policy, cut=rng.choice([1, 7, 64, None])), layout
        )


def test_whole_bucket_goes_round_the_ranks() -> None:
    layout = tuple((Slot(i, 5),) for i in range(5))
    plan = assign_owners(layout, world_size=2, policy=Policy.WHOLE_BUCKET)
    assert [[s.owner for s in bucket.segments()] for bucket in plan.buckets] == [[0], [1], [0], [1], [0]]


@pytest.mark.parametrize("world_size", [2, 3, 5, 16])
@pytest.mark.parametrize("cut", [1, 64])
def test_by_element_is_balanced_to_one_cut_and_cuts_only_where_allowed(world_size: int, cut: int) -> None:
    rng = random.Random(0)
    for _ in range(30):
        layout = random_layout(rng, num_params=12)
        plan = assign_owners(layout, world_size=world_size, policy=Policy.BY_ELEMENT, cut=cut)
        for slots, planned in zip(layout, plan.buckets, strict=True):
            segments = planned.segments()
            numel = {slot.param: slot.numel for slot in slots}
            load = [0] * world_size
            owners = [segment.owner for segment in segments]
            assert owners == sorted(set(owners)), "one contiguous range per rank, in rank order"
            for segment in segments:
                for piece in segment.pieces:
                    load[segment.owner] += piece.stop - piece.start
                    assert piece.start % cut == 0
                    assert piece.stop % cut == 0 or piece.stop == numel[piece.param]
            ideal = sum(numel.values()) / world_size
            assert all(abs(size - ideal) <= cut + 1 for size in load), (load, ideal)


def _upstream(groups: list[list[int]], world_size: int) -> list[list[int]]:
    """Owners by torch's own partition, without a process group."""
    zero = Upstream.__new__(Upstream)
    zero._partition_parameters_cache = []
    zero.world_size = world_size
    zero.param_groups = [{"params": [torch.empty(n, device="meta") for n in sizes]} for sizes in groups]
    owner = {p: r for r, g in enumerate(zero._partition_parameters()) for group in g for p in group["params"]}
    return [[owner[p] for p in group["params"]] for group in zero.param_groups]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_greedy_is_torchs_sorted_greedy_partition(world_size: int) -> None:
    rng = random.Random(world_size)
    for _ in range(50):
        groups = [[rng.randrange(0, 20) for _ in range(rng.randrange(0, 15))] for _ in range(rng.randrange(1, 4))]
        assert greedy_owners(groups, world_size=world_size) == _upstream(groups, world_size)


def _upstream_buckets(layout: Layout, world_size: int) -> list[list[tuple[int, int, int]]]:
    """torch's own assignment under shard_buckets: for every bucket (offset, number of parameters, owner)."""
    zero: Any = Upstream.__new__(Upstream)
    zero._overlap_with_ddp = True
    zero._bucket_assignments_per_rank_cache = []
    zero.world_size, zero.global_rank = world_size, 0
    info = zero._overlap_info = upstream_module._OverlapInfo(world_size)
    info.status, info.shard_buckets = upstream_module._OverlapStatus.INITIALIZED, True
    info.params_per_bucket = [[torch.empty(s.numel, device="meta") for s in bucket] for bucket in layout]
    info.total_size = sum(s.numel for bucket in layout for s in bucket)
    result: list[list[tuple[int, int, int]]] = [[] for _ in layout]
    for rank, assignments in enumerate(zero._bucket_assignments_per_rank):
        for index, assignment in assignments.items():
            result[index].append((assignment.offset, len(assignment.parameters), rank))
    return [sorted(bucket) for bucket in result]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_by_parameter_is_torchs_shard_buckets_wherever_torch_has_an_answer(world_size: int) -> None:
    rng = random.Random(world_size)
    num_compared = 0
    for _ in range(100):
        layout = random_layout(rng, num_params=20)
        plan = assign_owners(layout, world_size=world_size, policy=Policy.BY_PARAMETER)
        if any(len(bucket.segments()) > world_size for bucket in plan.buckets):
            with pytest.raises(AssertionError, match="All indices are disallowed"):  # there torch has no answer
                _upstream_buckets(layout, world_size)
            continue
        theirs = _upstream_buckets(layout, world_size)
        ours = []
        for bucket in plan.buckets:
            offset, segments = 0, []
            for segment in bucket.segments():
                segments.append((offset, len(segment.pieces), segment.owner))
                offset += len(segment.pieces)
            ours.append(segments)
        assert ours == theirs
        num_compared += 1
    assert num_compared > 20


@pytest.mark.parametrize("policy", Policy)
def test_planning_a_hundred_thousand_parameters_for_4096_ranks_is_quick(policy: Policy) -> None:
    rng = random.Random(0)
    slots = [Slot(i, rng.randrange(1, 100_000)) for i in range(100_000)]
    layout = tuple(tuple(slots[i : i + 1000]) for i in range(0, len(slots), 1000))
    start = time.process_time()
    plan = assign_owners(layout, world_size=4096, policy=policy, cut=64)
    owned = [bucket.owned_by(GroupRank(1234)) for bucket in plan.buckets]
    assert time.process_time() - start < 1  # 0.02 to 0.2 s here; the rest is for slow machines
    assert any(owned) or policy is not Policy.BY_ELEMENT


def test_greedy_for_a_hundred_thousand_parameters_and_4096_ranks_is_quick() -> None:
    rng = random.Random(0)
    start = time.process_time()
    owners = greedy_owners([[rng.randrange(1, 100_000) for _ in range(100_000)]], world_size=4096)
    assert time.process_time() - start < 1
    assert len(set(owners[0])) == 4096


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="world_size and cut must be at least 1"):
        assign_owners((), world_size=0, policy=Policy.WHOLE_BUCKET)
    assert assign_owners((), world_size=3, policy=Policy.BY_ELEMENT).buckets == ()
    assert assign_owners(((Slot(0, 3),),), world_size=1, policy=Policy.BY_PARAMETER).owner_of_whole_params() == {
        0: GroupRank(0)
    }
