"""Devices with streams: lanes, sides and collectives over torch's generic streams and events. No vendor is named here.

[Note: lifetimes on streams]
A device allocator hands freed memory to the next allocation of the stream it was made on, at once: it knows nothing of other
streams that still use it. Here that never matters, because memory is freed on the stream that made it, behind the last use:

* what a collective needs beside what it is given (a cast, padding) is made and freed on a *side*, a stream that waits for
  the collective itself before it goes on;
* parameters, and what else the user may free, are made on the caller's stream (``Lane.as_caller``);
* everything the caller's stream made is used by others only until it waits for them: DDP makes it wait for every future of a
  hook at the end of backward, and ``Lane.run`` makes it wait before it returns.

[Note: order on streams]
Work is ordered by the order in which it is queued. A lane waits for its caller before it runs anything, and whoever waits for
the lane's result waits for everything before it. Events are made as ``torch.Event`` and streams as ``torch.Stream`` only: a
device's own classes do not always work with the generic ones, and some then wait for nothing without a word.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from zerolap._public import public
from zerolap._torch import all_gather_of, foreach_copy_, reduce_scatter_of, under
from zerolap.backend.base import Adapter, Moment
from zerolap.backend.lanes import Lane, Pending, Side, failed
from zerolap.backend.parts import Parts

T = TypeVar("T")

_MOST_PADDED = 1.05  # times what must be sent


def _current(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device.index)  # by number: torch looks up and compares a device every time


def _is_same(a: torch.Stream, b: torch.Stream) -> bool:
    """Streams of different classes never compare equal, even if they are the same stream."""
    return (a.stream_id, a.device_index, a.device_type) == (b.stream_id, b.device_index, b.device_type)


class StreamLane:
    """A lane that is a stream: runs what it is given at once, on the thread that gives it, behind what that thread has queued.

    Nothing waits on the host. A failure stops the lane as it stops a thread's.
    """

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self._device = device
        self._stream = torch.Stream(device=device, priority=priority)
        self._caller = _current(device)
        self._failure: BaseException | None = None

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        try:
            future: Future[T] = Future(devices=[self._device])
            self._start(fn, future)
        except BaseException as error:  # handed on to whoever waits
            return failed(error)
        return future

    def run(self, fn: Callable[[], T]) -> T:
        value = self._start(fn, None)
        _current(self._device).wait_stream(self._stream)
        return value

    def _start(self, fn: Callable[[], T], future: Future[T] | None) -> T:
        if self._failure is not None:
            raise self._failure
        if torch.is_grad_enabled():  # not in a hook of a backward: no_grad() costs as much as a small operation
            with torch.no_grad():
                return self._start(fn, future)
        self._caller = _current(self._device)
        self._stream.wait_stream(self._caller)
        try:
            with under(self._stream):
                value = fn()
                if future is not None:
                    future.set_result(value)  # under the stream: it is this stream that a waiter waits for
                return value
        except BaseException as error:
            self._failure = error
            raise

    @contextmanager
    def as_caller(self) -> Iterator[None]:
        self._caller.wait_stream(self._stream)
        with under(self._caller):
            yield
        self._stream.wait_stream(self._caller)

    def is_caller(self) -> bool:
        return _is_same(_current(self._device), self._caller)

    def close(self) -> None:
        """A stream is given back with the last reference to it."""


class _Arrived(Pending):
    """A collective that its side has waited for: any stream may wait for the side, any number of times."""

    __slots__ = ("_device", "_event")

    def __init__(self, event: torch.Event, device: torch.device, *, sent_bytes: int) -> None:
        self.sent_bytes = sent_bytes
        self._event = event
        self._device = device

    def wait(self) -> None:
        _current(self._device).wait_event(self._event)


class StreamSide:
    """A side that is a stream. See [Note: lifetimes on streams]."""

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self._device = device
        self._stream = torch.Stream(device=device, priority=priority)

    def start(self, fn: Callable[[], Pending]) -> Pending:
        self._stream.wait_stream(_current(self._device))
        with under(self._stream):
            pending = fn()
            pending.wait()
        return _Arrived(self._stream.record_event(), self._device, sent_bytes=pending.sent_bytes)


@public
class StreamAdapter(Adapter):
    """The whole of an adapter for a device with streams; a vendor's names it, and states what differs.

    Reductions are sums, scaled by whoever wants a mean: averaging is emulated, or wrong, on some backends. Collectives have
    equal parts, which every backend implements natively: parts that are nearly equal are padded. Where padding would cost more than a
    little, each part is reduced to its rank, and broadcast from there: as a ring or a tree that sends no more than must be, and
    needs no memory for what every rank sends, as all-to-all would.
    """

    lane_priority = 0  # lower runs earlier, where the device has priorities

    def __init__(self, *, device_type: str | None = None, backend: str | None = None) -> None:
        """With other names than its own the adapter runs on a device that stands in for its own, for tests."""
        self.device_type = device_type or self.device_type
        self.backend = backend or self.backend
        self._sum = dist.ReduceScatterOptions()
        self._sum.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)

    def why_unavailable(self) -> str | None:
        module = getattr(torch, self.device_type, None)
        if module is None or not callable(getattr(module, "is_available", None)):
            return f"this torch has no device type {self.device_type!r}"
        if not module.is_available():
            return f"torch.{self.device_type} finds no device"
        if not dist.is_available() or not dist.is_backend_available(self.backend):
            return f"torch.distributed has no backend {self.backend!r}"
        return None

    def diagnose(self) -> list[str]:
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        module = getattr(torch, self.device_type, None)
        if module is None or not self.is_available() or module.device_count() >= num_ranks:
            return []
        return [
            f"{num_ranks} ranks on this host share {module.device_count()} devices; collectives need one device a rank"
        ]

    def lane(self, name: str, *, device: torch.device) -> Lane:
        return StreamLane(device, priority=self.lane_priority)

    def side(self, device: torch.device) -> Side:
        return StreamSide(device, priority=self.lane_priority)

    def check_group(self, group: dist.ProcessGroup) -> None:
        config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
        backend = config.get_device_backend_map().get(self.device_type)
        if backend != self.backend:
            raise ValueError(
                f"adapter {self.name!r} needs a process group with backend {self.backend!r} for {self.device_type!r}, this one "
                f"has {backend!r}; make it by init_process_group({self.backend!r}) or new_group(backend={self.backend!r})"
            )

    def close_group(self, group: dist.ProcessGroup) -> None:
        self.synchronize()  # what is under way needs the group, and the host has not waited for any of it
        group.shutdown()

    def moment(self) -> Moment:
        event = torch.Event(device=torch.device(self.device_type), enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Moment, end: Moment) -> float:
        first, second = cast(torch.Event, start), cast(torch.Event, end)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1000

    def reduce_scatter(self, parts: Parts, *, into: Tensor, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        finish = None
        if _padded_share(parts) > _MOST_PADDED:
            return super().reduce_scatter(parts, into=into, group=group, tag=tag, what=what)
        if parts.whole is not None and parts.is_equal:
            out, sent = into, parts.whole
        else:
            sent = into.new_empty(parts.longest * len(parts.tensors))
            foreach_copy_(_rows(sent, parts), parts.tensors)
            out = into if into.numel() == parts.longest else into.new_empty(parts.longest)
            if out is not into:

                def finish() -> None:
                    into.copy_(out[: into.numel()])

        works = [reduce_scatter_of(group)(out, sent, self._sum)] if parts.longest else ()
        sent_bytes = parts.longest_nbytes * (len(parts.tensors) - 1)
        return Pending(works, tensors=(parts, sent, out, into), what=what, sent_bytes=sent_bytes, finish=finish)

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        own, finish = parts.tensors[group.rank()], None
        if _padded_share(parts) > _MOST_PADDED:
            return super().all_gather(parts, group=group, tag=tag, what=what)
        if parts.whole is not None and parts.is_equal:
            received = parts.whole
        else:
            mine = own
            if mine.numel() != parts.longest:
                own = mine.new_empty(parts.longest)
                own[: mine.numel()].copy_(mine)
            received = mine.new_empty(parts.longest * len(parts.tensors))

            def finish() -> None:
                foreach_copy_(parts.tensors, _rows(received, parts))

        works = [all_gather_of(group)(received, own)] if parts.longest else ()
        sent_bytes = parts.longest_nbytes * (len(parts.tensors) - 1)
        return Pending(works, tensors=(parts, own, received), what=what, sent_bytes=sent_bytes, finish=finish)


def _padded_share(parts: Parts) -> float:
    """What is sent if all parts are as long as the longest, by what must be."""
    return parts.longest_nbytes * len(parts.tensors) / max(1, parts.nbytes)


def _rows(padded: Tensor, parts: Parts) -> list[Tensor]:
    """Where each part lies in memory in which all are equally long."""
    starts = range(0, padded.numel(), parts.longest)
    return [padded[start : start + part.numel()] for start, part in zip(starts, parts.tensors, strict=True)]
