"""Traces: what an attached optimizer did, and when. Nothing here knows how a moment is measured, or what it means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

Moment = object  # as the adapter takes it: a number on host devices, a timed event on streams


class Span(NamedTuple):
    """Something that took time. ``bucket`` is None where it concerns all of them."""

    kind: str  # "ready" (no length: the gradients were computed), a verb of the machine in lower case, or "use"
    bucket: int | None
    start: float  # seconds since the trace began
    end: float


class Trace:
    """Collects moments while it is on; they become spans when asked for, so that nothing waits for a device meanwhile."""

    def __init__(self, now: Callable[[], Moment], seconds_between: Callable[[Moment, Moment], float]) -> None:
        self._now = now
        self._seconds_between = seconds_between
        self._begin = now()
        self._taken: list[tuple[str, int | None, Moment, Moment]] = []

    def mark(self, kind: str, bucket: int | None) -> None:
        moment = self._now()
        self._taken.append((kind, bucket, moment, moment))

    @contextmanager
    def span(self, kind: str, bucket: int | None) -> Iterator[None]:
        start = self._now()
        yield
        self._taken.append((kind, bucket, start, self._now()))

    @property
    def spans(self) -> list[Span]:
        """What happened so far, in the order in which it ended. Waits for the device."""
        since = self._seconds_between
        return [
            Span(kind, bucket, since(self._begin, start), since(self._begin, end))
            for kind, bucket, start, end in list(self._taken)
        ]
