"""Traces made by hand: runs of any size, for the arithmetic and the pictures of traces. No torch."""

from __future__ import annotations

import random
from collections.abc import Sequence

from zerolap.observe.timeline import Bucket, HostClock, RankTrace, Span


def trace_of(spans: Sequence[Span], *, rank: int = 0, num_ranks: int = 1, seconds: float = 100.0) -> RankTrace:
    """A trace with these spans."""
    return RankTrace(
        rank=rank,
        ranks=tuple(range(num_ranks)),
        run="a run",
        clock=HostClock(host="a host", begin=1000.0, unix=1.7e9),
        seconds=seconds,
        spans=tuple(spans),
        buckets=tuple(
            Bucket(num_bytes=2**20 * (1 + i), params=(f"blocks.{i}.weight", f"blocks.{i}.bias"), is_shared=True)
            for i in range(1 + max((span.bucket or 0 for span in spans), default=0))
        ),
        about={"schedule": "interleaved", "gather": "lazy", "adapter": "made up", "device": "none", "torch": "none"},
    )


def run_of(num_ranks: int, num_buckets: int, num_updates: int, *, seed: int = 0) -> list[RankTrace]:
    """A run such as interleaved updates and lazy gathers give, with ranks of slightly different speed."""
    chance = random.Random(seed)
    compute, wire, update = 1.2e-3, 0.9e-3, 0.15e-3  # seconds for a bucket
    traces, begin = [], [0.0] * num_ranks
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    for number in range(1, num_updates + 1):
        ready = []
        for rank in range(num_ranks):
            forward = begin[rank] + num_buckets * compute / 2 * chance.uniform(0.95, 1.15)
            spans[rank].append(Span("forward", None, begin[rank], forward, number))
            at = [forward + 2e-4]
            for _ in range(num_buckets):
                at.append(at[-1] + compute * chance.uniform(0.8, 1.3))
            spans[rank].append(Span("backward", None, forward + 2e-4, at[-1], number))
            ready.append(at)
        done = [0.0] * num_ranks
        for bucket in range(num_buckets):
            # A collective ends where it has begun everywhere.
            latest = max(at[bucket + 1] for at in ready)
            reduced = [max(latest, before) + wire * chance.uniform(0.6, 1.4) for before in done]
            done = [end + update for end in reduced]
            for rank, at in enumerate(ready):
                start, end, stepped = at[bucket + 1], reduced[rank], done[rank]
                gathered = max(done) + wire * chance.uniform(0.6, 1.6)
                spans[rank] += [
                    Span("ready", bucket, start, start, number),
                    Span("reduce", bucket, start, end, number),
                    Span("wait", bucket, max(start, end - wire), end, number, "reduce"),
                    Span("step", bucket, end, stepped, number),
                    Span("gather", bucket, stepped, gathered, number),
                    Span("use", bucket, gathered + 2e-3, gathered + 2e-3, number, f"blocks.{bucket}"),
                ]
        for rank, at in enumerate(ready):
            spans[rank].append(Span("blocked", None, at[-1], done[rank], number, "backward's end"))
            begin[rank] = max(at[-1], done[rank]) + 5e-4
    for rank in range(num_ranks):
        own = sorted(spans[rank], key=lambda span: span.start)
        traces.append(trace_of(own, rank=rank, num_ranks=num_ranks, seconds=max(begin)))
    return traces
