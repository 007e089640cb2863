"""Traces: what an attached optimizer did, and when. Nothing here knows how a moment is measured, or what it means."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from zerolap._public import public
from zerolap.backend.base import Moment
from zerolap.backend.lanes import Pending, Side, ThreadLane, Waiter
from zerolap.observe.timeline.record import HostClock, RankTrace, Span, write
from zerolap.observe.timeline.verdict import Verdict, judge


class Timer(Protocol):
    """What is needed of an adapter."""

    def moment(self) -> Moment: ...

    def seconds_between(self, start: Moment, end: Moment) -> float: ...

    def synchronize(self) -> None: ...


class Noted:
    """A span whose end may not be known yet. ``cut`` is a moment at which it ends at the latest."""

    __slots__ = ("bucket", "cut", "end", "kind", "name", "start", "update")

    def __init__(self, kind: str, bucket: int | None, start: Moment | None, update: int, name: str | None) -> None:
        self.kind = kind
        self.bucket = bucket
        self.start = start
        self.end: Moment | None = None
        self.cut: Moment | None = None
        self.update = update
        self.name = name


class _Seen(Pending):
    """A collective whose end is noted by whoever sees it first. The second one finds it done, or failed, and does not wait."""

    __slots__ = ("_error", "_inner", "_lock", "_note_end")

    def __init__(self, inner: Pending, note_end: Callable[[], None]) -> None:
        self.sent_bytes = inner.sent_bytes
        self._inner: Pending | None = inner
        self._note_end = note_end
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def wait(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._inner is None:
                return
            try:
                self._inner.wait()
            except Exception as error:
                self._error = error
                raise
            self._note_end()
            self._inner = None

    def look(self) -> None:
        """Wait, but leave an error to those who need the result."""
        if self._lock.acquire(blocking=False):  # or somebody waits already
            self._lock.release()
            try:
                self.wait()
            except Exception:  # kept: it is raised where it belongs
                return


class _SeenWaiter(Waiter[Tensor]):
    """The same for a future."""

    def __init__(self, inner: Waiter[Tensor], note_end: Callable[[], None]) -> None:
        self._inner = inner
        self._note_end = note_end

    def wait(self, timeout: float) -> Tensor:
        value = self._inner.wait(timeout)
        self._note_end()
        return value


class Recorder:
    """Collects moments while it is on; they become spans when asked for, so that nothing waits for a device meanwhile."""

    def __init__(self, timer: Timer, *, names: Mapping[Tensor, str], has_witness: bool) -> None:
        """With a witness a thread waits for every gather: for where nothing else tells when one is done, and nobody needs it yet."""
        self._timer = timer
        self._now = timer.moment
        self._names = names
        self._witness = ThreadLane("witness") if has_witness else None
        self._noted: list[Noted] = []
        self._end: Moment | None = None
        self.update = 0  # the one at hand, counted by the engine
        timer.synchronize()  # so that the first moment is now, whatever the device has left to do
        self._begin = timer.moment()
        self.clock = HostClock(host=_host(), begin=time.perf_counter(), unix=time.time())

    def begin(self, kind: str, bucket: int | None = None, *, name: str | None = None, ahead: int = 0) -> Noted:
        """Something begins that is part of the update at hand, or of one ahead."""
        noted = Noted(kind, bucket, self._now(), self.update + ahead, name)
        self._noted.append(noted)
        return noted

    def end(self, noted: Noted, cut: Moment | None = None) -> None:
        noted.end, noted.cut = self._now(), cut

    def mark(self, kind: str, bucket: int | None) -> None:
        noted = self.begin(kind, bucket)
        noted.end = noted.start

    def moment(self) -> Moment:
        return self._now()

    def name_of(self, param: Tensor | None) -> str | None:
        """The module that a parameter belongs to, or the parameter itself if that is the whole model."""
        name = None if param is None else self._names.get(param)
        return name and (name.rpartition(".")[0] or name)

    def start(self, kind: str, bucket: int, side: Side, fn: Callable[[], Pending]) -> Pending:
        """Start a collective on a side; its span begins and ends there."""
        noted = Noted(kind, bucket, None, self.update, None)

        def begin() -> Pending:
            noted.start = self._now()
            self._noted.append(noted)
            return _Seen(fn(), lambda: self.end(noted))

        pending = side.start(begin)
        if self._witness is not None and kind == "gather" and isinstance(pending, _Seen):
            self._witness.submit(pending.look)
        return pending

    def reducing(self, bucket: int, start: Callable[[], Waiter[Tensor]]) -> Waiter[Tensor]:
        """Start a reduction that has no side; it has ended when the lane has seen it end."""
        noted = self.begin("reduce", bucket)
        return _SeenWaiter(start(), lambda: self.end(noted))

    def close(self) -> None:
        """The trace is over; what ends later was still under way."""
        self._end = self._now()
        if self._witness is not None:
            self._witness.close()

    @property
    def is_on(self) -> bool:
        return self._end is None

    def spans_until(self, seconds: float) -> list[Span]:
        """What happened before, in the order in which it began. Waits for the device."""
        since = self._timer.seconds_between
        spans = []
        for noted in list(self._noted):
            start = since(self._begin, noted.start)
            end = seconds if noted.end is None else since(self._begin, noted.end)
            if noted.cut is not None:
                end = min(end, since(self._begin, noted.cut))
            if start <= seconds:  # streams may be ahead of one that the trace ended on
                spans.append(
                    Span(
                        noted.kind,
                        noted.bucket,
                        max(0.0, start),
                        max(0.0, start, min(end, seconds)),
                        noted.update,
                        noted.name,
                    )
                )
        return sorted(spans, key=lambda span: span.start)

    @property
    def seconds(self) -> float:
        """How long it has lasted. Waits for the device."""
        return self._timer.seconds_between(self._begin, self._now() if self._end is None else self._end)


@public
class Trace:
    """What was noted, of this rank. Whatever is asked for waits for the device; during a trace better nothing is."""

    def __init__(self, recorder: Recorder, facts: Callable[[], RankTrace]) -> None:
        self._recorder = recorder
        self._facts = facts  # all but the times

    @property
    def spans(self) -> list[Span]:
        """What happened so far, in the order in which it began."""
        return self._recorder.spans_until(self._recorder.seconds)

    def _record(self) -> RankTrace:
        """All of it, as plain data."""
        recorder, seconds = self._recorder, self._recorder.seconds
        spans = tuple(recorder.spans_until(seconds))
        return replace(self._facts(), clock=recorder.clock, seconds=seconds, spans=spans)

    def verdict(self) -> Verdict:
        """How much of this rank's communication was hidden."""
        return judge([self._record()])

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``rankN.json`` there, whole or not at all; ``zerolap trace`` brings the ranks together."""
        return write(self._record(), folder)


def _host() -> str:
    """What all processes that share this process's clock call it, and no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
