"""The CPU adapter's exchanges: stages for many ranks, and memory for what comes."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
from collections import deque
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import Mlp, assert_same_params, batches, iterate, pair
from zerolap_conformance.ranks import run_ranks, try_ranks
from zerolap_cpu_gloo import CpuGlooAdapter, adapter, mapping, memory
from zerolap_cpu_gloo.adapter import stage_sizes, stages_of
from zerolap_cpu_gloo.memory import Inbox, Receive, Ring, SharedMemory


@pytest.mark.parametrize("num_ranks", [*range(1, 40), 61, 64, 96, 4096])
def test_stage_sizes_multiply_to_the_number_of_ranks(num_ranks: int) -> None:
    sizes = stage_sizes(num_ranks)
    assert prod(sizes) == num_ranks, sizes
    assert len(sizes) == 1 or num_ranks >= 16, sizes


@pytest.mark.parametrize("sizes", [(5,), (2, 2), (4, 4), (2, 3, 4), (2, 2, 2, 2)])
def test_every_part_reaches_its_rank_from_everyone(sizes: tuple[int, ...]) -> None:
    """Follow whose gradients a rank has summed up, part by part, through all stages."""
    num_ranks = prod(sizes)
    plans = [stages_of(rank, num_ranks, sizes) for rank in range(num_ranks)]
    summed = [{part: {rank} for part in range(num_ranks)} for rank in range(num_ranks)]
    for number in range(len(sizes)):
        before = [{part: set(ranks) for part, ranks in held.items()} for held in summed]
        for rank in range(num_ranks):
            stage = plans[rank][number]
            assert stage.peers[stage.place] == rank
            own = range(*stage.blocks[stage.place])
            for place, peer in enumerate(stage.peers):
                assert plans[peer][number].blocks == stage.blocks, "peers cut the same block"
                assert plans[peer][number].place == place
            summed[rank] = {part: set().union(*(before[peer][part] for peer in stage.peers)) for part in own}
    assert summed == [{rank: set(range(num_ranks))} for rank in range(num_ranks)]


def _exchange(sizes: list[list[int]], is_one_buffer: bool, shares_memory: bool = True) -> set[int]:
    adapter, rank, num_ranks = CpuGlooAdapter(shares_memory=shares_memory), dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    group = adapter.open_group(dist.group.WORLD, name="exchange")
    under_way = []
    for tag, of_ranks in enumerate(sizes):
        whole = torch.arange(sum(of_ranks), dtype=torch.float32) * (rank + 1)
        parts = list(whole.split(of_ranks))
        if not is_one_buffer:
            parts = [part.clone() for part in parts]
        into = torch.full((of_ranks[rank],), -1.0)
        pending = adapter.reduce_scatter(
            zerolap.Parts.of(parts), into=into, group=group, tag=tag, what="reduce-scatter"
        )
        assert pending.sent_bytes == 4 * (sum(of_ranks) - of_ranks[rank])
        under_way.append((pending, into, parts, of_ranks))
    for pending, into, parts, of_ranks in under_way:
        pending.wait()
        first = sum(of_ranks[:rank])
        expected = torch.arange(first, first + of_ranks[rank]) * (num_ranks * (num_ranks + 1) // 2)
        assert torch.equal(into, expected.float()), (into, expected)
        parts[rank].copy_(into)
    gathers = [
        (adapter.all_gather(zerolap.Parts.of(parts), group=group, tag=tag, what="all-gather"), parts)
        for tag, (_, _, parts, _) in enumerate(under_way)
    ]
    for gather, parts in gathers:
        gather.wait()
        expected = torch.arange(sum(part.numel() for part in parts)) * (num_ranks * (num_ranks + 1) // 2)
        assert torch.equal(torch.cat(parts), expected.float())
    neighbours = set(adapter._shared_by(group).ranks) - {rank}
    adapter.close_group(group)
    return neighbours


def _sizes(num_ranks: int) -> list[list[int]]:
    return [[7] * num_ranks, [r % 3 for r in range(num_ranks)], [0] * num_ranks, [100 - r for r in range(num_ranks)]]


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared-memory", "messages"])
@pytest.mark.parametrize("is_one_buffer", [True, False], ids=["one-buffer", "scattered"])
@pytest.mark.parametrize("num_ranks", [3, 16])
def test_parts_of_any_size_are_scattered_and_gathered(num_ranks: int, is_one_buffer: bool, shares_memory: bool) -> None:
    found = run_ranks(num_ranks, _exchange, _sizes(num_ranks), is_one_buffer, shares_memory)
    everybody = set(range(num_ranks)) if shares_memory else set()
    assert found == [everybody - {rank} for rank in range(num_ranks)]


def test_hosts_exchange_in_a_ring_whatever_the_sizes() -> None:
    """Between 3 and 15 ranks that share no memory. The second bucket is cut into several pieces, and the last has one owner."""
    sizes = [*_sizes(4), [500_000, 500_007, 3, 400_000], [0, 0, 90_000, 0]]
    run_ranks(4, _exchange, sizes, False, False, limit=90)


def _in_ring() -> bool:
    adapter = CpuGlooAdapter(shares_memory=False)
    assert dist.group.WORLD is not None
    groups = [adapter.open_group(dist.group.WORLD, name=f"both-{i}") for i in range(5)]
    parts = [zerolap.Parts.of(list(torch.full((3, 5), 10.0**i).unbind())) for i in range(5)]
    into = [torch.empty(5) for _ in groups]
    # All under way at once, with the same tag: groups that share connections do not take each other's messages.
    under_way = [
        adapter.reduce_scatter(part, into=total, group=group, tag=7, what="reduce-scatter")
        for part, total, group in zip(parts, into, groups, strict=True)
    ]
    for pending in reversed(under_way):
        pending.wait()
    is_right = all(torch.equal(total, torch.full((5,), 3 * 10.0**i)) for i, total in enumerate(into))
    for group in groups:
        adapter.close_group(group)
    return is_right


def test_groups_that_share_connections_do_not_mix() -> None:
    assert run_ranks(3, _in_ring) == [True] * 3


@pytest.mark.parametrize("gather", ["eager", "lazy"])
@on_ranks(3, limit=90, group_timeout=30)
def test_training_in_a_ring_gives_every_rank_the_same_and_what_ddp_gives(gather: Any) -> None:
    oracle, ours = pair()
    plain = torch.optim.AdamW(oracle.parameters(), lr=0.01, fused=True)
    zero = zerolap.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
    handle = zerolap.attach(ours, zero, gather=gather, adapter=CpuGlooAdapter(shares_memory=False))
    for x in batches(5):
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
    handle.finish()
    for mine, theirs in zip(ours.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)  # sums of three are taken in another order
        of_all = [torch.empty_like(mine) for _ in range(3)]
        dist.all_gather(of_all, mine.detach())
        assert all(torch.equal(each, mine) for each in of_all)


def _lose_a_rank() -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    zerolap.attach(ddp, zero, adapter=CpuGlooAdapter(shares_memory=False))
    try:
        for number, x in enumerate(batches(6)):
            if number == 3 and dist.get_rank() == 1:
                os._exit(7)
            iterate(ddp, zero, x)
    except zerolap.ZerolapError as error:
        raise RuntimeError(f"SURFACED[{error}]") from error
    raise AssertionError("trained to the end")


def test_all_ranks_of_a_ring_end_when_one_dies() -> None:
    """Those that are not its neighbours, too: what they wait for does not come."""
    outcomes = try_ranks(4, _lose_a_rank, limit=60, group_timeout=10)
    for rank, outcome in enumerate(outcomes):
        assert (f"SURFACED[rank {rank}, bucket " if rank != 1 else "exit code 7") in (outcome.error or ""), outcome


def _exchange_between_hosts() -> set[int]:
    """Ranks 0 and 1 on one host, 2 and 3 on another, as far as they can tell."""
    mapping._host = lambda: (dist.get_rank() // 2, 0, 0)
    return _exchange(_sizes(4), True)


def test_ranks_of_two_hosts_share_memory_within_each() -> None:
    assert run_ranks(4, _exchange_between_hosts) == [{1}, {0}, {3}, {2}]


def _exchange_where_one_may_not() -> set[int]:
    if dist.get_rank() == 1:
        map_own = mapping._map

        def refuse(pid: int, file: int, size: int) -> torch.Tensor:
            if pid != os.getpid():
                raise RuntimeError("Permission denied")
            return map_own(pid, file, size)

        mapping._map = refuse
    return _exchange(_sizes(3), True)


def test_one_that_may_not_read_the_others_memory_gets_messages() -> None:
    assert run_ranks(3, _exchange_where_one_may_not) == [{2}, set(), {0}]


def _refuse(name: str, error: int) -> None:
    """From now on a call of the system's fails, on this rank."""

    def refuse(*args: Any) -> None:
        raise OSError(error, os.strerror(error))

    setattr(os, name, refuse)


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))


def _limit_memory() -> None:
    """Little more than is used now, while memory is shared: groups and their threads come before, training after."""
    share_memory = mapping.share_memory

    def share_within_limit(group: dist.ProcessGroup, **options: Any) -> SharedMemory:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**20, resource.RLIM_INFINITY))
        try:
            return share_memory(group, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    adapter.share_memory = share_within_limit


def _hide_proc() -> None:
    mapping.Path = lambda name: Path(f"/nowhere/{name}")


# What keeps a rank from sharing memory, and what is said of it.
OBSTACLES: dict[str, tuple[Callable[[], None], str]] = {
    "memfd_create-not-permitted": (partial(_refuse, "memfd_create", errno.EPERM), "Operation not permitted"),
    "memfd_create-not-implemented": (partial(_refuse, "memfd_create", errno.ENOSYS), "Function not implemented"),
    "ftruncate-no-space": (partial(_refuse, "ftruncate", errno.ENOSPC), "No space left on device"),
    "first-page-no-space": (partial(_refuse, "posix_fallocate", errno.ENOSPC), "No space left on device"),
    "file-size-limit": (_limit_files, "File too large"),
    "address-space-limit": (_limit_memory, "Cannot allocate memory"),
    "no-proc": (_hide_proc, "No such file or directory"),
}


def _listen() -> list[str]:
    """What zerolap logs on this rank from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerolap").addHandler(handler)
    return said


def _exchange_past(obstacle: str, ranks: list[int]) -> tuple[set[int], list[str]]:
    said = _listen()
    if dist.get_rank() in ranks:
        OBSTACLES[obstacle][0]()
    return _exchange(_sizes(dist.get_world_size()), True), said


@pytest.mark.parametrize("ranks", [[1], [0, 1, 2]], ids=["one-rank", "all-ranks"])
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_rank_that_cannot_share_memory_says_why_and_gets_messages(obstacle: str, ranks: list[int]) -> None:
    found = run_ranks(3, _exchange_past, obstacle, ranks, limit=60, group_timeout=20)
    able = {0, 1, 2} - set(ranks)
    for rank, (neighbours, said) in enumerate(found):
        assert neighbours == (able - {rank} if rank in able else set()), rank
        assert [OBSTACLES[obstacle][1] in line for line in said] == ([] if rank in able else [True]), said
        assert all("exchanges by messages and not by shared memory" in line for line in said), said


@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=["one-rank", "all-ranks"])
@pytest.mark.parametrize("obstacle", ["file-size-limit", "address-space-limit"])
@on_ranks(2, limit=60, group_timeout=20)
def test_training_without_shared_memory_gives_the_same_numbers(obstacle: str, ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        OBSTACLES[obstacle][0]()
    oracle, ours = pair()
    plain = torch.optim.AdamW(oracle.parameters(), lr=0.01, fused=True)
    zero = zerolap.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
    zerolap.attach(ours, zero)
    for x in batches(4):
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
    assert_same_params(ours, oracle, obstacle)


def _exchange_where_memory_ends() -> tuple[int, list[str]]:
    """There is memory for the first few bytes, and later there is none."""
    said, fallocate = _listen(), os.posix_fallocate

    def allocate(file: int, offset: int, size: int) -> None:
        if offset + size > 8192:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(file, offset, size)

    if dist.get_rank() == 1:
        os.posix_fallocate = allocate
    neighbours = _exchange([[400, 400], [700, 700], [5000, 5000], [100, 100], [20000, 20000]] * 2, True)
    return len(neighbours), said


def test_memory_that_ends_later_ends_nobody() -> None:
    """Bytes are asked for before they are written: to write where there are none would end the process."""
    found = run_ranks(2, _exchange_where_memory_ends, limit=60, group_timeout=20)
    assert [num for num, _ in found] == [1, 1], "they stay neighbours"
    assert found[0][1] == []
    assert len(found[1][1]) == 1, "once"
    assert "of shared memory cannot be had" in found[1][1][0], found[1][1]
    assert "No space left on device" in found[1][1][0], found[1][1]


@on_ranks(2)
def test_what_finds_no_room_in_shared_memory_comes_as_a_message() -> None:
    memory.ring_bytes = lambda num_ranks: 256
    mapping.segment_bytes = lambda num_ranks: memory.head_bytes(num_ranks) + 256
    _exchange([[40, 40], [100, 100], [30, 30], [64, 64], [1, 1]], True)


def _bytes_at_rest() -> tuple[int, int]:
    """Buckets one after the other, each read before the next but one is sent."""
    adapter, rank = CpuGlooAdapter(), dist.get_rank()
    assert dist.group.WORLD is not None
    group = adapter.open_group(dist.group.WORLD, name="at-rest")
    parts = zerolap.Parts.cut(torch.ones(2000), [0, 1000, 2000])
    into = torch.empty(1000)
    for _ in range(50):
        adapter.reduce_scatter(parts, into=into, group=group, tag=0, what="reduce-scatter").wait()
        parts.tensors[rank].copy_(into)
        adapter.all_gather(parts, group=group, tag=0, what="all-gather").wait()
    held = adapter.kept_bytes
    adapter.close_group(group)
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return held, (Path("/proc/self/maps").read_text() + "".join(files)).count("memfd:zerolap")


def test_shared_memory_is_as_little_as_will_do_and_goes_with_its_group() -> None:
    for held, num_mapped in run_ranks(2, _bytes_at_rest):
        assert held <= 4 * 4032, held
        assert num_mapped == 0


@pytest.mark.parametrize("most", [0, 700])
def test_places_in_a_ring_never_overlap(most: int) -> None:
    ring, live, choose = Ring(0 if most else 500, most=most), deque[tuple[int, int]](), random.Random(0)
    num_refused = 0
    for _ in range(5000):
        if live and choose.random() < 0.5:
            live.popleft()
            ring.free_oldest()
            continue
        size = choose.randrange(1, 200)
        start = ring.take(size)
        if start is None:
            num_refused += 1
            continue
        assert start >= 0
        assert start + size <= ring.size <= (most or 500)
        assert all(start + size <= a or b <= start for a, b in live), (start, size, live)
        live.append((start, start + size))
    assert 0 < num_refused < 2000


def _receives() -> int:
    """Rank 1 sends ten messages at once; rank 0 has memory for three, and asks for the last one first."""
    group, inbox = dist.group.WORLD, Inbox()
    assert group is not None
    messages = [torch.full((size,), float(size)) for size in (100, 90, 100, 70, 100, 100, 30, 100, 60, 100)]
    if dist.get_rank() == 1:
        for send in [group.send([message], 0, tag) for tag, message in enumerate(messages)]:
            send.wait()
        return 0
    receives = [Receive(inbox, message, group=group, src=1, tag=tag) for tag, message in enumerate(messages)]
    inbox.ask(receives, bucket_bytes=1300)
    for place in (9, *range(9)):
        assert torch.equal(receives[place].wait(), messages[place]), place
        receives[place].give_back()
    return inbox.num_bytes


def test_messages_wait_at_their_sender_until_there_is_memory_for_them() -> None:
    assert run_ranks(2, _receives)[0] == 1300


@on_ranks(2, limit=60, group_timeout=10)
def test_one_rank_may_use_parameters_while_the_others_wait_for_it() -> None:
    """Rank 0 uses parameters that are on their way while rank 1 waits for it; nothing finds room in shared memory."""
    memory.ring_bytes = lambda num_ranks: 256
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    handle = zerolap.attach(ddp, zero, gather="lazy")
    for x in batches(4):
        iterate(ddp, zero, x)
        if dist.get_rank() == 0:
            with torch.no_grad():
                ddp.module(x)
        dist.barrier()
    handle.finish()
