"""Tier 1: sides, clocks and memory that is handed on, as training uses them: hundreds of times, and nothing is left behind."""

from __future__ import annotations

import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

import zerolap
from zerolap import Adapter
from zerolap_conformance.leftovers import expect_nothing_left
from zerolap_conformance.requirements import requirement
from zerolap_conformance.support import (
    Slow,
    busy,
    device_of,
    elsewhere,
    expect,
    expect_clock,
    expect_equal,
    occupy,
    own_group,
)

NUM_JOBS = 330
AGE_SECONDS = 1.2


@requirement(
    "SIDE-3",
    "Hundreds of collectives may be started on a side, many at once, and each is waited for.",
    tier=1,
    seconds=120,
)
def sides_in_use(adapter: Adapter) -> None:
    device, group, side = device_of(adapter), own_group(adapter), adapter.side(device_of(adapter))
    rank, size, slow = group.rank(), group.size(), Slow()

    def use(number: int, under_way_at_once: int, numel: int = 300) -> None:
        under_way: list[tuple[int, zerolap.Pending, Tensor, Tensor]] = []
        for i in range(number):
            source = torch.zeros(numel * size, device=device)
            into = torch.zeros(numel, device=device)
            if i % 16 == 0:
                occupy(device, 0.002)
            source += i + rank

            def begin(source: Tensor = source, into: Tensor = into, i: int = i) -> zerolap.Pending:
                parts = zerolap.Parts.of(list(torch.split(source * 2, numel)))
                return adapter.reduce_scatter(parts, into=into, group=group, tag=i % 256, what="sum")

            moment = time.monotonic()
            pending = side.start(begin)
            expect(pending.sent_bytes, 4 * numel * (size - 1), "the bytes that are sent, as the side says")
            under_way.append((i, pending, into, source))  # which the side may still read
            if len(under_way) > under_way_at_once:
                _arrive(*under_way.pop(0)[:3], size)
            slow.note(time.monotonic() - moment, f"start {i} on a side")
        for each in under_way:
            _arrive(*each[:3], size)

    use(NUM_JOBS, 2)
    use(60, 24)
    elsewhere(adapter, lambda: use(60, 24))
    elsewhere(adapter, lambda: use(310, 2))
    expect_nothing_left(adapter, lambda: use(90, 22), "90 collectives on a side")
    expect_nothing_left(
        adapter, lambda: elsewhere(adapter, lambda: use(60, 22)), "collectives of another thread on a side"
    )
    begun, is_over = time.monotonic(), torch.zeros(1)
    while not is_over.item():
        use(10, 3)
        time.sleep(0.1)
        is_over.fill_(time.monotonic() - begun > AGE_SECONDS)
        dist.all_reduce(is_over, op=dist.ReduceOp.MIN)
    use(40, 3)


def _arrive(i: int, pending: zerolap.Pending, into: Tensor, size: int) -> None:
    pending.wait()
    total = 2.0 * sum(i + r for r in range(size))
    expect_equal(into * 1, torch.full_like(into, total, device="cpu"), f"collective {i} of a side")


@requirement(
    "TIME-2",
    "The time between two moments is what lay between them by the host's clock, short or long, whoever asks.",
    tier=1,
    seconds=120,
)
def measures_exactly(adapter: Adapter) -> None:
    expect_clock(adapter)
    device = device_of(adapter)
    busy(device, 0.001)  # calibrates itself
    _measure(adapter, [0.0005] * 12 + [0.01] * 4 + [0.004] * 6 + [0.03, 0.06, 0.12])
    _measure(adapter, [0.002] * NUM_JOBS)
    elsewhere(adapter, lambda: _measure(adapter, [0.0] * 310 + [0.01] * 3 + [0.12]))
    begin = time.monotonic()
    while time.monotonic() - begin < AGE_SECONDS:
        _measure(adapter, [0.005])
        time.sleep(0.1)
    _measure(adapter, [0.0] * 5 + [0.01] * 3 + [0.13])
    moments = [adapter.moment()]
    for _ in range(9):
        busy(device, 0.003)
        moments.append(adapter.moment())
    adapter.synchronize()
    steps = [adapter.seconds_between(a, b) for a, b in pairwise(moments)]
    whole = adapter.seconds_between(moments[0], moments[-1])
    assert abs(sum(steps) - whole) <= 0.02 * whole + 1e-3, f"steps of {sum(steps):.4g} s take {whole:.4g} s together"
    expect_nothing_left(
        adapter, lambda: _measure(adapter, [0.0] * 200 + [0.002] * 40 + [0.012] * 12 + [0.11] * 2), "measuring time"
    )
    expect_nothing_left(
        adapter, lambda: elsewhere(adapter, lambda: _measure(adapter, [0.0] * 100)), "measuring time on another thread"
    )


def _measure(adapter: Adapter, lengths: list[float]) -> None:
    for turn, seconds in enumerate(lengths):
        adapter.synchronize()
        earliest = time.perf_counter()
        start = adapter.moment()
        adapter.synchronize()
        latest = time.perf_counter()
        while time.perf_counter() - latest < seconds:
            time.sleep(seconds / 2)
        inner = time.perf_counter() - latest
        end = adapter.moment()
        adapter.synchronize()
        outer = time.perf_counter() - earliest
        seen = adapter.seconds_between(start, end)
        clock = (1e-4 if adapter.device_type == "cpu" else 5e-4) + 0.01 * inner  # of how exact a device's clock may be
        assert inner - clock <= seen <= outer + clock, (
            f"measurement {turn}: between {inner:.6f} and {outer:.6f} s by the host's clock are {seen:.6f} s"
        )


@requirement(
    "MEM-2", "Memory is handed on hundreds of times, of any size, and all of it is accounted for.", tier=1, seconds=120
)
def hands_memory_on_for_long(adapter: Adapter) -> list[str]:
    recycler = adapter.recycler()
    if recycler is None:
        return ["the adapter hands no memory on"]
    sizes, slow = [20_000, 200_003, 17, 70_001, 1_500_007, 33_000], Slow()
    tensors = torch.split(torch.zeros(sum(sizes), dtype=torch.int32), sizes)

    def use(number: int, most: int) -> None:
        for turn in range(number):
            place = turn % len(sizes)
            if sizes[place] > most:
                continue
            begin = time.monotonic()
            for i, tensor in enumerate(tensors):
                if i != place and sizes[i] <= most:
                    tensor[:: max(1, sizes[i] // 50)].fill_(turn + i)
            recycler.discard(tensors[place])
            kept = recycler.num_bytes
            assert 0 <= kept <= 4 * sizes[place] + 4096, f"of {4 * sizes[place]} bytes {kept} are said to be kept"
            if sizes[place] > 500_000:
                assert kept >= 2 * sizes[place] or turn % 7 == 6, (
                    f"of {4 * sizes[place]} bytes {kept} are said to be kept"
                )
            if turn % 7 == 6:
                recycler.release()
                expect(recycler.num_bytes, 0, "bytes that are kept after release()")
            recycler.refill(tensors[place])
            tensors[place].fill_(turn)
            slow.note(time.monotonic() - begin, f"turn {turn} of handing memory on")
            for i, tensor in enumerate(tensors):
                if i != place and sizes[i] <= most:
                    step = max(1, sizes[i] // 50)
                    expect_equal(tensor[::step], torch.full_like(tensor[::step], turn + i), f"tensor {i}, turn {turn}")
            time.sleep(0.003 if turn % 5 == 0 or sizes[place] > 60_000 else 0)
            expect_equal(tensors[place], torch.full_like(tensors[place], turn), f"what was filled, turn {turn}")

    use(40, 10**9)
    use(330, 100_000)
    elsewhere(adapter, lambda: use(42, 10**9))
    begin = time.monotonic()
    while time.monotonic() - begin < AGE_SECONDS:
        use(6, 10**9)
        time.sleep(0.1)
    expect_nothing_left(adapter, lambda: use(48, 10**9), "handing memory on")
    expect_nothing_left(adapter, lambda: elsewhere(adapter, lambda: use(60, 10**9)), "handing memory on")
    return []
