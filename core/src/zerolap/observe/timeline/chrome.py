"""A run as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open: a process for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zerolap.observe.timeline.clocks import Run
from zerolap.observe.timeline.record import BLOCKED, PHASES, READY, STEP, USE, RankTrace, Span
from zerolap.observe.timeline.verdict import judge_sums, sums_of

LANES = ("training", "reduce", "step", "gather", "exposed")
_LANE_OF = (
    dict.fromkeys((*PHASES, READY, BLOCKED, USE), "training")
    | dict.fromkeys(("reduce", "agree", "check"), "reduce")
    | {STEP: "step", "migrate": "step", "gather": "gather"}
)
_MAX_TRACKS = 1000  # of a lane, in a process's thread ids


def to_chrome(run: Run) -> dict[str, Any]:
    """The run as JSON data; moments are microseconds since the first rank's trace began."""
    sums = {trace.rank: sums_of(trace) for trace in run.traces}
    events: list[dict[str, Any]] = []
    for trace in run.traces:
        exposed = [
            Span(f"waits for {kind or 'communication'}", bucket, start, end, 0, where)
            for start, end, kind, bucket, where, _ in sums[trace.rank].exposed
        ]
        events.append(_named("process_name", trace.rank, 0, f"rank {trace.rank}"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": trace.rank, "args": {"sort_index": trace.rank}})
        for place, lane in enumerate(LANES):
            spans = exposed if lane == "exposed" else [span for span in trace.spans if _LANE_OF.get(span.kind) == lane]
            for track, members in enumerate(tracks(spans)):
                thread = place * _MAX_TRACKS + track
                events.append(_named("thread_name", trace.rank, thread, f"{lane} {track + 1}" if track else lane))
                events += _events(trace, thread, members)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"verdict": str(judge_sums(run.traces, sums)), "clock": run.clock},
    }


def tracks(spans: Sequence[Span]) -> list[list[Span]]:
    """Split spans so that on one track each ends before the next begins, or contains it."""
    found: list[list[Span]] = []
    stacks: list[list[float]] = []  # for each track, the ends of what is open
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for stack in stacks:
            while stack and stack[-1] <= span.start:
                stack.pop()
        nests = _LANE_OF.get(span.kind) == "training"
        fitting = (i for i, stack in enumerate(stacks) if not stack or (nests and span.end <= stack[-1]))
        place = next(fitting, min(len(stacks), _MAX_TRACKS - 1))
        if place == len(stacks):
            found.append([])
            stacks.append([])
        found[place].append(span)
        stacks[place].append(span.end)
    return found


def _events(trace: RankTrace, thread: int, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    for span in spans:
        name = span.kind if span.bucket is None else f"{span.kind} {span.bucket}"
        event: dict[str, Any] = {
            "name": name if span.name is None else f"{name}: {span.name}",
            "cat": "zerolap",
            "pid": trace.rank,
            "tid": thread,
            "ts": round(span.start * 1e6, 3),
            "args": {"update": span.update},
        }
        if span.bucket is not None and span.bucket < len(trace.buckets):
            bucket = trace.buckets[span.bucket]
            event["args"] |= {"bytes": bucket.num_bytes, "parameters": ", ".join(bucket.params[:5])}
        if span.kind == READY:
            yield event | {"ph": "i", "s": "t"}
        else:
            yield event | {"ph": "X", "dur": round((span.end - span.start) * 1e6, 3)}


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}
