"""Tier 1: lanes run things in order, hand over what they computed, and fail aloud; sides keep memory until it is free."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import zerolap
from zerolap import Adapter
from zerolap_conformance.requirements import requirement
from zerolap_conformance.support import (
    busy,
    come_late,
    device_of,
    expect,
    expect_clock,
    expect_equal,
    expect_error,
    own_group,
)


@requirement("LANE-1", "A lane runs what it is given in the order given.", tier=1)
def runs_in_order(adapter: Adapter) -> None:
    lane, done = adapter.lane("conformance", device=device_of(adapter)), []
    for i in range(200):
        lane.submit(lambda i=i: done.append(i))  # type: ignore[misc]  # mypy types no defaults of lambdas
    lane.run(lambda: None)
    lane.close()
    expect(done, list(range(200)), "the order")


@requirement("LANE-2", "An error on a lane reaches whoever waits, and nothing runs on it any more.", tier=1)
def fails_aloud(adapter: Adapter) -> None:
    lane, done = adapter.lane("conformance", device=device_of(adapter)), []

    def fail() -> None:
        raise ArithmeticError("deliberate")

    first, second = lane.submit(fail), lane.submit(lambda: done.append("ran"))
    for future in (first, second):
        expect_error(future.wait, "deliberate", "waiting for a lane that has failed")
    expect_error(lambda: lane.run(lambda: None), "deliberate", "run() on a lane that has failed")
    lane.close()
    expect(done, [], "what ran behind the failure")


@requirement("LANE-3", "run() gives back the result, and what the caller does next sees it.", tier=1)
def hands_over(adapter: Adapter) -> None:
    device = device_of(adapter)
    lane = adapter.lane("conformance", device=device)
    for i in range(12):
        x = torch.zeros(10_000, device=device)

        def fill(x: Tensor = x, i: int = i) -> str:
            busy(device, 0.005)
            x.fill_(i)
            return f"filled {i}"

        expect(lane.run(fill), f"filled {i}", "what run() gives back")
        expect_equal(x + 1, torch.full((10_000,), i + 1.0), "what the caller reads")
    lane.close()


@requirement("LANE-4", "What runs on a lane sees what its caller has started before.", tier=1)
def sees_its_caller(adapter: Adapter) -> None:
    device = device_of(adapter)
    lane = adapter.lane("conformance", device=device)
    starts: tuple[Callable[[Callable[[], Tensor]], Tensor], ...] = (lane.run, lambda fn: lane.submit(fn).wait())
    for i in range(12):
        x = torch.zeros(10_000, device=device)
        busy(device, 0.005)
        x.fill_(i)
        y = starts[i % 2](lambda x=x: x * 2)  # type: ignore[misc]  # mypy types no defaults of lambdas
        expect_equal(y, torch.full((10_000,), 2.0 * i), "what the lane has read")
    lane.close()


@requirement("LANE-5", "Waiting for a lane's future makes the waiter see its tensor; DDP does just that.", tier=1)
def futures_hand_over(adapter: Adapter) -> None:
    device = device_of(adapter)
    lane = adapter.lane("conformance", device=device)
    for i in range(12):
        x = torch.zeros(10_000, device=device)

        def fill(x: Tensor = x, i: int = i) -> Tensor:
            busy(device, 0.005)
            return x.fill_(i)

        y = lane.submit(fill).wait()
        expect_equal(y + 1, torch.full((10_000,), i + 1.0), "what the waiter reads")
    lane.close()


@requirement("LANE-6", "Nothing on a lane is recorded for autograd.", tier=1)
def has_no_grad(adapter: Adapter) -> None:
    lane = adapter.lane("conformance", device=device_of(adapter))
    expect(lane.run(torch.is_grad_enabled), False, "whether gradients are recorded")
    lane.close()


@requirement("LANE-7", "Closing a lane lets what was submitted finish, and may be done twice.", tier=1)
def closes(adapter: Adapter) -> None:
    done: list[int] = []
    lane = adapter.lane("conformance", device=device_of(adapter))
    for i in range(50):
        lane.submit(lambda i=i: done.append(i))  # type: ignore[misc]  # mypy types no defaults of lambdas
    lane.close()
    lane.close()
    deadline = time.monotonic() + 10
    while len(done) < 50 and time.monotonic() < deadline:
        time.sleep(0.01)
    expect(len(done), 50, "jobs that ran")


@requirement("LANE-8", "Inside a lane, as_caller() does things with the caller's memory and in its order.", tier=1)
def acts_as_its_caller(adapter: Adapter) -> None:
    device = device_of(adapter)
    lane = adapter.lane("conformance", device=device)
    for i in range(6):
        x = torch.zeros(10_000, device=device)
        streams = [_stream(device)]

        def work(x: Tensor = x, i: int = i, streams: list[object] = streams) -> Tensor:
            busy(device, 0.005)
            x.fill_(i)
            with lane.as_caller():
                streams.append(_stream(device))
                y = x * 2
                busy(device, 0.005)
                y.add_(1)
            return y.mul_(2)

        expect_equal(lane.run(work), torch.full((10_000,), 4.0 * i + 2), "what was computed half here and half there")
        expect(streams[1], streams[0], "whose memory is used, by its stream")
    lane.close()


def _stream(device: torch.device) -> object:
    """By which the device's memory is kept apart, if it has streams."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id


@requirement("SIDE-1", "A collective started on a side is waited for by its result, by several waiters too.", tier=1)
def sides_hand_over(adapter: Adapter) -> None:
    device, group, side = device_of(adapter), own_group(adapter), adapter.side(device_of(adapter))
    size, lane = group.size(), adapter.lane("conformance", device=device)
    for i in range(6):
        x = torch.zeros(5_000, device=device)
        come_late(group, i)
        busy(device, 0.005)
        x.fill_(i + 1)

        def start(x: Tensor = x) -> zerolap.Pending:
            scratch = x * 1  # made and dropped here
            x.copy_(scratch)
            return adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=group, what="sum")

        pending = side.start(start)
        if i % 2:
            other = lane.submit(pending.wait)
            while not other.done():  # on the host only: waiting for the future would make the device wait, too
                time.sleep(0.001)
        pending.wait()
        y = x * 2
        pending.wait()
        expect_equal(y, torch.full((5_000,), 2.0 * (i + 1) * size), f"twice the sum, round {i}")
    lane.close()


@requirement("SIDE-2", "Memory that a side's work has made is not handed out while it is in use.", tier=1)
def sides_keep_memory(adapter: Adapter) -> None:
    device, group, side = device_of(adapter), own_group(adapter), adapter.side(device_of(adapter))
    rank, size, numel = group.rank(), group.size(), 20_000
    for i in range(6):
        into = torch.zeros(numel, device=device)
        source = torch.full((numel * size,), float(rank + i), device=device)
        come_late(group, i)
        # Holds up what is started behind it until all ranks are here.
        gate = adapter.all_reduce(torch.zeros(1, device=device), op=dist.ReduceOp.SUM, group=group, what="gate")

        def start(source: Tensor = source, into: Tensor = into) -> zerolap.Pending:
            parts = zerolap.Parts.of(list(torch.split(source * 1, numel)))
            return adapter.reduce_scatter(parts, into=into, group=group, tag=0, what="sum")

        pending = side.start(start)
        taken = [torch.full((numel * size,), -1.0, device=device) for _ in range(5)]  # of the memory, if it were free
        gate.wait()
        pending.wait()
        del taken
        expect_equal(into, torch.full((numel,), float(sum(r + i for r in range(size)))), "the sum")


@requirement("TIME-1", "Moments follow each other, and the time between two of them is in seconds.", tier=1)
def measures_time(adapter: Adapter) -> None:
    expect_clock(adapter)
    device, ratios = device_of(adapter), []
    busy(device)  # calibrates itself
    adapter.synchronize()
    for _ in range(5):
        start, begin = adapter.moment(), time.perf_counter()
        busy(device, 0.04)
        end = adapter.moment()
        adapter.synchronize()
        wall = time.perf_counter() - begin
        ratios.append(adapter.seconds_between(start, end) / wall)
    ratio = statistics.median(ratios)  # whoever else uses the host disturbs some rounds, not most
    assert 0.4 <= ratio <= 2, f"what takes a second by the host's clock takes {ratio:.3g} s by the device's"


@requirement("MEM-1", "Memory that is handed on is never memory that is in use, nor what lies beside it.", tier=1)
def hands_memory_on(adapter: Adapter) -> list[str]:
    recycler = adapter.recycler()
    if recycler is None:
        return ["the adapter hands no memory on"]
    # Tensors behind each other in one block, of odd sizes around that of a page and far above it: every second one is in use all the time.
    sizes = [500_003, 1_000, 300_001, 5, 2_000_001, 70_000, 1_050_000, 4_096, 700_001, 33]
    tensors = torch.split(torch.zeros(sum(sizes), dtype=torch.int32), sizes)
    expected = list(range(1, len(sizes) + 1))
    for tensor, value in zip(tensors, expected, strict=True):
        tensor.fill_(value)
    freed = range(0, len(sizes), 2)

    def fill(place: int, value: int) -> None:
        recycler.refill(tensors[place])
        tensors[place].fill_(value)
        expected[place] = value

    for turn in range(3 * len(freed)):
        empty, busy_one = freed[turn % len(freed)], freed[(turn + 1 + turn // len(freed)) % len(freed)]
        recycler.discard(tensors[empty])
        recycler.release()  # so that it has nothing of its own any more
        recycler.discard(tensors[busy_one])
        fill(busy_one, 100 + turn)  # with its own memory again, which is not to be given to another then
        fill(empty, 200 + turn)
        expect_equal(tensors[busy_one], torch.full((sizes[busy_one],), 100 + turn, dtype=torch.int32), "what is in use")
        for place in freed:
            recycler.discard(tensors[place])
            recycler.release(1_000_000)
        for place in (*freed[turn % len(freed) :], *freed[: turn % len(freed)]):
            fill(place, 300 + turn + place)
        for place, (tensor, value) in enumerate(zip(tensors, expected, strict=True)):
            expect_equal(tensor, torch.full((sizes[place],), value, dtype=torch.int32), f"tensor {place}, turn {turn}")
    recycler.release()
    expect(recycler.num_bytes, 0, "bytes that are kept after release()")
    return []
