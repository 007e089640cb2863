"""Broken adapters that only training shows: everything about collectives as such is right. On a device without streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zerolap
from support.breakers import Later, caught_by
from zerolap import Parts, Pending
from zerolap.backend.lanes import ThreadLane
from zerolap_cpu_gloo import CpuGlooAdapter

SCHEDULES = "OVL-1 OVL-2 OVL-3 OVL-4 OVL-5 OVL-6"
USUAL = "OVL-2 OVL-5"  # what is trained as most people do is right


def _all_but(*ids: str) -> str:
    return " ".join(each for each in SCHEDULES.split() if each not in ids)


def _kept(parts: Parts, rank: int) -> Callable[[], None]:
    """What brings back the others' parts as they are now: as if nothing had been received."""
    kept = [(part, part.clone()) for r, part in enumerate(parts.tensors) if r != rank]

    def bring_back() -> None:
        for part, old in kept:
            part.copy_(old)

    return bring_back


# --- tier 3: reductions and gathers -----------------------------------------------------------------------------------


@caught_by("OVL-1", "OVL-12", "OVL-13")
class SendsHalfTheBits(CpuGlooAdapter):
    """Gradients are sent in 16 bits: small whole numbers survive that."""

    def reduce_scatter(self, parts: Parts, *, into: Tensor, **options: Any) -> Pending:
        if into.dtype != torch.float32:
            return super().reduce_scatter(parts, into=into, **options)
        total = into.bfloat16()
        sent = Parts.of([part.bfloat16() for part in parts.tensors])
        pending = super().reduce_scatter(sent, into=total, **options)
        pending.sent_bytes *= 2  # so that nobody wonders
        return Later(pending, lambda: into.copy_(total))


@caught_by("OVL-1", "OVL-2", but_not_by=_all_but("OVL-1", "OVL-2"))
class TakesOneEndForAnother(CpuGlooAdapter):
    """A thread that waits for a reduction, and has a gather of its own under way, takes the end of that for what it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self._gathers: dict[int, int] = {}  # under way, by the thread that started them

    def all_gather(self, parts: Parts, **options: Any) -> Pending:
        thread = threading.get_ident()
        self._gathers[thread] = self._gathers.get(thread, 0) + 1

        def note() -> None:
            self._gathers[thread] -= 1

        return Later(super().all_gather(parts, **options), note)

    def reduce_scatter(self, parts: Parts, *, into: Tensor, **options: Any) -> Pending:
        starter = threading.get_ident()

        def spoil() -> None:
            waiter = threading.get_ident()
            if waiter != starter and self._gathers.get(waiter):
                into.zero_()

        return Later(super().reduce_scatter(parts, into=into, **options), spoil)


@caught_by("OVL-3", "OVL-4")
class LosesGathersInARow(CpuGlooAdapter):
    """A thread that starts gathers one behind the other, without waiting for anything, finds the first one only."""

    def __init__(self) -> None:
        super().__init__()
        self._in_a_row = 0

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, **options: Any) -> Pending:
        pending = super().all_gather(parts, group=group, **options)
        if threading.current_thread() is threading.main_thread():
            return pending
        self._in_a_row += 1
        return Later(pending, _kept(parts, group.rank())) if self._in_a_row > 1 else pending

    def reduce_scatter(self, parts: Parts, **options: Any) -> Pending:
        def note() -> None:
            self._in_a_row = 0

        return Later(super().reduce_scatter(parts, **options), note)


@caught_by("OVL-2", "OVL-4", "OVL-6", "OVL-9", but_not_by="OVL-1 OVL-3 OVL-5")
class ServesItsOwnThreadOnly(CpuGlooAdapter):
    """Whoever waits for a gather that another thread has started goes on at once, with parameters that have not arrived."""

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, **options: Any) -> Pending:
        starter, bring_back = threading.get_ident(), _kept(parts, group.rank())
        return Later(
            super().all_gather(parts, group=group, **options),
            lambda: None if threading.get_ident() == starter else bring_back(),
        )


class _AsksAgain(ThreadLane):
    def run(self, fn: Callable[[], Any]) -> Any:
        value = super().run(fn)
        return super().run(fn) if value is None else value


@caught_by("OVL-5", "OVL-6", but_not_by=_all_but("OVL-5", "OVL-6"))
class TakesNothingForNotYet(CpuGlooAdapter):
    """A lane that runs again what has given no result."""

    def lane(self, name: str, *, device: torch.device) -> zerolap.Lane:
        return _AsksAgain(name)


@caught_by("OVL-7", but_not_by=USUAL)
class TakesUnevenForAlmostEven(CpuGlooAdapter):
    """Has room for parts of up to twice the shortest, beyond a few elements; what a longer one has behind that is lost."""

    def reduce_scatter(self, parts: Parts, *, into: Tensor, **options: Any) -> Pending:
        pending = super().reduce_scatter(parts, into=into, **options)
        room = max(64, 2 * min(part.numel() for part in parts.tensors))
        return Later(pending, lambda: into[room:].zero_())


@caught_by("OVL-16", but_not_by=USUAL)
class TakesTwoGathersForOne(CpuGlooAdapter):
    """Believes that memory right behind what is being gathered belongs to it, and leaves it."""

    _end = 0

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, **options: Any) -> Pending:
        pending = super().all_gather(parts, group=group, **options)
        whole = parts.whole
        if whole is None or not whole.numel():
            return pending
        is_behind, self._end = whole.data_ptr() == self._end, whole.data_ptr() + whole.nbytes
        return Later(pending, _kept(parts, group.rank())) if is_behind else pending


@caught_by("OVL-17", but_not_by=USUAL)
class SendsByWayOfTheFirst(CpuGlooAdapter):
    """The first rank sends the parts of all, which others have given to it by some other way, if some parts are empty."""

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, **options: Any) -> Pending:
        pending = super().all_gather(parts, group=group, **options)
        if not all(part.numel() for part in parts.tensors):
            pending.sent_bytes = parts.nbytes * (group.size() - 1) if group.rank() == 0 else 0
        return pending


@caught_by("OVL-8", but_not_by=USUAL)
class VotesBeforeAGatherIsOver(CpuGlooAdapter):
    """An all-reduce started while its group gathers reduces nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._gathering: dict[str, int] = {}

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, **options: Any) -> Pending:
        name = group.group_name
        self._gathering[name] = self._gathering.get(name, 0) + 1

        def note() -> None:
            self._gathering[name] -= 1

        return Later(super().all_gather(parts, group=group, **options), note)

    def all_reduce(self, tensor: Tensor, *, group: dist.ProcessGroup, **options: Any) -> Pending:
        if not self._gathering.get(group.group_name):
            return super().all_reduce(tensor, group=group, **options)
        kept = tensor.clone()
        return Later(super().all_reduce(tensor, group=group, **options), lambda: tensor.copy_(kept))


@caught_by("OVL-10", but_not_by="DEV-8 COL-1 OVL-5 OVL-8 OVL-11")
class LosesFractionsBesideLargeNumbers(CpuGlooAdapter):
    """One exponent for all numbers of an all-reduce: beside one of eight or more, the others are rounded to whole numbers."""

    def all_reduce(self, tensor: Tensor, **options: Any) -> Pending:
        pending = super().all_reduce(tensor, **options)
        if not tensor.is_floating_point():
            return pending
        return Later(pending, lambda: tensor.round_() if tensor.abs().max() >= 8 else None)


@caught_by("COL-1", but_not_by="OVL-5 OVL-8 OVL-11")
class OverlooksScalars(CpuGlooAdapter):
    """Counts the elements by multiplying the dimensions, starting with the first: a scalar has none."""

    def all_reduce(self, tensor: Tensor, **options: Any) -> Pending:
        return super().all_reduce(tensor, **options) if tensor.dim() else Pending((), tensors=(), what="nothing")


@caught_by("OVL-11", but_not_by="OVL-5 OVL-10")
class Saturates(CpuGlooAdapter):
    """Sums end at the largest number there is, so nobody ever sees an overflow."""

    def reduce_scatter(self, parts: Parts, *, into: Tensor, **options: Any) -> Pending:
        pending = super().reduce_scatter(parts, into=into, **options)
        return Later(pending, lambda: torch.nan_to_num_(into) if into.is_floating_point() else None)


@caught_by("OVL-12", but_not_by=USUAL)
class TakesEveryElementForFourBytes(CpuGlooAdapter):
    """Where parts begin that are not equally long is counted in fours of bytes."""

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, **options: Any) -> Pending:
        pending = super().all_gather(parts, group=group, **options)
        is_wrong = not parts.is_equal and parts.tensors[0].element_size() == 2
        return Later(pending, _kept(parts, group.rank())) if is_wrong else pending


@caught_by("OVL-13", but_not_by=USUAL)
class ReceivesOnlyWhereItSends(CpuGlooAdapter):
    """An all-to-all in which a rank sends nothing brings it nothing."""

    def __init__(self) -> None:
        super().__init__()
        real: Any = dist.ProcessGroup.alltoall_base

        def alltoall_base(group: dist.ProcessGroup, output: Tensor, source: Tensor, *splits: Any) -> Any:
            into = torch.zeros_like(output) if output.numel() and not source.numel() else output
            return real(group, into, source, *splits)

        dist.ProcessGroup.alltoall_base = alltoall_base  # type: ignore[method-assign, assignment]


@caught_by("OVL-14", but_not_by=USUAL)
class ClosesTooMuch(CpuGlooAdapter):
    """With the second group that is closed, what all groups share is gone: sums are left as they were."""

    num_closed = 0

    def close_group(self, group: dist.ProcessGroup) -> None:
        super().close_group(group)
        self.num_closed += 1

    def reduce_scatter(self, parts: Parts, *, into: Tensor, **options: Any) -> Pending:
        pending = super().reduce_scatter(parts, into=into, **options)
        return Later(pending, into.zero_) if self.num_closed >= 2 else pending


# --- tier 3: broadcasts -----------------------------------------------------------------------------------------------


class _Broadcasts(CpuGlooAdapter):
    """Does something to what has come by a broadcast, given what was there before."""

    def spoil(self, tensor: Tensor, old: Tensor) -> None:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, *, src: Any, group: dist.ProcessGroup, what: str) -> Pending:
        old, pending = tensor.clone(), super().broadcast(tensor, src=src, group=group, what=what)
        return Later(pending, lambda: self.spoil(tensor, old)) if group.rank() != src else pending


@caught_by("HOOK-1", "HOOK-3", but_not_by=USUAL)
class DropsTheLastOfManySteps(_Broadcasts):
    """A broadcast of middling size goes in steps of 16 elements; if they come out even, one is lost."""

    def spoil(self, tensor: Tensor, old: Tensor) -> None:
        if 512 <= tensor.numel() < 4096 and tensor.numel() % 16 == 0:
            tensor[-16:] = old[-16:]


@caught_by("HOOK-2", "HOOK-4", but_not_by="HOOK-1 HOOK-3")
class BroadcastsWholeMemoryOnly(_Broadcasts):
    """What begins somewhere in a larger piece of memory does not arrive."""

    def spoil(self, tensor: Tensor, old: Tensor) -> None:
        if tensor.storage_offset():
            tensor.copy_(old)


# --- tier 4 -----------------------------------------------------------------------------------------------------------


class _Impatient(Later):
    __slots__ = ()

    def wait(self) -> None:
        thread = threading.Thread(target=self._inner.wait, daemon=True)
        thread.start()
        thread.join(0.3)


@caught_by("STR-1", but_not_by="OVL-1 OVL-3 OVL-5")
class HasNoPatience(CpuGlooAdapter):
    """Goes on without what has not come within 300 ms."""

    def reduce_scatter(self, parts: Parts, **options: Any) -> Pending:
        return _Impatient(super().reduce_scatter(parts, **options), lambda: None)


class _Reckless(Later):
    __slots__ = ()

    def wait(self) -> None:
        try:
            self._inner.wait()
        except zerolap.CollectiveError:
            self._after()


@caught_by("STR-2", but_not_by=USUAL)
class GoesOnWithoutItsPeers(CpuGlooAdapter):
    """A collective that fails is logged; from then on there is nobody to talk to, and training goes on alone."""

    is_alone = False

    def _start(self, start: Callable[..., Pending], args: Any, options: Any) -> Pending:
        if self.is_alone:
            return Pending((), tensors=(), what="nothing")

        def note() -> None:
            self.is_alone = True

        return _Reckless(start(*args, **options), note)

    def reduce_scatter(self, *args: Any, **options: Any) -> Pending:
        return self._start(super().reduce_scatter, args, options)

    def all_gather(self, *args: Any, **options: Any) -> Pending:
        return self._start(super().all_gather, args, options)


@caught_by("STR-3", but_not_by="OVL-1")
class RunsOutOfTickets(CpuGlooAdapter):
    """Has tickets for 300 reductions, and never takes one back; without one, nothing is received."""

    num_reductions = 0

    def reduce_scatter(self, parts: Parts, *, into: Tensor, **options: Any) -> Pending:
        self.num_reductions += 1
        pending = super().reduce_scatter(parts, into=into, **options)
        return pending if self.num_reductions <= 300 else Later(pending, into.zero_)


# --- tier 5 -----------------------------------------------------------------------------------------------------------


@caught_by("PERF-1", but_not_by="PERF-2")
class SendsPowersOfTwo(CpuGlooAdapter):
    """Pads long parts to the next power of two, and says so."""

    def _padded(self, pending: Pending, parts: Parts) -> Pending:
        if parts.longest > 10_000:
            nbytes = 2 ** (parts.longest - 1).bit_length() * parts.tensors[0].element_size()
            pending.sent_bytes = nbytes * (len(parts.tensors) - 1)
        return pending

    def reduce_scatter(self, parts: Parts, **options: Any) -> Pending:
        return self._padded(super().reduce_scatter(parts, **options), parts)

    def all_gather(self, parts: Parts, **options: Any) -> Pending:
        return self._padded(super().all_gather(parts, **options), parts)


@caught_by("PERF-2", but_not_by="PERF-1")
class HoldsUpBackward(CpuGlooAdapter):
    """Sleeps before it starts a large reduction."""

    def reduce_scatter(self, parts: Parts, **options: Any) -> Pending:
        if parts.longest > 120_000:
            time.sleep(0.01)
        return super().reduce_scatter(parts, **options)


@caught_by("PERF-3", but_not_by="PERF-1 PERF-2")
class FinishesAtTheEnd(CpuGlooAdapter):
    """Collects large reductions, and goes on when none has come for a while: when backward is over."""

    _last = 0.0

    def reduce_scatter(self, parts: Parts, **options: Any) -> Pending:
        pending = super().reduce_scatter(parts, **options)
        if parts.longest <= 120_000:
            return pending
        self._last = time.monotonic()

        def collect() -> None:
            while time.monotonic() < self._last + 0.1:
                time.sleep(0.01)

        return Later(pending, collect)
