"""Tier 2: values that are seldom seen, lengths beyond what is sent at once, and peers that come late or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

import zerolap
from zerolap import Adapter, CollectiveError
from zerolap.schedule.ownership import GroupRank
from zerolap_conformance.exchanges import VERBS, Form, Verb, moved_by, reduced_by, start
from zerolap_conformance.requirements import NotDeclaredError, requirement
from zerolap_conformance.support import Slow, come_late, device_of, expect_equal, own_group, world

TILED = (1, 37, 5003)
LARGE_BYTES = 4.4e6
HUGE = 8_650_753  # elements of 4 bytes: more than any library sends at once


def _form(verb: Verb, dtype: torch.dtype, numel: int, num_ranks: int, **options: bool) -> Form:
    has_parts = verb in ("reduce-scatter", "all-gather")
    return Form(verb=verb, dtype=dtype, sizes=(numel,) * (num_ranks if has_parts else 1), **options)


def _special(dtype: torch.dtype, *, is_moved: bool) -> Tensor:
    """Values at the ends of a dtype, as their bits are."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        beyond = (2**31 - 1, 2**31, 2**31 + 1, -(2**31) - 1, 2**40 + 1, 2**53 + 1, -(2**53) - 1, 2**62 + 1)
        known = [0, 1, info.max, info.max - 1, info.min, info.min + 1, *beyond]
        return torch.tensor([n for n in known if info.min <= n <= info.max], dtype=torch.int64).to(dtype)
    info_ = torch.finfo(dtype)
    known_ = [0.0, -0.0, 1.0, -1.0, info_.max, info_.min, info_.tiny, -info_.tiny, info_.smallest_normal / 2]
    least = info_.smallest_normal * info_.eps  # the smallest that there is
    values = torch.tensor([*known_, -info_.smallest_normal / 4, least, -least, 3 * least], dtype=torch.float64).to(
        dtype
    )
    infinite = torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=dtype)
    values = torch.cat([values, infinite])
    if is_moved:  # NaNs of all kinds
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        quiet = torch.tensor([float("nan")] * 4, dtype=dtype).view(kind) + torch.arange(4, dtype=kind)
        negative = quiet | torch.iinfo(kind).min
        values = torch.cat([values, quiet.view(dtype), negative.view(dtype)])
    return values


def _tiled(values: Tensor, numel: int) -> Tensor:
    return values.repeat(-(-numel // values.numel()))[:numel]


@requirement(
    "VAL-1",
    "What is moved arrives bit by bit: signs of zeros, NaNs, infinities, denormals, and the largest integers.",
    tier=2,
    seconds=120,
)
def moves_every_bit(adapter: Adapter) -> None:
    group = own_group(adapter)
    for dtype, numel in product(moved_by(adapter), (*TILED, round(LARGE_BYTES / dtype_bytes(adapter)))):
        values = _special(dtype, is_moved=True)
        numel = max(numel, 2 * values.numel()) if numel > 1 else numel

        def data(n: int, rank: int, values: Tensor = values) -> Tensor:
            return _tiled(values.roll(rank), n)

        for verb in ("broadcast", "all-gather"):
            for root in range(group.size()) if verb == "broadcast" else (0,):
                exchange = start(
                    adapter, group, _form(verb, dtype, numel, group.size())._replace(root=root), seed=0, data=data
                )
                exchange.pending.wait()
                exchange.check()


def dtype_bytes(adapter: Adapter) -> int:
    return 8 if adapter.capabilities.has_float64 else 4


@requirement(
    "VAL-2",
    "A sum keeps signs of zeros, NaNs, infinities, denormals and all digits of integers; what overflows is infinite, or wraps.",
    tier=2,
    seconds=120,
)
def sums_every_value(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    size, rank = group.size(), group.rank()
    for dtype, numel in product(reduced_by(adapter), (37, 5003, 600_011)):
        for turn in range(size if numel < 10_000 else 1):
            have = _to_be_summed(dtype, numel, turn, size)
            total = have[turn]
            for each in (*have[turn + 1 :], *have[:turn]):
                total = total + each
            x = have[rank].to(device, copy=True)
            adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=group, what="sum").wait()
            into = torch.zeros(numel, dtype=dtype, device=device)
            parts = zerolap.Parts.of([have[rank].to(device, copy=True) for _ in range(size)])
            adapter.reduce_scatter(parts, into=into, group=group, tag=turn, what="sum").wait()
            for verb, seen in (("all-reduce", x.cpu()), ("reduce-scatter", into.cpu())):
                expect_equal(_plain_nan(seen), _plain_nan(total), f"{verb} of {numel} elements of {dtype}")


def _to_be_summed(dtype: torch.dtype, numel: int, turn: int, size: int) -> list[Tensor]:
    """What ranks have: one of them a special value beside nothing of the others, and two of them what is too large together."""
    values = _special(dtype, is_moved=False)
    if dtype.is_floating_point:
        most, infinite = torch.finfo(dtype).max, float("inf")
        nothing = torch.full_like(values, -0.0)
        first = torch.tensor([most, -most, infinite, -infinite, infinite], dtype=dtype)
        second = torch.tensor([most, -most, -infinite, 1.0, float("nan")], dtype=dtype)
    else:
        largest = torch.iinfo(dtype).max
        nothing = torch.zeros_like(values)
        first = torch.tensor([largest, largest, -largest, largest // 2 + 1], dtype=dtype)
        second = torch.tensor([1, largest, -largest, largest // 2 + 1], dtype=dtype)
    have = []
    for rank in range(size):
        over = first if rank == turn else second if rank == (turn + 1) % size else torch.zeros_like(first)
        have.append(_tiled(torch.cat([values if rank == turn else nothing, over]), numel))
    return have


def _plain_nan(tensor: Tensor) -> Tensor:
    """Which NaN comes of a sum is left open: as if it were one."""
    return tensor.masked_fill(tensor.isnan(), float("nan")) if tensor.is_floating_point() else tensor


@requirement(
    "VAL-3", "Several megabytes arrive as a few bytes do, by every verb and in every dtype.", tier=2, seconds=120
)
def takes_megabytes(adapter: Adapter) -> None:
    group = own_group(adapter)
    size = group.size()
    for verb in VERBS:
        dtypes = moved_by(adapter) if verb in ("broadcast", "all-gather") else reduced_by(adapter)
        for number, dtype in enumerate(dtypes):
            whole = int(LARGE_BYTES / dtype.itemsize)
            for numel in (whole | 1, whole // 4096 * 4096):
                form = _form(verb, dtype, numel, size, is_inside=numel % 2 == 1)._replace(
                    root=number % size, tag=number
                )
                exchange = start(adapter, group, form, seed=number)
                exchange.pending.wait()
                exchange.check()


@requirement("VAL-4", "A bucket of tens of megabytes arrives, in parts that are not all equal.", tier=2, seconds=120)
def takes_large_buckets(adapter: Adapter) -> None:
    group = own_group(adapter)
    size, device, rank = group.size(), device_of(adapter), group.rank()
    sizes = [HUGE // size + (r % 2) for r in range(size)]
    whole = torch.arange(sum(sizes), dtype=torch.int32)
    sent = zerolap.Parts.of(list(torch.split((whole + rank).to(device), sizes)))
    into = torch.zeros(sizes[rank], dtype=torch.int32, device=device)
    adapter.reduce_scatter(sent, into=into, group=group, tag=1, what="large").wait()
    expect_equal(into, torch.split(whole, sizes)[rank] * size + size * (size - 1) // 2, "a large reduce-scatter")
    received = torch.full_like(whole, -1).to(device)
    parts = zerolap.Parts.of(list(torch.split(received, sizes)))
    parts.tensors[rank].copy_(torch.split(whole, sizes)[rank])
    adapter.all_gather(parts, group=group, tag=2, what="large").wait()
    expect_equal(received, whole, "a large all-gather")
    x = (whole * (rank + 1)).to(device)
    adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=group, what="large").wait()
    expect_equal(x, whole * (size * (size + 1) // 2), "a large all-reduce")
    x = (whole + rank).to(device)
    adapter.broadcast(x, src=GroupRank(size - 1), group=group, what="large").wait()
    expect_equal(x, whole + size - 1, "a large broadcast")


@requirement(
    "VAL-5",
    "The same input gives the same sum each time, also where the order of summands decides its last bits.",
    tier=2,
    seconds=120,
)
def sums_alike(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    size, rank = group.size(), group.rank()
    dice = torch.Generator().manual_seed(rank)
    for dtype in (d for d in reduced_by(adapter) if d.is_floating_point):
        for numel, num_times in ((1, 130), (67, 330), (64 * 64, 40), (300_001, 6), (1_200_000, 2)):
            source = torch.randn(numel * size, generator=dice, dtype=torch.float64).to(dtype).to(device)
            parts = zerolap.Parts.of(list(torch.split(source, numel)))
            first: list[Tensor] = []
            for turn in range(num_times):
                into = torch.zeros(numel, dtype=dtype, device=device)
                x = source[:numel] * 1
                works = [
                    adapter.reduce_scatter(parts, into=into, group=group, tag=turn % 256, what="sum"),
                    adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=group, what="sum"),
                ]
                for work in works:
                    work.wait()
                seen = [into.cpu(), x.cpu()]
                first = first or seen
                for verb, a, b in zip(("reduce-scatter", "all-reduce"), seen, first, strict=True):
                    expect_equal(a, b, f"{verb} of {numel} elements of {dtype}, time {turn}")


@requirement(
    "LATE-1",
    "What is started returns before the peers have come, and is right however late they come.",
    tier=2,
    seconds=120,
)
def waits_for_late_peers(adapter: Adapter) -> None:
    group = own_group(adapter)
    for number, verb in enumerate(VERBS):
        for turn in range(group.size()):
            dist.all_reduce(torch.zeros(1))  # a barrier on the host
            is_late = turn == group.rank()
            come_late(group, turn, seconds=0.25)
            begin = time.monotonic()
            form = _form(verb, torch.float32, 3001, group.size())._replace(tag=number, root=turn)
            exchange = start(adapter, group, form, seed=turn)
            seconds = time.monotonic() - begin
            exchange.pending.wait()
            exchange.check()
            waited = time.monotonic() - begin
            # Whoever is kept longer than this has waited for the one that is late, unless the host has kept everybody.
            assert is_late or seconds < 0.2 or waited > 2 * 0.25, (
                f"{verb}: it took {seconds:.2f} s to start, while a peer was 0.25 s late"
            )


@requirement("LATE-2", "No collective takes much longer than another of its kind.", tier=2, seconds=120)
def takes_its_time(adapter: Adapter) -> None:
    group, device = own_group(adapter), device_of(adapter)
    slow = Slow()
    for verb, numel, num_times in (
        (v, n, t) for v in VERBS for n, t in ((40, 320), (4096, 20), (300_000, 4), (1_100_001, 2))
    ):
        for turn in range(num_times):
            dtype = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.float16)[turn % 5]
            x = torch.zeros(numel, dtype=dtype, device=device)
            begin, busy = time.perf_counter(), time.thread_time()
            _plain(adapter, group, verb, x, tag=turn % 256).wait()
            adapter.synchronize()
            seconds = time.perf_counter() - begin - (time.thread_time() - busy)
            slow.note(seconds, f"{verb} of {numel} elements of {dtype}")


def _plain(adapter: Adapter, group: dist.ProcessGroup, verb: Verb, x: Tensor, *, tag: int) -> zerolap.Pending:
    if verb in ("all-reduce", "maximum"):
        op = dist.ReduceOp.SUM if verb == "all-reduce" else dist.ReduceOp.MAX
        return adapter.all_reduce(x, op=op, group=group, what=verb)
    if verb == "broadcast":
        return adapter.broadcast(x, src=GroupRank(tag % group.size()), group=group, what=verb)
    parts = zerolap.Parts.of([x.clone() for _ in range(group.size())])
    if verb == "all-gather":
        return adapter.all_gather(parts, group=group, tag=tag, what=verb)
    return adapter.reduce_scatter(parts, into=x, group=group, tag=tag, what=verb)


@requirement(
    "ERR-1",
    "A collective whose peer never comes ends within its group's time limit, with a CollectiveError that says which it was.",
    tier=2,
    seconds=120,
    min_ranks=2,
)
def ends_without_its_peer(adapter: Adapter) -> None:
    if adapter.capabilities.futures_complete_at_enqueue:
        raise NotDeclaredError("a wait is the stream's, not the host's: how a failure ends all ranks is tried by STR-2")
    kind, limit = dist.get_backend_config(world()), 1.5
    like = dist.new_group(backend=kind, timeout=timedelta(seconds=limit))
    assert like is not None
    groups = [own_group(adapter, like) for _ in range(2 * len(VERBS))]
    for group in groups:
        if abs(adapter.timeout(group).total_seconds() - limit) > 0.01:
            raise AssertionError(f"a group's timeout is {adapter.timeout(group)}, of one like it {limit} s")
    said: dict[str, BaseException | str] = {}

    def wait_alone(what: str, begin: Callable[[], zerolap.Pending]) -> None:
        begun = time.monotonic()
        try:
            begin().wait()
        except BaseException as error:
            said[what] = error
        else:
            said[what] = "no error"
        if time.monotonic() - begun > limit + 6:
            said[what] = f"an end after {time.monotonic() - begun:.1f} s"

    rank = dist.get_rank()
    threads = []
    for i, (absent, verb) in enumerate(product((0, 1), VERBS)):
        if rank == absent:
            continue
        x = torch.ones(1001 + i, device=device_of(adapter))
        # A root has nobody to wait for.
        tag = absent if verb == "broadcast" else 7 + i

        def begin(i: int = i, verb: Verb = verb, x: Tensor = x, tag: int = tag) -> zerolap.Pending:
            return _plain(adapter, groups[i], verb, x, tag=tag)

        threads.append(threading.Thread(target=wait_alone, args=(f"{verb} without rank {absent}", begin), daemon=True))
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit + 8
    for thread in threads:
        thread.join(max(0.1, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), f"only these have ended: {sorted(said)}"
    for what, seen in said.items():
        assert isinstance(seen, CollectiveError), f"{what}: expected a CollectiveError, seen {seen!r}"
        assert what.split(" without")[0] in str(seen), f"{what}: the error does not say what failed: {seen}"
