"""The verdict: how much of the communication was hidden, by arithmetic on the spans of one rank or many. Nothing is drawn here.

* Communication is under way from its start until it was seen to be done; several collectives at once count once.
* Training is blocked where the training thread, or its stream, waited for zerolap.
* Where it was blocked and a shard was just being updated, it waited for the update.
* Where it was blocked otherwise, and communication was under way, that is *exposed*. The rest of communication is hidden.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from zerolap._public import public
from zerolap.observe.timeline.record import BLOCKED, COMMUNICATION, STEP, USE, WAIT, RankTrace, Span

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, in order and without overlaps; empty ones are left out."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def both(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The time in both of two unions."""
    shared, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            shared.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return shared


def without(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The time in the first of two unions that is not in the second."""
    edges = [-math.inf, *(edge for interval in b for edge in interval), math.inf]
    return both(a, [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end])


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


class ExposedTime(NamedTuple):
    """Exposed time of one rank, and what it was spent on. ``kind`` is None if no single collective is to blame."""

    start: float
    end: float
    kind: str | None
    bucket: int | None
    where: str
    update: int


class Sums(NamedTuple):
    """One rank's times: of communication, of the exposed part of it, and of updates that training waited for."""

    communication: list[Interval]
    exposed: list[ExposedTime]
    held_up: list[Interval]
    num_updates: int


def sums_of(trace: RankTrace) -> Sums:
    """What of one rank's communication was hidden, within the time of the trace."""
    spans = [span._replace(end=min(span.end, trace.seconds)) for span in trace.spans if span.start < trace.seconds]
    by_kind: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_kind[span.kind].append(span)
    communication = union(_times(span for kind in COMMUNICATION for span in by_kind[kind]))
    stepping = union(_times(by_kind[STEP]))
    blocked = sorted(by_kind[BLOCKED], key=lambda span: span.start)
    exposed, left = [], union(_times(blocked + by_kind[USE]))
    held_up = both(left, stepping)
    left = both(without(left, stepping), communication)
    for culprit, where in _culprits(by_kind, blocked):
        kind = culprit.name if culprit.kind == WAIT else "gather" if culprit.kind == USE else culprit.kind
        found = _taken_from(left, culprit.start, culprit.end)
        exposed += [ExposedTime(start, end, kind, culprit.bucket, where, culprit.update) for start, end in found]
    exposed += [ExposedTime(start, end, None, None, _where(start, blocked), 0) for start, end in left]
    return Sums(communication, sorted(exposed), held_up, len({span.update for span in by_kind[STEP]}))


def _taken_from(left: list[Interval], start: float, end: float) -> list[Interval]:
    """Cut a stretch of time out of a union, in place; returns what was there."""
    first = bisect_right(left, (start, math.inf))
    if first and left[first - 1][1] > start:
        first -= 1
    last = bisect_left(left, (end, -math.inf))
    taken = both(left[first:last], [(start, end)]) if start < end else []
    if taken:
        left[first:last] = without(left[first:last], [(start, end)])
    return taken


def _culprits(by_kind: Mapping[str, list[Span]], blocked: Sequence[Span]) -> list[tuple[Span, str]]:
    """What was waited for, each with where training stood; a first use names itself, the rest is what the lane was at."""
    named = [(span, f"first used by `{span.name}`" if span.name else "waited for by name") for span in by_kind[USE]]
    on_lane = by_kind[WAIT] + by_kind["agree"] + by_kind["migrate"] + by_kind["check"]
    return named + [(span, _where(span.end, blocked)) for span in on_lane if span.start < span.end]


def _where(moment: float, blocked: Sequence[Span]) -> str:
    """Where training stood at a moment; ``blocked`` is in order, and never twice at once."""
    place = bisect_right(blocked, moment, key=lambda span: span.start) - 1
    name = blocked[place].name if place >= 0 and moment <= blocked[place].end else None
    return f"{name or 'training'} waits for it"


def _times(spans: Iterable[Span]) -> Iterable[Interval]:
    return ((span.start, span.end) for span in spans)


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """A collective that training had to wait for, over all ranks and updates."""

    kind: str | None
    bucket: int | None
    where: str
    milliseconds_per_update: float  # on the average of ranks
    worst_rank: int

    @property
    def what(self) -> str:
        if self.kind is None:
            return "communication at large"
        return f"bucket {self.bucket}'s {self.kind}" if self.bucket is not None else _SAID.get(self.kind, self.kind)


_SAID = {"migrate": "moving states to their owners", "check": "what all ranks had to agree on", "agree": "agreeing"}


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How much of the communication was hidden. Times are milliseconds per update, on the average of ranks."""

    hidden_percent: float | None  # None if there was no communication
    communication_ms: float
    exposed_ms: float
    late_ms: float | None  # the part of it that other ranks had not begun yet; None unless all ranks' traces are there
    update_ms: float  # training waited for updates of shards
    num_updates: int
    hidden_percent_by_rank: dict[int, float | None]
    exposures: list[Exposure]  # the longest first

    def __str__(self) -> str:
        if self.hidden_percent is None:
            return "there was no communication in this trace"
        said = f"{math.floor(self.hidden_percent)} % of communication hidden"
        if self.exposures:
            said += f"; {self.worst}"
        if self.update_ms > max(self.exposed_ms, 0.05 * self.communication_ms):
            said += f"; training waits {format_ms(self.update_ms)} an update for shards to be updated"
        return said

    @property
    def worst(self) -> str:
        """What shows most, in words; nothing if all is hidden."""
        if not self.exposures:
            return ""
        worst = self.exposures[0]
        much = format_ms(worst.milliseconds_per_update)
        if worst.milliseconds_per_update >= self.exposed_ms / 3:
            return f"{worst.what} exposes {much} an update: {worst.where}"
        return f"{format_ms(self.exposed_ms)} an update exposed, most by {worst.what}, {much}: {worst.where}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": str(self)}


def format_ms(milliseconds: float) -> str:
    digits = 0 if milliseconds >= 10 else 1 if milliseconds >= 1 else 2
    return f"{milliseconds:.{digits}f} ms"


def judge(traces: Sequence[RankTrace]) -> Verdict:
    """The verdict on all ranks' traces together, on one clock, or on one."""
    return judge_sums(traces, {trace.rank: sums_of(trace) for trace in traces})


def judge_sums(traces: Sequence[RankTrace], sums: Mapping[int, Sums]) -> Verdict:
    num_updates = max((each.num_updates for each in sums.values()), default=0)
    share = 1e3 / max(1, num_updates) / max(1, len(sums))
    by_rank, found = {}, defaultdict[tuple[str | None, int | None, str], dict[int, float]](lambda: defaultdict(float))
    communication = exposed = held_up = 0.0
    for rank, each in sums.items():
        total, open_ = length(each.communication), sum(part.end - part.start for part in each.exposed)
        by_rank[rank] = 100 * (1 - open_ / total) if total else None
        communication, exposed, held_up = communication + total, exposed + open_, held_up + length(each.held_up)
        for part in each.exposed:
            found[part.kind, part.bucket, part.where][rank] += part.end - part.start
    exposures = [
        Exposure(
            kind=kind,
            bucket=bucket,
            where=where,
            milliseconds_per_update=sum(of_ranks.values()) * share,
            worst_rank=max(of_ranks, key=lambda rank: of_ranks[rank]),
        )
        for (kind, bucket, where), of_ranks in found.items()
    ]
    return Verdict(
        hidden_percent=100 * (1 - exposed / communication) if communication else None,
        communication_ms=communication * share,
        exposed_ms=exposed * share,
        late_ms=_seconds_late(traces, sums) * share if len(traces) == len(traces[0].ranks) > 1 else None,
        update_ms=held_up * share,
        num_updates=num_updates,
        hidden_percent_by_rank=by_rank,
        # What no collective is to blame for comes last: it says least.
        exposures=sorted(exposures, key=lambda each: (each.kind is None, -each.milliseconds_per_update)),
    )


def _seconds_late(traces: Sequence[RankTrace], sums: Mapping[int, Sums]) -> float:
    """Exposed time in which a collective could not go on, for some rank had not begun it."""
    begun: dict[tuple[str | None, int | None, int], float] = defaultdict(float)
    for trace in traces:
        mine: dict[tuple[str | None, int | None, int], float] = {}
        for span in trace.spans:
            if span.kind in ("reduce", "gather"):
                mine.setdefault((span.kind, span.bucket, span.update), span.start)
        for key, start in mine.items():
            begun[key] = max(begun[key], start)
    exposed = (part for each in sums.values() for part in each.exposed)
    return sum(
        max(0.0, min(part.end, begun.get((part.kind, part.bucket, part.update), 0.0)) - part.start) for part in exposed
    )
