"""What ``auto`` makes of a trace before it tries another bucket size: a forecast for each. No tensors, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from zerolap.forecast.forecast import Compute, Link, forecast
from zerolap.forecast.simulator import one_stage
from zerolap.forecast.workload import FIRST_BUCKET_BYTES, MB, Param, Workload, bucketize, traffic_of
from zerolap.observe.timeline.record import Span
from zerolap.observe.timeline.verdict import length, union
from zerolap.schedule.machine import Gather, Schedule
from zerolap.schedule.ownership import Layout

_HOST_SECONDS_PER_BUCKET = 2e-4  # about what a bucket costs where streams do the work; with messages it is more
_MAX_BUCKETS = 512  # more take long to forecast, and a machine that needs them has none of the sizes tried here


class Profile(NamedTuple):
    """What a rank's step is made of. Times are seconds; those of buckets are shares of backward's."""

    forward: float
    backward: float
    ready_at: list[float]
    step_seconds_per_element: float
    bytes_per_second: float
    latency: float


def profile(spans: Sequence[Span], workload: Workload, *, world_size: int) -> Profile | None:
    """From the spans of some steps that were trained in the workload's buckets; None if they do not tell."""
    traffic = traffic_of(workload, world_size)
    iterations = [_iteration([s for s in spans if s.update == update]) for update in {s.update for s in spans}]
    whole = [each for each in iterations if each is not None and len(each.ready_at) == len(traffic)]
    exchanges = [
        (traffic[span.bucket].reduce_bytes if span.kind == "reduce" else traffic[span.bucket].gather_bytes, span)
        for span in spans
        if span.kind in ("reduce", "gather") and span.bucket is not None and span.bucket < len(traffic)
    ]
    under_way = length(union((span.start, span.end) for _, span in exchanges))
    if not whole or not under_way:
        return None
    rate = sum(num_bytes for num_bytes, _ in exchanges) / under_way
    return Profile(
        forward=statistics.median(each.forward for each in whole),
        backward=statistics.median(each.backward for each in whole),
        ready_at=[statistics.median(shares) for shares in zip(*(each.ready_at for each in whole), strict=True)],
        step_seconds_per_element=statistics.median(each.updating for each in whole)
        / max(1, sum(bucket.updated for bucket in traffic)),
        bytes_per_second=rate,
        latency=max(0.0, min(span.end - span.start - num_bytes / rate for num_bytes, span in exchanges)),
    )


class _Iteration(NamedTuple):
    forward: float
    backward: float
    ready_at: list[float]
    updating: float


def _iteration(spans: list[Span]) -> _Iteration | None:
    """One update's: its last forward and backward, if gradients were accumulated before."""
    ready = sorted((span.bucket, span.start) for span in spans if span.kind == "ready" and span.bucket is not None)
    if not ready:
        return None
    end = max(moment for _, moment in ready)
    begins = [span.start for span in spans if span.kind == "backward" and span.start <= end]
    forwards = [span for span in spans if span.kind == "forward" and begins and span.end <= max(begins)]
    if not forwards or end <= max(begins):
        return None
    begin, forward = max(begins), max(forwards, key=lambda span: span.start)
    waited = sum(s.end - s.start for s in spans if s.kind == "use" and forward.start <= s.start <= forward.end)
    return _Iteration(
        forward=max(0.0, forward.end - forward.start - waited),
        backward=end - begin,
        ready_at=[min(1.0, max(0.0, (moment - begin) / (end - begin))) for _, moment in ready],
        updating=sum(span.end - span.start for span in spans if span.kind == "step"),
    )


def common_profile(profiles: Sequence[Profile]) -> Profile:
    """One for all ranks: the slowest's, over a link as fast as any rank has seen it; the others' spans hold waiting for that rank."""
    slowest = max(profiles, key=lambda each: each.forward + each.backward)
    return slowest._replace(
        bytes_per_second=max(each.bytes_per_second for each in profiles),
        latency=min(each.latency for each in profiles),
    )


def seconds_by_size(
    profile: Profile,
    workload: Workload,
    sizes_mb: Iterable[float],
    *,
    ways: Sequence[tuple[Schedule, Gather]],
    world_size: int,
    stage_sizes: Callable[[int], tuple[int, ...]] = one_stage,
) -> dict[float, float]:
    """A step's time with buckets of each size, in the best of these ways; once only for sizes that make the same buckets."""
    params = _spread(workload, profile.ready_at)
    link = Link(bytes_per_second=profile.bytes_per_second, latency=profile.latency, stage_sizes=stage_sizes)
    compute = Compute(
        forward=profile.forward,
        backward=profile.backward,
        step_seconds_per_element=profile.step_seconds_per_element,
        host_seconds_per_bucket=_HOST_SECONDS_PER_BUCKET,
    )
    found: dict[float, float] = {}
    seen: set[Layout] = set()
    for size in sizes_mb:
        cap = int(size * MB)
        layout = bucketize(params, cap_bytes=cap, first_bytes=min(cap, FIRST_BUCKET_BYTES))
        if layout in seen or len(layout) > _MAX_BUCKETS:
            continue
        seen.add(layout)
        other = Workload(
            params=params,
            layout=layout,
            reduce_itemsize=workload.reduce_itemsize,
            gather_itemsize=workload.gather_itemsize,
            wire=workload.wire,
        )
        found[size] = min(
            forecast(
                other, world_size=world_size, link=link, compute=compute, schedule=schedule, gather=gather
            ).step_seconds
            for schedule, gather in ways
        )
    return found


def _spread(workload: Workload, ready_at: Sequence[float]) -> tuple[Param, ...]:
    """Each parameter's own time: those of a bucket come one after the other, and forward uses them the other way round."""
    params, begin = list(workload.params), 0.0
    for slots, end in zip(workload.layout, ready_at, strict=True):
        done = list(accumulate(slot.numel for slot in slots))
        for slot, so_far in zip(slots, done, strict=True):
            at = begin + (end - begin) * so_far / max(1, done[-1])
            params[slot.param] = params[slot.param]._replace(ready_at=at, used_at=1 - at)
        begin = end
    return tuple(params)
