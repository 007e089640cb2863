"""What ``auto`` foresees: a profile from spans, and a forecast for other bucket sizes."""

from __future__ import annotations

import pytest

from zerolap.forecast.bucket_sizes import Profile, common_profile, profile, seconds_by_size
from zerolap.forecast.workload import Param, Workload
from zerolap.observe.timeline import Span
from zerolap.schedule.machine import Gather, Schedule
from zerolap.schedule.ownership import Slot

MB = 2**20
WAYS = [(Schedule.INTERLEAVED, Gather.EAGER), (Schedule.AFTER_BACKWARD, Gather.LAZY)]


def _workload(num_params: int, params_in_bucket: int) -> Workload:
    slots = [Slot(i, MB // 4) for i in range(num_params)]
    layout = tuple(tuple(slots[i : i + params_in_bucket]) for i in range(0, num_params, params_in_bucket))
    return Workload(params=(Param(MB // 4),) * num_params, layout=layout)


def _step(update: int, at: float) -> list[Span]:
    """Forward of 1 s, half of it waiting, backward of 2 s with two buckets, each of which takes half a second each way."""
    return [
        Span("forward", None, at, at + 1, update),
        Span("use", 1, at + 0.2, at + 0.7, update, "layer"),
        Span("backward", None, at + 1, at + 3.9, update),
        Span("ready", 0, at + 2, at + 2, update),
        Span("reduce", 0, at + 2, at + 2.5, update),
        Span("step", 0, at + 2.5, at + 2.6, update),
        Span("ready", 1, at + 3, at + 3, update),
        Span("reduce", 1, at + 3, at + 3.5, update),
        Span("step", 1, at + 3.5, at + 3.6, update),
        Span("gather", 0, at + 3.4, at + 3.9, update),
        Span("gather", 1, at + 3.4, at + 3.9, update),
    ]


def test_a_profile_is_what_the_spans_say() -> None:
    workload = _workload(4, 2)
    found = profile([*_step(3, 0.0), *_step(4, 5.0)], workload, world_size=2)
    assert found is not None
    assert found.forward == pytest.approx(0.5), "waiting is not computing"
    assert found.backward == pytest.approx(2.0), "until the last gradient is ready"
    assert found.ready_at == pytest.approx([0.5, 1.0])
    assert found.step_seconds_per_element == pytest.approx(0.2 / (2 * MB / 4))
    # 1 MB for each of four exchanges in 0.5 + 0.9 s
    assert found.bytes_per_second == pytest.approx(4 * MB / 1.4)


@pytest.mark.parametrize("missing", ["forward", "backward", "ready", "reduce"])
def test_what_the_spans_do_not_say_is_not_guessed(missing: str) -> None:
    spans = [span for span in _step(3, 0.0) if span.kind != missing and span.kind != "gather"]
    assert profile(spans, _workload(4, 2), world_size=2) is None


def test_the_slowest_rank_and_the_fastest_link_count() -> None:
    slow = Profile(1.0, 2.0, [1.0], 1e-9, 1e8, 1e-3)
    fast = Profile(0.5, 1.0, [1.0], 1e-9, 2e8, 2e-3)
    assert common_profile([fast, slow]) == slow._replace(bytes_per_second=2e8)


def test_a_slow_link_asks_for_smaller_buckets_and_many_tiny_ones_cost_more() -> None:
    workload = _workload(100, 25)
    even = Profile(0.2, 0.4, [0.25, 0.5, 0.75, 1.0], 1e-10, 2e8, 0.0)
    slow = seconds_by_size(even, workload, [50.0, 25.0, 5.0], ways=WAYS, world_size=2)
    assert slow[5.0] < slow[25.0] < slow[50.0]
    fast = seconds_by_size(even._replace(bytes_per_second=1e11), workload, [25.0, 1.0], ways=WAYS, world_size=2)
    assert fast[25.0] < fast[1.0]


def test_sizes_that_make_too_many_buckets_are_left_out() -> None:
    workload = _workload(1000, 1000)
    found = seconds_by_size(
        Profile(1.0, 2.0, [1.0], 0.0, 1e9, 0.0), workload, [100.0, 1.0], ways=WAYS[:1], world_size=2
    )
    assert list(found) == [100.0]
