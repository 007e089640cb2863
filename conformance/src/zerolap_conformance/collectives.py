"""Tier 2: groups and collectives against arithmetic."""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

import zerolap
from zerolap import Adapter
from zerolap.schedule.ownership import GroupRank
from zerolap_conformance.exchanges import moved_by, reduced_by
from zerolap_conformance.requirements import requirement
from zerolap_conformance.support import come_late, device_of, expect, expect_equal, own_group, small_numbers, world

SIZES = (1, 2, 3, 17, 64, 1009, 100_003)


def _sums(size: int, num_ranks: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([small_numbers(size, rank, torch.int64) for rank in range(num_ranks)]).sum(0).to(dtype)


@requirement("GRP-1", "A group that is opened has the ranks of the group it is like, in their order.", tier=2)
def opens_groups(adapter: Adapter) -> None:
    group = own_group(adapter)
    expect((group.rank(), group.size()), (dist.get_rank(), dist.get_world_size()), "rank and size")
    adapter.close_group(group)


@requirement(
    "GRP-2", "A group of some ranks, in another order than the job's, works among them alone.", tier=2, min_ranks=2
)
def opens_groups_of_some(adapter: Adapter) -> None:
    num_ranks, kind = dist.get_world_size(), dist.get_backend_config(world())
    for ranks in (list(reversed(range(num_ranks))), list(range(1, num_ranks))):
        like = dist.new_group(ranks, backend=kind, sort_ranks=False)
        if dist.get_rank() in ranks:
            assert like is not None
            _try_group_of_some(adapter, like)


def _try_group_of_some(adapter: Adapter, like: dist.ProcessGroup) -> None:
    device, some = device_of(adapter), dist.get_process_group_ranks(like)
    group = own_group(adapter, like)
    expect((group.rank(), group.size()), (some.index(dist.get_rank()), len(some)), "rank and size in the group")
    for src in range(group.size()):
        x = torch.full((5,), float(dist.get_rank()), device=device)
        adapter.broadcast(x, src=GroupRank(src), group=group, what="broadcast").wait()
        expect_equal(x, torch.full((5,), float(some[src])), f"broadcast from group rank {src}")
    parts = [torch.full((3,), float(10 * r + group.rank()), device=device) for r in range(group.size())]
    into = torch.zeros(3, device=device)
    adapter.reduce_scatter(zerolap.Parts.of(parts), into=into, group=group, tag=0, what="sum").wait()
    total = sum(10 * group.rank() + r for r in range(group.size()))
    expect_equal(into, torch.full((3,), float(total)), "reduce-scatter in the group")


@requirement("GRP-3", "Two groups over the same ranks do not mix up their messages.", tier=2)
def keeps_groups_apart(adapter: Adapter) -> None:
    device, groups = device_of(adapter), [own_group(adapter) for _ in range(2)]
    rank, size = dist.get_rank(), dist.get_world_size()
    reduced = [torch.full((1000,), float(i + 1), device=device) for i in range(2)]
    scattered = [torch.zeros(1000, device=device) for _ in range(2)]
    gathered = [torch.full((1000 * size,), float(rank + 10 * i), device=device) for i in range(2)]
    works = []
    for group, x, into, parts in zip(groups, reduced, scattered, gathered, strict=True):
        source = zerolap.Parts.of(list(torch.split(parts * 1, 1000)))
        works.append(
            [
                adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=group, what="sum"),
                adapter.reduce_scatter(source, into=into, group=group, tag=0, what="reduce-scatter"),
                adapter.all_gather(
                    zerolap.Parts.of(list(torch.split(parts, 1000))), group=group, tag=1, what="all-gather"
                ),
            ]
        )
    for i in (1, 0):
        for work in works[i]:
            work.wait()
        values = [float(r + 10 * i) for r in range(size)]
        expect_equal(reduced[i], torch.full((1000,), float((i + 1) * size)), f"the sum in group {i}")
        expect_equal(scattered[i], torch.full((1000,), sum(values)), f"the reduce-scatter in group {i}")
        expect_equal(gathered[i], torch.tensor(values).repeat_interleave(1000), f"the all-gather in group {i}")


@requirement("GRP-4", "A group's timeout is that of the group it is like.", tier=2)
def keeps_timeouts(adapter: Adapter) -> None:
    expect(adapter.timeout(own_group(adapter)), adapter.timeout(world()), "the timeout")


@requirement("COL-1", "An all-reduce leaves the sum on all ranks, for every dtype and size.", tier=2)
def sums(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    for dtype, size in product(reduced_by(adapter), SIZES):
        x = small_numbers(size, group.rank(), dtype).to(device)
        adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=group, what=f"sum of {size}").wait()
        expect_equal(x, _sums(size, group.size(), dtype), f"{size} elements of {dtype}")
    for dtype in reduced_by(adapter):  # of no dimension, as a loss or a norm is
        x = small_numbers(1, group.rank(), dtype).reshape(()).to(device)
        adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=group, what="sum of a scalar").wait()
        expect_equal(x.reshape(1), _sums(1, group.size(), dtype), f"a scalar of {dtype}")


@requirement("COL-2", "An all-reduce finds the maximum, by which ranks agree on which parameters were used.", tier=2)
def finds_maxima(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    votes = torch.tensor([group.rank() == 0, group.rank() == group.size() - 1, False], dtype=torch.int32, device=device)
    adapter.all_reduce(votes, op=dist.ReduceOp.MAX, group=group, what="votes").wait()
    expect(votes.tolist(), [1, 1, 0], "the votes")
    for dtype, numel in product((torch.int32, torch.float32), SIZES):
        x = small_numbers(numel, group.rank(), dtype).to(device)
        adapter.all_reduce(x, op=dist.ReduceOp.MAX, group=group, what=f"maximum of {numel}").wait()
        expected = torch.stack([small_numbers(numel, rank, dtype) for rank in range(group.size())]).amax(0)
        expect_equal(x, expected, f"{numel} elements of {dtype}")


@requirement(
    "COL-3", "A broadcast brings one rank's tensor to all others, from any rank, for every dtype and size.", tier=2
)
def broadcasts(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    for dtype, size, src in product(moved_by(adapter), SIZES, range(group.size())):
        x = small_numbers(size, group.rank(), dtype).to(device)
        adapter.broadcast(x, src=GroupRank(src), group=group, what=f"broadcast of {size}").wait()
        expect_equal(x, small_numbers(size, src, dtype), f"{size} elements of {dtype} from {src}")


def _uneven(n: int) -> list[list[int]]:
    """Sizes of n parts: rising, falling, all empty, all but one empty, off by one."""
    return [list(range(n)), list(range(n, 0, -1)), [0] * n, [0] * (n - 1) + [5], [7 + r % 2 for r in range(n)]]


def _scatter(
    adapter: Adapter, group: dist.ProcessGroup, sizes: list[int], dtype: torch.dtype, *, tag: int = 0
) -> Tensor:
    """Reduce-scatter parts of these sizes, compare with arithmetic, and give back the input."""
    device, whole = device_of(adapter), sum(sizes)
    source = small_numbers(whole, group.rank(), dtype).to(device)
    parts = zerolap.Parts.of(list(torch.split(source, sizes)))
    into = torch.zeros(sizes[group.rank()], dtype=dtype, device=device)
    adapter.reduce_scatter(parts, into=into, group=group, tag=tag, what=f"reduce-scatter of {sizes}").wait()
    expected = torch.split(_sums(whole, group.size(), dtype), sizes)[group.rank()]
    expect_equal(into, expected, f"parts of {sizes} elements of {dtype}")
    return source


@requirement(
    "COL-4", "A reduce-scatter leaves each rank the sum of what all have as its part, for every dtype.", tier=2
)
def scatters_sums(adapter: Adapter) -> None:
    group = own_group(adapter)
    for dtype, size in product(reduced_by(adapter), SIZES):
        _scatter(adapter, group, [size] * group.size(), dtype)


@requirement("COL-5", "Parts of a reduce-scatter may differ in size and be empty.", tier=2)
def scatters_uneven_parts(adapter: Adapter) -> None:
    group = own_group(adapter)
    for sizes in _uneven(group.size()):
        _scatter(adapter, group, sizes, torch.float32)


@requirement("COL-6", "A reduce-scatter does not change what it is given.", tier=2)
def leaves_its_input_alone(adapter: Adapter) -> None:
    group = own_group(adapter)
    for sizes in ([1000] * group.size(), [r + 1 for r in range(group.size())]):
        source = _scatter(adapter, group, sizes, torch.float32)
        expect_equal(source, small_numbers(sum(sizes), group.rank(), torch.float32), f"the input of parts {sizes}")


def _gather(adapter: Adapter, group: dist.ProcessGroup, sizes: list[int], dtype: torch.dtype, *, tag: int = 0) -> None:
    device, whole = device_of(adapter), small_numbers(sum(sizes), 0, dtype)
    received = torch.full_like(whole, 9).to(device)
    parts = zerolap.Parts.of(list(torch.split(received, sizes)))
    parts.tensors[group.rank()].copy_(torch.split(whole, sizes)[group.rank()])
    adapter.all_gather(parts, group=group, tag=tag, what=f"all-gather of {sizes}").wait()
    expect_equal(received, whole, f"parts of {sizes} elements of {dtype}")


@requirement("COL-7", "An all-gather brings every rank's part to all ranks, for every dtype.", tier=2)
def gathers(adapter: Adapter) -> None:
    group = own_group(adapter)
    for dtype, size in product(moved_by(adapter), SIZES):
        _gather(adapter, group, [size] * group.size(), dtype)


@requirement("COL-8", "Parts of an all-gather may differ in size and be empty.", tier=2)
def gathers_uneven_parts(adapter: Adapter) -> None:
    group = own_group(adapter)
    for sizes in _uneven(group.size()):
        _gather(adapter, group, sizes, torch.float32)


@requirement("COL-9", "Parts may lie anywhere in memory, not only one behind the other.", tier=2)
def takes_scattered_parts(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    rank, size = group.rank(), group.size()
    parts = zerolap.Parts.of([torch.full((50,), float(10 * r + rank), device=device) for r in range(size)])
    into = torch.zeros(50, device=device)
    adapter.reduce_scatter(parts, into=into, group=group, tag=0, what="reduce-scatter").wait()
    expect_equal(into, torch.full((50,), float(sum(10 * rank + r for r in range(size)))), "the sum")
    for turn in range(size):
        parts = zerolap.Parts.of([torch.full((50,), float(rank), device=device) for _ in range(size)])
        come_late(group, turn)
        adapter.all_gather(parts, group=group, tag=0, what="all-gather").wait()
        for r, part in enumerate(parts.tensors):
            expect_equal(part, torch.full((50,), float(r)), f"the part of rank {r}")


@requirement(
    "COL-10",
    "An all-to-all brings each rank the bytes that every other one has for it; they may differ in number and be none, and several may be "
    "under way.",
    tier=2,
)
def brings_each_its_own(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    rank, size = group.rank(), group.size()

    def bytes_of(source: int, to: int, scale: int) -> Tensor:
        numel = 0 if source == to else scale * (1 + (3 * source + to) % 5) * ((source + to) % 3)
        return (torch.arange(numel) * (1 + source) + 7 * to).to(torch.uint8)

    def ends_of(parts: list[Tensor]) -> list[int]:
        return [sum(part.numel() for part in parts[:end]) for end in range(size + 1)]

    under_way = []
    for tag, scale in enumerate((1, 16, 1000, 0, 100_003)):
        sent = [bytes_of(rank, to, scale) for to in range(size)]
        expected = [bytes_of(source, rank, scale) for source in range(size)]
        memory = torch.full((sum(part.numel() for part in expected),), 255, dtype=torch.uint8, device=device)
        pending = adapter.all_to_all(
            zerolap.Parts.cut(torch.cat(sent).to(device), ends_of(sent)),
            zerolap.Parts.cut(memory, ends_of(expected)),
            group=group,
            tag=tag,
            what=f"all-to-all {tag}",
        )
        expect(pending.sent_bytes, sum(part.numel() for part in sent), f"the bytes that all-to-all {tag} says it sends")
        under_way.append((pending, memory, torch.cat(expected), tag))
    for pending, memory, all_expected, tag in under_way:
        pending.wait()
        expect_equal(memory, all_expected, f"what all-to-all {tag} brings")
