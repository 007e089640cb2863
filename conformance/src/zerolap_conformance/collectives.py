"""Tier 2: groups and collectives against arithmetic."""

from __future__ import annotations

import time
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

import zerolap
from zerolap import Adapter
from zerolap.schedule.ownership import GroupRank
from zerolap_conformance.requirements import NotDeclaredError, requirement
from zerolap_conformance.support import busy, come_late, device_of, expect, expect_equal, own_group, world

SIZES = (1, 2, 3, 17, 64, 1009, 100_003)
REDUCED = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
MOVED = (*REDUCED, torch.uint8)


def _numbers(size: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, different on every rank and at every place, so that sums are exact in every dtype."""
    return ((torch.arange(size) + 3 * rank) % 7).to(dtype)


def _sums(size: int, num_ranks: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([_numbers(size, rank, torch.int64) for rank in range(num_ranks)]).sum(0).to(dtype)


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
    for dtype, size in product(REDUCED, SIZES):
        x = _numbers(size, group.rank(), dtype).to(device)
        adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=group, what=f"sum of {size}").wait()
        expect_equal(x, _sums(size, group.size(), dtype), f"{size} elements of {dtype}")


@requirement("COL-2", "An all-reduce finds the maximum, by which ranks agree on which parameters were used.", tier=2)
def finds_maxima(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    votes = torch.tensor([group.rank() == 0, group.rank() == group.size() - 1, False], dtype=torch.int32, device=device)
    adapter.all_reduce(votes, op=dist.ReduceOp.MAX, group=group, what="votes").wait()
    expect(votes.tolist(), [1, 1, 0], "the votes")
    for dtype, numel in product((torch.int32, torch.float32), SIZES):
        x = _numbers(numel, group.rank(), dtype).to(device)
        adapter.all_reduce(x, op=dist.ReduceOp.MAX, group=group, what=f"maximum of {numel}").wait()
        expected = torch.stack([_numbers(numel, rank, dtype) for rank in range(group.size())]).amax(0)
        expect_equal(x, expected, f"{numel} elements of {dtype}")


@requirement(
    "COL-3", "A broadcast brings one rank's tensor to all others, from any rank, for every dtype and size.", tier=2
)
def broadcasts(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    for dtype, size, src in product(MOVED, SIZES, range(group.size())):
        x = _numbers(size, group.rank(), dtype).to(device)
        adapter.broadcast(x, src=GroupRank(src), group=group, what=f"broadcast of {size}").wait()
        expect_equal(x, _numbers(size, src, dtype), f"{size} elements of {dtype} from {src}")


def _uneven(n: int) -> list[list[int]]:
    """Sizes of n parts: rising, falling, all empty, all but one empty, off by one."""
    return [list(range(n)), list(range(n, 0, -1)), [0] * n, [0] * (n - 1) + [5], [7 + r % 2 for r in range(n)]]


def _scatter(
    adapter: Adapter, group: dist.ProcessGroup, sizes: list[int], dtype: torch.dtype, *, tag: int = 0
) -> Tensor:
    """Reduce-scatter parts of these sizes, compare with arithmetic, and give back the input."""
    device, whole = device_of(adapter), sum(sizes)
    source = _numbers(whole, group.rank(), dtype).to(device)
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
    for dtype, size in product(REDUCED, SIZES):
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
        expect_equal(source, _numbers(sum(sizes), group.rank(), torch.float32), f"the input of parts {sizes}")


def _gather(adapter: Adapter, group: dist.ProcessGroup, sizes: list[int], dtype: torch.dtype, *, tag: int = 0) -> None:
    device, whole = device_of(adapter), _numbers(sum(sizes), 0, dtype)
    received = torch.full_like(whole, 9).to(device)
    parts = zerolap.Parts.of(list(torch.split(received, sizes)))
    parts.tensors[group.rank()].copy_(torch.split(whole, sizes)[group.rank()])
    adapter.all_gather(parts, group=group, tag=tag, what=f"all-gather of {sizes}").wait()
    expect_equal(received, whole, f"parts of {sizes} elements of {dtype}")


@requirement("COL-7", "An all-gather brings every rank's part to all ranks, for every dtype.", tier=2)
def gathers(adapter: Adapter) -> None:
    group = own_group(adapter)
    for dtype, size in product(MOVED, SIZES):
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


@requirement("ORD-1", "Many collectives may be under way at once, and each gives its own result.", tier=2)
def keeps_many_apart(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    rank, size = group.rank(), group.size()
    under_way = []
    for tag in range(40):
        numel = 50 + 13 * tag
        source = _numbers(numel * size, rank + tag, torch.float32).to(device)
        into = torch.zeros(numel, device=device)
        parts = zerolap.Parts.of(list(torch.split(source, numel)))
        under_way.append(
            (adapter.reduce_scatter(parts, into=into, group=group, tag=tag, what=f"bucket {tag}"), into, numel, tag)
        )
    for pending, into, numel, tag in under_way:
        pending.wait()
        expected = torch.stack([_numbers(numel * size, r + tag, torch.float32) for r in range(size)]).sum(0)
        expect_equal(into, expected[rank * numel : (rank + 1) * numel], f"bucket {tag}")
    gathers = []
    for tag in range(40):
        numel = 50 + 13 * tag
        received = torch.full((numel * size,), float(rank + tag), device=device)
        parts = zerolap.Parts.of(list(torch.split(received, numel)))
        gathers.append((adapter.all_gather(parts, group=group, tag=tag, what=f"bucket {tag}"), received, numel, tag))
    for pending, received, numel, tag in gathers:
        pending.wait()
        expected = (torch.arange(size) + tag).float().repeat_interleave(numel)
        expect_equal(received, expected, f"all-gather of bucket {tag}")


@requirement("ORD-2", "A collective sends what its caller has computed, not what was there before.", tier=2)
def waits_for_its_caller(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    for i in range(1, 7):
        x = torch.zeros(50_000, device=device)
        busy(device, 0.005)
        x.fill_(float(i))
        adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=group, what="sum").wait()
        expect_equal(x, torch.full((50_000,), float(i * group.size())), f"round {i}")
        source = torch.zeros(1000 * group.size(), device=device)
        into = torch.zeros(1000, device=device)
        busy(device, 0.005)
        source.fill_(float(i))
        parts = zerolap.Parts.of(list(torch.split(source, 1000)))
        adapter.reduce_scatter(parts, into=into, group=group, tag=i, what="reduce-scatter").wait()
        expect_equal(into, torch.full((1000,), float(i * group.size())), f"reduce-scatter, round {i}")


@requirement("ORD-3", "Waiting for a collective makes its result visible to what is done next.", tier=2)
def makes_its_waiter_wait(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    rank, size = group.rank(), group.size()
    for i in range(1, 5):
        come_late(group, i)
        x = torch.full((200_000,), float(i), device=device)
        adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=group, what="sum").wait()
        y = x * 2
        x.zero_()
        expect_equal(y, torch.full((200_000,), 2.0 * i * size), f"round {i}")
        parts = zerolap.Parts.of(list(torch.split(torch.full((1000 * size,), float(rank + i), device=device), 1000)))
        into = torch.zeros(1000, device=device)
        come_late(group, i)
        adapter.reduce_scatter(parts, into=into, group=group, tag=0, what="reduce-scatter").wait()
        y = into * 2
        expect_equal(y, torch.full((1000,), 2.0 * sum(r + i for r in range(size))), f"reduce-scatter, round {i}")
        come_late(group, i)
        adapter.all_gather(parts, group=group, tag=1, what="all-gather").wait()
        y = torch.cat(parts.tensors) * 2
        expected = (torch.arange(size) + i).repeat_interleave(1000) * 2.0
        expect_equal(y, expected, f"all-gather, round {i}")
        come_late(group, i)
        adapter.broadcast(x.fill_(rank), src=GroupRank(i % size), group=group, what="broadcast").wait()
        y = x * 2
        expect_equal(y, torch.full((200_000,), 2.0 * (i % size)), f"broadcast, round {i}")


@requirement("ORD-4", "The same input gives bitwise the same sum every time.", tier=2)
def sums_in_one_order(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    torch.manual_seed(group.rank())
    source, first = torch.randn(10_007 * group.size()).to(device), None
    for i in range(5):
        into = torch.zeros(10_007, device=device)
        parts = zerolap.Parts.of(list(torch.split(source, 10_007)))
        adapter.reduce_scatter(parts, into=into, group=group, tag=0, what="sum").wait()
        first = into.cpu() if first is None else first
        expect_equal(into, first, f"round {i}")


@requirement("ORD-5", "What is waited for may be dropped, and its memory used for something else.", tier=2)
def lets_go(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    rank, size, numel = group.rank(), group.size(), 30_011
    for i in range(20):
        source = torch.full((numel * size,), float(i + rank), device=device)
        into = torch.zeros(numel, device=device)
        parts = zerolap.Parts.of(list(torch.split(source, numel)))
        pending = adapter.reduce_scatter(parts, into=into, group=group, tag=i, what="sum")
        pending.wait()
        source.fill_(-1.0)
        del pending, parts, source
        expect_equal(into, torch.full((numel,), float(sum(i + r for r in range(size)))), f"round {i}")


@requirement("ORD-6", "A collective under way keeps the memory it needs, whoever else asks for some.", tier=2)
def keeps_its_memory(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    rank, size = group.rank(), group.size()
    for i in range(2 * size):
        sizes = [3000 + (i % 2) * r for r in range(size)]
        into = torch.zeros(sizes[rank], device=device)
        received = [torch.full((numel,), float(rank), device=device) for numel in sizes]
        come_late(group, i)
        # Holds up what is started behind it until all ranks are here.
        gate = adapter.all_reduce(torch.zeros(1, device=device), op=dist.ReduceOp.SUM, group=group, what="gate")
        parts = zerolap.Parts.of(
            [torch.full((numel,), float(10 * r + rank), device=device) for r, numel in enumerate(sizes)]
        )
        scatter = adapter.reduce_scatter(parts, into=into, group=group, tag=0, what="reduce-scatter")
        gather = adapter.all_gather(zerolap.Parts.of(received), group=group, tag=1, what="all-gather")
        del parts
        taken = [torch.full((numel,), -1.0, device=device) for numel in (*sizes, size * max(sizes)) for _ in range(3)]
        for pending in (gate, scatter, gather):
            pending.wait()
        del taken
        expect_equal(into, torch.full((sizes[rank],), float(sum(10 * rank + r for r in range(size)))), "the sum")
        for r, part in enumerate(received):
            expect_equal(part, torch.full((sizes[r],), float(r)), f"the part of rank {r}")


@requirement(
    "BYTES-1",
    "A collective says how many bytes this rank sends for it: no less than must be, no more than padding.",
    tier=2,
)
def counts_bytes(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    size, numel = group.size(), 1000
    parts = zerolap.Parts.of(list(torch.split(torch.zeros(numel * size, device=device), numel)))
    into = torch.zeros(numel, device=device)
    least = 4 * numel * (size - 1)
    for what, pending in (
        ("reduce-scatter", adapter.reduce_scatter(parts, into=into, group=group, tag=0, what="sum")),
        ("all-gather", adapter.all_gather(parts, group=group, tag=1, what="gather")),
    ):
        pending.wait()
        assert least <= pending.sent_bytes <= 1.1 * least, (
            f"{what}: at least {least} bytes are sent, it says {pending.sent_bytes}"
        )


@requirement(
    "CAP-1",
    "With `futures_complete_at_enqueue` a collective's future is done before its peers have come; without, it is not.",
    tier=2,
    min_ranks=2,
)
def completes_futures_as_declared(adapter: Adapter) -> list[str]:
    group, device = own_group(adapter), device_of(adapter)
    is_done = False
    x = torch.ones(1000, device=device)
    dist.all_reduce(torch.zeros(1))  # a barrier on the host
    if group.rank() == 0:
        start = time.monotonic()
        work = group.allreduce(x)
        is_done = work.get_future().done() and time.monotonic() - start < 0.2
        work.wait()
    else:
        time.sleep(0.3)
        group.allreduce(x).wait()
    expect_equal(x, torch.full((1000,), float(group.size())), "the sum")
    declared = adapter.capabilities.futures_complete_at_enqueue
    if group.rank() != 0 or is_done == declared:
        return []
    if declared:
        raise AssertionError("futures_complete_at_enqueue is declared, but a future waited for the peers")
    return ["futures were done at enqueue, though futures_complete_at_enqueue is not declared"]


@requirement(
    "CAP-2",
    "Without `one_issue_order` ranks may start collectives of two groups in different orders.",
    tier=2,
    capability="one_issue_order",
    min_ranks=2,
)
def takes_any_order(adapter: Adapter) -> None:
    if adapter.capabilities.one_issue_order:
        raise NotDeclaredError(
            "the adapter declares one_issue_order=True: zerolap never starts them in different orders"
        )
    groups, device = [own_group(adapter) for _ in range(2)], device_of(adapter)
    tensors = [torch.full((1000,), float(i + 1), device=device) for i in range(2)]
    order = (0, 1) if dist.get_rank() % 2 else (1, 0)
    works = {i: adapter.all_reduce(tensors[i], op=dist.ReduceOp.SUM, group=groups[i], what=f"group {i}") for i in order}
    for i in order:
        works[i].wait()
        expect_equal(tensors[i], torch.full((1000,), float((i + 1) * dist.get_world_size())), f"the sum in group {i}")
