"""One clock for all ranks. Ranks of one host share a clock; between hosts the collectives themselves tell.

A collective can end on one rank only after it has begun on all others, and the other way round. So each one that two hosts
have both noted bounds how far their clocks are apart, from both sides; the tightest bounds of a trace count. This needs no
message between ranks: a trace can be begun by any of them, at any time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerolap.observe.timeline.record import RankTrace, TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The traces of a run's ranks, in rank order, with every moment on one clock: seconds since the first of them began."""

    traces: tuple[RankTrace, ...]
    clock: str  # how the moments of different ranks were brought together, in words
    missing: tuple[int, ...]  # ranks whose traces were not given


def merge(traces: Sequence[RankTrace]) -> Run:
    """Bring ranks' traces together; TraceError if they are not of one run, or not of the same part of it."""
    traces = sorted(traces, key=lambda trace: trace.rank)
    first = traces[0]
    for trace in traces:
        if (trace.run, trace.ranks) != (first.run, first.ranks):
            raise TraceError(f"ranks {first.rank} and {trace.rank} are of different runs; give the files of one run")
    counts = Counter(trace.rank for trace in traces)
    if twice := sorted(rank for rank, count in counts.items() if count > 1):
        raise TraceError(f"rank {twice[0]} was given twice; give one file for each rank")
    updates = {trace.rank: {span.update for span in trace.spans if span.kind == "step"} for trace in traces}
    for trace in traces:
        if updates[trace.rank] and updates[first.rank] and not updates[trace.rank] & updates[first.rank]:
            raise TraceError(
                f"ranks {first.rank} and {trace.rank} were traced at different times: updates "
                f"{_range(updates[first.rank])} and {_range(updates[trace.rank])}; trace the same steps on all ranks"
            )
    later, clock = _on_one_clock(traces)
    begins = [trace.clock.begin + later[trace.clock.host] for trace in traces]
    moved = tuple(_moved(trace, begin - min(begins)) for trace, begin in zip(traces, begins, strict=True))
    missing = tuple(rank for rank in first.ranks if rank not in updates)
    return Run(traces=moved, clock=clock, missing=missing)


def _range(numbers: set[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}"


def _moved(trace: RankTrace, later: float) -> RankTrace:
    spans = tuple(span._replace(start=span.start + later, end=span.end + later) for span in trace.spans)
    return replace(trace, spans=spans, seconds=trace.seconds + later)


def _on_one_clock(traces: Sequence[RankTrace]) -> tuple[dict[str, float], str]:
    """What must be added to each host's clock, and how it was found."""
    by_host: dict[str, list[RankTrace]] = defaultdict(list)
    for trace in traces:
        by_host[trace.clock.host].append(trace)
    reference, *others = by_host
    later = {reference: 0.0}
    if not others:
        return later, "all ranks ran on one host, and share its monotonic clock"
    widest, by_system = 0.0, []
    for host in others:
        low, high = _bounds(by_host[reference], by_host[host])
        if low <= high:
            later[host] = (low + high) / 2
            widest = max(widest, (high - low) / 2)
        else:
            ours, theirs = by_host[reference][0].clock, by_host[host][0].clock
            later[host] = (ours.begin - ours.unix) - (theirs.begin - theirs.unix)
            by_system += [str(trace.rank) for trace in by_host[host]]
    said = f"{len(by_host)} hosts, whose clocks were aligned by the collectives, to within {widest * 1e3:.2f} ms"
    if by_system:
        said += f"; ranks {', '.join(by_system)} by their system's clock, which may be off by more"
    return later, said


def _bounds(ours: Sequence[RankTrace], theirs: Sequence[RankTrace]) -> tuple[float, float]:
    """The least and the most that can be added to their clock; the least is larger if nothing can be said."""
    here, there = _collectives(ours), _collectives(theirs)
    pairs = [(here[key], there[key]) for key in here.keys() & there.keys()]
    if not pairs:
        return 1.0, 0.0
    return (
        max(our_start - their_end for (our_start, _), (_, their_end) in pairs),
        min(our_end - their_start for (_, our_end), (their_start, _) in pairs),
    )


def _collectives(traces: Sequence[RankTrace]) -> dict[tuple[str, int, int, int], tuple[float, float]]:
    """When the last rank of a host began each collective, and the first one ended it, by the host's clock."""
    found: dict[tuple[str, int, int, int], tuple[float, float]] = {}
    for trace in traces:
        counts: dict[tuple[str, int, int], int] = defaultdict(int)
        # A rank that owns nothing of a bucket may be done with it before others have begun.
        shared = {index for index, bucket in enumerate(trace.buckets) if bucket.is_shared}
        for span in trace.spans:
            if span.kind not in ("reduce", "gather") or span.bucket not in shared or span.end >= trace.seconds:
                continue
            key = (span.kind, span.bucket, span.update)
            start, end = found.get((*key, counts[key]), (float("-inf"), float("inf")))
            begin = trace.clock.begin
            found[(*key, counts[key])] = max(start, begin + span.start), min(end, begin + span.end)
            counts[key] += 1
    return found
