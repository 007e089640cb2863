"""Tier 2: collectives in flight: their order, what they wait for, memory and bytes, and what the adapter declares of them."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import zerolap
from zerolap import Adapter
from zerolap.schedule.ownership import GroupRank
from zerolap_conformance.requirements import NotDeclaredError, requirement
from zerolap_conformance.support import (
    busy,
    come_late,
    device_of,
    expect_equal,
    own_group,
    small_numbers,
)


@requirement("ORD-1", "Many collectives may be under way at once, and each gives its own result.", tier=2)
def keeps_many_apart(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    rank, size = group.rank(), group.size()
    under_way = []
    for tag in range(40):
        numel = 50 + 13 * tag
        source = small_numbers(numel * size, rank + tag, torch.float32).to(device)
        into = torch.zeros(numel, device=device)
        parts = zerolap.Parts.of(list(torch.split(source, numel)))
        under_way.append(
            (adapter.reduce_scatter(parts, into=into, group=group, tag=tag, what=f"bucket {tag}"), into, numel, tag)
        )
    for pending, into, numel, tag in under_way:
        pending.wait()
        expected = torch.stack([small_numbers(numel * size, r + tag, torch.float32) for r in range(size)]).sum(0)
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
    "BYTES-2",
    "Parts of very different length cost little more than what must be sent: over all ranks at most 1.1 of it.",
    tier=2,
)
def pads_little(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    size = group.size()
    for longest in range(size):
        sizes = [9000 if rank == longest else 10 * (rank % 2) for rank in range(size)]
        parts = zerolap.Parts.of(list(torch.split(torch.zeros(sum(sizes), device=device), sizes)))
        into = torch.zeros(sizes[group.rank()], device=device)
        least = 4 * sum(sizes) * (size - 1)
        for what, pending in (
            ("reduce-scatter", adapter.reduce_scatter(parts, into=into, group=group, tag=0, what="sum")),
            ("all-gather", adapter.all_gather(parts, group=group, tag=1, what="gather")),
        ):
            pending.wait()
            sent = torch.tensor([pending.sent_bytes])
            dist.all_reduce(sent)
            assert sent.item() <= 1.1 * least, (
                f"{what} of parts {sizes}: at least {least} bytes are sent by all ranks, they say {sent.item()}"
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
