"""Tier 1: lanes as training uses them: hundreds of jobs, of several lanes and threads, and nothing is left behind."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

import zerolap
from zerolap import Adapter
from zerolap_conformance.leftovers import expect_nothing_left
from zerolap_conformance.requirements import requirement
from zerolap_conformance.support import Slow, busy, device_of, elsewhere, expect, expect_equal, occupy

NUM_JOBS = 330
AGE_SECONDS = 1.2


@requirement(
    "LANE-9",
    "Every one of hundreds of jobs runs once, in order, and gives its own result, whatever kind it is.",
    tier=1,
    seconds=120,
)
def gives_each_its_result(adapter: Adapter) -> None:
    lanes = [adapter.lane(f"conformance-{i}", device=device_of(adapter)) for i in range(9)]
    _use(adapter, lanes[0], number=NUM_JOBS)
    _use(adapter, lanes[1], number=NUM_JOBS, most_queued=60)
    elsewhere(adapter, lambda: _use(adapter, lanes[2], number=NUM_JOBS))
    for lane in lanes:
        _use(adapter, lane, number=40)
    old, begin = lanes[3], time.monotonic()
    while time.monotonic() - begin < AGE_SECONDS:
        _use(adapter, old, number=20)
        time.sleep(0.2)
    _use(adapter, old, number=100)
    for lane in lanes:
        lane.close()


def _use(adapter: Adapter, lane: zerolap.Lane, *, number: int, most_queued: int = 7) -> None:
    device, dice, ran, slow = device_of(adapter), random.Random(number), list[int](), Slow()
    queued: list[tuple[Future[Any], Callable[[Any], None]]] = []
    counter = torch.zeros(50, device=device)
    for i in range(number):
        job, check = _job(i, ran, counter, dice.randrange(4))
        begin = time.monotonic()
        if dice.random() < 0.3:
            check(lane.run(job))
        else:
            queued.append((lane.submit(job), check))
        while len(queued) > dice.choice([0, 1, most_queued, most_queued]):
            future, check = queued.pop(0)
            check(future.wait())
        slow.note(time.monotonic() - begin, f"job {i}, of no work")
    for future, check in queued:
        check(future.wait())
    lane.run(lambda: None)
    expect(ran, list(range(number)), "which jobs ran, in which order")
    expect_equal(counter * 1, torch.full((50,), float(number)), "what all jobs have counted on the device")


def _job(i: int, ran: list[int], counter: Tensor, kind: int) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Something to run on a lane, and what tells whether what it gives is right."""

    def run() -> Any:
        ran.append(i)
        assert not torch.is_grad_enabled(), f"job {i}: gradients are recorded on the lane"
        counter.add_(1)
        tensor = counter.new_full((20,), float(i)) if kind in (0, 1) else None
        return {0: tensor, 1: [tensor], 2: None, 3: f"job {i}"}[kind]

    def check(given: Any) -> None:
        if kind in (0, 1):
            inner = given if kind == 0 else given[0] if isinstance(given, list) else None
            assert isinstance(inner, Tensor), f"job {i}: expected a tensor, seen {given!r}"
            expect_equal(inner * 1, torch.full((20,), float(i)), f"what job {i} gives")
        else:
            expect(given, None if kind == 2 else f"job {i}", f"what job {i} gives")

    return run, check


class _OurError(Exception):
    """Of no kind that anybody else raises."""


@requirement(
    "LANE-10",
    "run() raises what was raised on the lane, itself; other lanes go on, and this one does not.",
    tier=1,
    seconds=120,
)
def raises_what_was_raised(adapter: Adapter) -> None:
    device = device_of(adapter)
    for num_before, is_elsewhere in ((0, False), (1, False), (2, True), (3, False), (40, False), (310, False)):

        def attempt(num_before: int = num_before) -> None:
            lane, other = (adapter.lane(f"conformance-{name}", device=device) for name in "ab")
            for _ in range(num_before):
                lane.submit(lambda: None)
            if num_before == 3:
                time.sleep(AGE_SECONDS)
            error, done = _OurError("deliberate"), list[str]()

            def fail() -> None:
                raise error

            seen: BaseException | None = None
            try:
                lane.run(fail)
            except BaseException as raised:
                seen = raised
            assert seen is error, f"after {num_before} jobs: run() raised {seen!r}, not what was raised on the lane"
            for start in (lane.submit, lane.run):
                with contextlib.suppress(Exception):
                    start(lambda: done.append("ran"))
            expect(other.run(lambda: "fine"), "fine", "what another lane gives")
            lane.close()
            other.close()
            expect(done, [], "what ran behind the failure")

        elsewhere(adapter, attempt) if is_elsewhere else attempt()


@requirement(
    "LANE-11", "A lane that is closed runs what was submitted, then nothing more, and says so.", tier=1, seconds=120
)
def runs_nothing_when_closed(adapter: Adapter) -> None:
    device = device_of(adapter)
    for number in (1, 2, 40, 310):
        lane, done = adapter.lane("conformance", device=device), list[int]()
        for i in range(number):
            lane.submit(partial(done.append, i))
        lane.close()
        lane.close()
        deadline = time.monotonic() + 5
        while len(done) < number and time.monotonic() < deadline:
            time.sleep(0.005)
        expect(done, list(range(number)), "jobs that ran of those that were submitted before")
    if device.type == "cpu":  # where a lane has a thread, which has ended
        for num_before in (0, 3):
            lane = adapter.lane("conformance", device=device)
            for _ in range(num_before):
                lane.run(lambda: None)
            lane.close()
            late, failed = list[str](), False
            try:
                lane.submit(partial(late.append, "ran")).wait()
            except Exception:
                failed = True
            expect((failed, late), (True, []), "whether a job failed that came after the end, and whether it ran")


@requirement(
    "LANE-12",
    "Lanes that are closed, and jobs that are done, leave no memory, threads or open files behind.",
    tier=1,
    seconds=120,
)
def leaves_nothing_behind(adapter: Adapter) -> None:
    device = device_of(adapter)

    def come_and_go() -> None:
        for number in (1, 7, 60, 60, 60):
            lane = adapter.lane("conformance", device=device)
            for i in range(number):
                job = lambda i=i: [torch.ones(20, device=device), (i, "x"), None][i % 3]  # noqa: E731
                lane.submit(job) if i % 2 else lane.run(job)
            lane.run(lambda: None)
            lane.close()

    come_and_go()
    expect_nothing_left(adapter, come_and_go, "5 lanes with 188 jobs")
    lane = adapter.lane("conformance", device=device)

    def work() -> None:
        for i in range(330):
            lane.submit(lambda i=i: i)  # type: ignore[misc]  # mypy types no defaults of lambdas
        lane.run(lambda: None)

    work()
    expect_nothing_left(adapter, work, "330 jobs")
    elsewhere(adapter, work)
    expect_nothing_left(adapter, lambda: elsewhere(adapter, work), "330 jobs of another thread")
    lane.close()


@requirement(
    "LANE-13",
    "A lane sees its caller's work and its caller sees the lane's, every time, from any thread.",
    tier=1,
    seconds=120,
)
def hands_over_every_time(adapter: Adapter) -> None:
    device = device_of(adapter)
    lanes = [adapter.lane(f"conformance-{i}", device=device) for i in range(8)]
    busy(device, 0.001)  # calibrates itself

    def use(number: int, seconds: float, lane: zerolap.Lane) -> None:
        for i in range(number):
            x = torch.zeros(700, device=device)
            occupy(device, seconds)
            x += i
            begin: Callable[[Callable[[], Any]], Any] = lane.run if i % 3 == 0 else lambda fn: lane.submit(fn).wait()
            y = begin(lambda x=x, i=i: _doubled(device, x, seconds if i % 2 else 0))  # type: ignore[misc]
            given = y if isinstance(y, Tensor) else y[0]
            expect_equal(given + x, torch.full((700,), 3.0 * i), f"what went to the lane and back, time {i}")

    for lane in lanes:
        use(6, 0.003, lane)
    use(120, 0.0005, lanes[0])
    use(330, 0, lanes[1])
    use(40, 0.002, lanes[0])
    elsewhere(adapter, lambda: use(20, 0.003, lanes[2]))
    elsewhere(adapter, lambda: use(310, 0.0002, lanes[3]))
    begin = time.monotonic()
    while time.monotonic() - begin < AGE_SECONDS:
        use(3, 0.003, lanes[4])
        time.sleep(0.1)
    use(6, 0.005, lanes[4])
    for lane in lanes:
        lane.close()


def _doubled(device: torch.device, x: Tensor, seconds: float) -> Any:
    occupy(device, seconds)
    y = x * 2
    return y if seconds else [y]
