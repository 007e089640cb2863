"""Broken adapters of a device with streams, on the simulated one. They must be caught by what they compute: on a real card there
is nobody who sees a missing wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import zerolap
import zerolap_sim
from support.breakers import caught_by
from support.stream_mutants import (
    LaneDoesNotWaitForParameters,
    LaneHandsOutFuturesTooEarly,
    LaneIgnoresItsCaller,
    LaneRunsAndForgets,
    Late,
    NobodyWaitsForTheSide,
    SideDoesNotWait,
    SideIgnoresItsCaller,
    SideRecordsTooEarly,
    SideUsesItsCallersMemory,
    UsesWhatHasNotArrived,
)
from zerolap import Capabilities, Parts, Pending
from zerolap._torch import under
from zerolap.backend.streams import StreamLane, StreamSide, _Arrived, _current


class _Sim(zerolap_sim.SimAdapter):
    """The simulated device, with lanes and sides of the given kinds."""

    lane_kind: type[StreamLane] = StreamLane
    side_kind: type[StreamSide] = StreamSide

    def __init__(self) -> None:
        zerolap_sim.install()
        super().__init__()

    def lane(self, name: str, *, device: torch.device) -> zerolap.Lane:
        return self.lane_kind(device)

    def side(self, device: torch.device) -> zerolap.Side:
        return self.side_kind(device)


# --- tier 0 -----------------------------------------------------------------------------------------------------------


@caught_by("DEV-6")
class SynchronizesOneStream(_Sim):
    def synchronize(self) -> None:
        torch.accelerator.current_stream().synchronize()


@caught_by("DEV-7")
class CutsAnywhere(_Sim):
    capabilities = Capabilities(futures_complete_at_enqueue=True, exact_cut=1, has_float64=True, one_issue_order=True)


# --- tier 1 -----------------------------------------------------------------------------------------------------------


@caught_by("LANE-4", may="LANE-2 LANE-3 LANE-5 LANE-8")
class RunsBesideItsCaller(_Sim):
    lane_kind = LaneIgnoresItsCaller


@caught_by("LANE-5", may="LANE-2 LANE-4")
class HandsOutFuturesTooEarly(_Sim):
    lane_kind = LaneHandsOutFuturesTooEarly


@caught_by("LANE-3", may="LANE-4 LANE-8")
class RunsAndForgets(_Sim):
    lane_kind = LaneRunsAndForgets


@caught_by("LANE-8")
class LeavesItsCallerTooEarly(_Sim):
    lane_kind = LaneDoesNotWaitForParameters


class _Hasty(StreamLane):
    @contextmanager
    def as_caller(self) -> Iterator[None]:
        with under(self._caller):
            yield
        self._stream.wait_stream(self._caller)


@caught_by("LANE-8")
class BecomesItsCallerTooEarly(_Sim):
    lane_kind = _Hasty


class _Selfish(StreamLane):
    @contextmanager
    def as_caller(self) -> Iterator[None]:
        yield


@caught_by("LANE-8")
class NeverBecomesItsCaller(_Sim):
    """Computes the right things, in memory that is the lane's and not the model's."""

    lane_kind = _Selfish


@caught_by("SIDE-1", may="SIDE-2")
class StartsBesideItsCaller(_Sim):
    side_kind = SideIgnoresItsCaller


@caught_by("SIDE-1", may="SIDE-2")
class ArrivesWhenItStarts(_Sim):
    side_kind = SideDoesNotWait


@caught_by("SIDE-1", may="SIDE-2")
class ArrivesTooEarly(_Sim):
    side_kind = SideRecordsTooEarly


@caught_by("SIDE-1", may="SIDE-2")
class WaitsForNoSide(_Sim):
    side_kind = NobodyWaitsForTheSide


class _ArrivedOnce(_Arrived):
    __slots__ = ("_has_waited",)

    def wait(self) -> None:
        if not hasattr(self, "_has_waited"):
            super().wait()
            self._has_waited = True


class _Forgetting(StreamSide):
    def start(self, fn: Callable[[], Pending]) -> Pending:
        pending = super().start(fn)
        assert isinstance(pending, _Arrived)
        return _ArrivedOnce(pending._event, self._device, sent_bytes=pending.sent_bytes)


@caught_by("SIDE-1")
class WaitsForOneStream(_Sim):
    """The first who waits is taken for everybody."""

    side_kind = _Forgetting


@caught_by("SIDE-2")
class UsesItsCallersMemory(_Sim):
    side_kind = SideUsesItsCallersMemory


@caught_by("TIME-1")
class LooksAtAnotherClock(_Sim):
    """Moments of a stream on which nothing happens."""

    def moment(self) -> Any:
        with torch.Stream(device=torch.device(self.device_type, 0)):
            return super().moment()


# --- tier 2 -----------------------------------------------------------------------------------------------------------


@caught_by("ORD-6", may="GRP-2 GRP-3 COL-5 COL-6 COL-9 ORD-1")
class ForgetsWhatItSends(_Sim):
    """Padding, and parts that were put together, are freed when they are on their way."""

    def reduce_scatter(self, parts: Parts, *, into: Tensor, **options: Any) -> Pending:
        pending = super().reduce_scatter(parts, into=into, **options)
        late, finish = Late(pending), pending._finish
        pending._works, pending.tensors = (), ()
        return Pending([late], tensors=(into,), what="", sent_bytes=pending.sent_bytes, finish=finish)


@caught_by("COL-9", may="COL-8 ORD-6 GRP-2")
class TakesOutWhatHasNotArrived(UsesWhatHasNotArrived, _Sim):
    """Copies parts to where they belong before they are there."""


class _Unwaited(_Sim):
    """Collectives that nobody waits for, of one kind."""

    def _drop(self, pending: Pending) -> Pending:
        self._kept = [*getattr(self, "_kept", []), pending]  # what is missing is the wait, not the memory
        return Pending((), tensors=(), what="", sent_bytes=pending.sent_bytes)


@caught_by("ORD-3", may="COL-1 COL-2 DEV-8 GRP-3 ORD-2 SIDE-1")
class DoesNotWaitForAllReduces(_Unwaited):
    def all_reduce(self, tensor: Tensor, **options: Any) -> Pending:
        return self._drop(super().all_reduce(tensor, **options))


@caught_by("ORD-3", may="COL-3 GRP-2")
class DoesNotWaitForBroadcasts(_Unwaited):
    def broadcast(self, tensor: Tensor, **options: Any) -> Pending:
        return self._drop(super().broadcast(tensor, **options))


class _Beside(_Sim):
    """Starts collectives on a stream that has not waited for their caller."""

    def _beside(self, start: Callable[..., Pending], tensors: Any, options: Any) -> Pending:
        with torch.Stream(device=torch.device(self.device_type, 0)):
            return start(tensors, **options)


@caught_by("ORD-2", may="COL-1 COL-2 DEV-8 GRP-3 ORD-3 SIDE-1")
class ReducesWhatWasThere(_Beside):
    def all_reduce(self, tensor: Tensor, **options: Any) -> Pending:
        return self._beside(super().all_reduce, tensor, options)


@caught_by("ORD-2", may="COL-4 COL-5 COL-6 COL-9 GRP-2 GRP-3 ORD-1 ORD-3 ORD-4 ORD-5 ORD-6 SIDE-2")
class ScattersWhatWasThere(_Beside):
    def reduce_scatter(self, parts: Parts, **options: Any) -> Pending:
        return self._beside(super().reduce_scatter, parts, options)


@caught_by("CAP-1")
class BlocksTheHost(_Sim):
    """Every call returns when it is done: right in everything, and nothing overlaps."""

    def __init__(self) -> None:
        super().__init__()
        zerolap_sim.configure(synchronous=True)


# --- tier 3 -----------------------------------------------------------------------------------------------------------


class _ArrivedThere(_Arrived):
    __slots__ = ("_there",)

    def wait(self) -> None:
        self._there.wait_event(self._event)


class _Bound(StreamSide):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._home = _current(device).stream_id

    def start(self, fn: Callable[[], Pending]) -> Pending:
        pending = super().start(fn)
        if _current(self._device).stream_id == self._home:
            return pending
        assert isinstance(pending, _Arrived)
        arrived = _ArrivedThere(pending._event, self._device, sent_bytes=pending.sent_bytes)
        arrived._there = _current(self._device)
        return arrived


@caught_by("OVL-2", "OVL-4", "OVL-6", but_not_by="OVL-1 OVL-3 OVL-5")
class MakesItsStarterWait(_Sim):
    """What a lane has started makes the lane wait, whoever waits for it: lazy parameters are read before they arrive."""

    side_kind = _Bound
