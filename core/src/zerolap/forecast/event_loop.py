"""A simulated rank: threads that share its cores, transfers that share its wire. Nothing here knows what they are for.

Time is continuous. Between two events every thread that works and every transfer that flows has a rate; the next event is
whatever is done first. All ranks do the same at the same time, so one stands for all, and what it sends is what it receives.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator
from itertools import count

_TINY = 1e-12  # of what is left: two things that end together must not be an event each, a rounding error apart


class Flag:
    """Something that threads can wait for."""

    __slots__ = ("is_set",)

    def __init__(self, *, is_set: bool = False) -> None:
        self.is_set = is_set


Thread = Generator[float | Flag, None, None]  # yields seconds of work on a core, or what it waits for


class _Running:
    """A thread, and what is left of its work or what it waits for."""

    __slots__ = ("left", "steps", "waits_for")

    def __init__(self, steps: Thread) -> None:
        self.steps = steps
        self.left = 0.0
        self.waits_for: Flag | None = None


class _Transfer:
    __slots__ = ("done", "latency", "left")

    def __init__(self, num_bytes: float, latency: float) -> None:
        self.left = num_bytes
        self.latency = latency
        self.done = Flag()


class SimulatedRank:
    """One rank. ``cores`` is how many threads, moving bytes included, run at full speed at once."""

    def __init__(self, *, cores: float, bytes_per_second: float, cpu_seconds_per_byte: float) -> None:
        self.now = 0.0
        self._cores = cores
        self._rate = bytes_per_second
        self._cpu_per_byte = cpu_seconds_per_byte
        self._threads: list[_Running] = []
        self._flowing: list[tuple[_Transfer, Queue]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.wire_seconds = 0.0  # in which something was flowing

    def start(self, thread: Thread) -> None:
        self._threads.append(_Running(thread))

    def after(self, seconds: float, fn: Callable[[], None]) -> None:
        """Call ``fn`` when this much time has passed."""
        if seconds:
            heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), fn))
        else:
            fn()

    def flow(self, transfer: _Transfer, queue: Queue) -> None:
        self._flowing.append((transfer, queue))

    def run_until(self, flag: Flag) -> None:
        while True:
            self._resume()
            if flag.is_set:
                return
            self._advance()

    def _resume(self) -> None:
        """Let every thread go on that can: one may set what another waits for."""
        has_moved = True
        while has_moved:
            has_moved = False
            for thread in self._threads:
                while not thread.left and (thread.waits_for is None or thread.waits_for.is_set):
                    has_moved = True
                    wanted = next(thread.steps)
                    if isinstance(wanted, Flag):
                        thread.waits_for = wanted
                    else:
                        thread.left, thread.waits_for = wanted, None

    def _advance(self) -> None:
        working = [thread for thread in self._threads if thread.left]
        speed, rate = self._speeds(len(working), len(self._flowing))
        flowing = list(self._flowing)
        first = min(
            min(thread.left for thread in working) / speed if working else math.inf,
            min(transfer.left for transfer, _ in flowing) / rate if flowing else math.inf,
            self._timers[0][0] - self.now if self._timers else math.inf,
        )
        assert first < math.inf, "every thread waits for something that will not happen"
        self.now += first
        for thread in working:
            thread.left = _rest(thread.left, speed, first)
        if flowing:
            self.wire_seconds += first
        for transfer, queue in flowing:
            transfer.left = _rest(transfer.left, rate, first)
            if not transfer.left:
                self._flowing.remove((transfer, queue))
                queue.on_moved(transfer)
        while self._timers and self._timers[0][0] <= self.now * (1 + _TINY):
            heapq.heappop(self._timers)[2]()

    def _speeds(self, num_working: int, num_flowing: int) -> tuple[float, float]:
        """Seconds of work a thread does, and bytes a transfer moves, in a second.

        The wire is shared evenly, and so are the cores, moving bytes being one more thread for each transfer: but one that needs
        less than its share takes no more than that.
        """
        rate = self._rate / max(num_flowing, 1)
        needed = min(1.0, rate * self._cpu_per_byte) if self._cpu_per_byte else 0.0
        share = self._cores / max(num_working + num_flowing, 1)
        if share < needed:
            return min(1.0, share), share / self._cpu_per_byte
        speed = min(1.0, (self._cores - num_flowing * needed) / max(num_working, 1))
        return speed, min(rate, needed / self._cpu_per_byte) if self._cpu_per_byte else rate


def _rest(left: float, speed: float, seconds: float) -> float:
    if math.isinf(speed) or left <= speed * seconds * (1 + _TINY):
        return 0.0
    return left - speed * seconds


class Queue:
    """The transfers of one process group, in the order in which they are started.

    Either up to ``width`` are under way at once, each with all of its latency. Or, with None, any number: their bytes go one
    behind the other, but the latency of one passes while another moves.
    """

    def __init__(self, rank: SimulatedRank, *, width: int | None) -> None:
        self._rank = rank
        self._width = width
        self._waiting: deque[_Transfer] = deque()
        self._num_busy = 0

    def start(self, num_bytes: float, *, latency: float) -> Flag:
        """One more transfer; the flag is set when it is done."""
        transfer = _Transfer(num_bytes, latency)
        if self._width is None:
            self._rank.after(latency / 2, lambda: self._queue(transfer))
        else:
            self._queue(transfer)
        return transfer.done

    def _queue(self, transfer: _Transfer) -> None:
        self._waiting.append(transfer)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._num_busy < (self._width or 1):
            transfer = self._waiting.popleft()
            self._num_busy += 1
            before = 0.0 if self._width is None else transfer.latency / 2
            self._rank.after(before, lambda moved=transfer: self._rank.flow(moved, self))  # type: ignore[misc]

    def on_moved(self, transfer: _Transfer) -> None:
        """Its last byte is on the wire."""
        if self._width is None:
            self._num_busy -= 1
            self._rank.after(transfer.latency / 2, lambda: _set(transfer.done))
            self._serve()
        else:
            self._rank.after(transfer.latency / 2, lambda: self._end(transfer))

    def _end(self, transfer: _Transfer) -> None:
        self._num_busy -= 1
        _set(transfer.done)
        self._serve()


def _set(flag: Flag) -> None:
    flag.is_set = True
