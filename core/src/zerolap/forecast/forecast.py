"""Forecasts: how long a step takes, what it sends and what a rank holds, before anything is run. No tensors, no torch.

A rank is simulated, driven by the machine that drives training. DDP with the plain optimizer is simulated beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zerolap.forecast.simulator import Compute, Link, Pattern, Rank
from zerolap.forecast.workload import Memory, Workload, plain_memory, sent_bytes, sharded_memory, traffic_of
from zerolap.schedule.machine import Agreement, Gather, Machine, Schedule
from zerolap.schedule.ownership import GroupRank, early_buckets

__all__ = ["Advice", "Compute", "Forecast", "Link", "Pattern", "forecast", "forecast_all", "forecast_ddp", "recommend"]

_AS_GOOD = 0.02  # nearer than forecasts can tell
_IS_BUSY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One way to train. Without a schedule it is DDP with the plain optimizer."""

    schedule: Schedule | None
    gather: Gather | None
    step_seconds: float
    compute_seconds: float  # of it, what forward, backward and this rank's update take alone
    wire_seconds: float  # of it, in which something is on the wire
    sent_bytes: int
    memory: Memory

    @property
    def exposed_seconds(self) -> float:
        """What communication adds to the time of computing alone."""
        return max(0.0, self.step_seconds - self.compute_seconds)

    @property
    def name(self) -> str:
        if self.schedule is None or self.gather is None:
            return "DDP"
        return f"{self.schedule.value}, {self.gather.value}"


def forecast(
    workload: Workload,
    *,
    world_size: int,
    link: Link,
    compute: Compute,
    schedule: Schedule,
    gather: Gather,
    agreement: Agreement = Agreement.NEVER,
) -> Forecast:
    """What a step with ``attach(schedule=..., gather=...)`` will be like, once it has settled."""
    traffic = traffic_of(workload, world_size)
    rank = Rank(traffic, link=link, compute=compute, world_size=world_size)
    machine = Machine(schedule, gather=gather, agreement=agreement)
    for index in range(len(traffic)):  # the first backward, in which the layout is learnt
        machine.bucket_ready(index, is_last=index == len(traffic) - 1, is_known=False)
    if traffic:
        early = early_buckets([sum(slot.numel for slot in slots) for slots in workload.layout])
        machine.layout_seen(is_changed=True, early=early)
    machine.step_called()
    rank.clock.start(rank.lane())
    seconds, wire_seconds = rank.settle(rank.training(machine))
    return Forecast(
        schedule=schedule,
        gather=gather,
        step_seconds=seconds,
        compute_seconds=compute.forward
        + compute.backward
        + sum(bucket.updated for bucket in traffic) * compute.step_seconds_per_element,
        wire_seconds=wire_seconds,
        sent_bytes=sent_bytes(workload, world_size, rank=GroupRank(0), stage_sizes=link.stages(world_size)),
        memory=replace(sharded_memory(workload, world_size), copies=rank.most_copied),
    )


def forecast_ddp(workload: Workload, *, world_size: int, link: Link, compute: Compute) -> Forecast:
    """What a step with DDP and the plain optimizer will be like: all-reduce of every bucket, and an update of everything."""
    traffic = traffic_of(workload, world_size)
    rank = Rank(traffic, link=link, compute=compute, world_size=world_size)
    step = workload.updated * compute.step_seconds_per_element
    seconds, wire_seconds = rank.settle(rank.plain_training(step))
    sent = 2 * (world_size - 1) / world_size * sum(bucket.gradient_bytes for bucket in traffic)
    return Forecast(
        schedule=None,
        gather=None,
        step_seconds=seconds,
        compute_seconds=compute.forward + compute.backward + step,
        wire_seconds=wire_seconds,
        sent_bytes=round(sent),
        memory=plain_memory(workload),
    )


def forecast_all(workload: Workload, *, world_size: int, link: Link, compute: Compute) -> list[Forecast]:
    """DDP, and every schedule with every gather."""
    ways = [(schedule, gather) for schedule in Schedule for gather in Gather]
    return [
        forecast_ddp(workload, world_size=world_size, link=link, compute=compute),
        *(
            forecast(workload, world_size=world_size, link=link, compute=compute, schedule=schedule, gather=gather)
            for schedule, gather in ways
        ),
    ]


class Advice(NamedTuple):
    """What to use, and why, in a line."""

    best: Forecast
    why: str


def recommend(forecasts: Sequence[Forecast], *, changes_gradients: bool = False) -> Advice:
    """The fastest way; of those that are as good as that, the one that asks least of a model: the eager one, the earlier listed.

    If gradients are clipped, unscaled or skipped before an update, only ``on_step`` will do.
    """
    ways = [each for each in forecasts if each.schedule is (Schedule.ON_STEP if changes_gradients else each.schedule)]
    ways = [each for each in ways if each.schedule is not None]
    if not ways:
        raise ValueError("there is nothing to choose from")
    fastest = min(each.step_seconds for each in ways)
    good = [each for each in ways if each.step_seconds <= fastest * (1 + _AS_GOOD)]
    best = min(good, key=lambda each: each.gather is Gather.LAZY)
    if best.exposed_seconds <= _AS_GOOD * best.step_seconds:
        why = "communication is hidden behind computing"
    elif best.wire_seconds >= _IS_BUSY * best.step_seconds:
        why = f"the wire is the limit: it is busy {100 * best.wire_seconds / best.step_seconds:.0f} % of the step"
    else:
        why = f"{best.exposed_seconds:.3g} s of communication are not hidden, and no other way hides more"
    others = [each for each in ways if each not in good]
    if others:
        slowest = max(others, key=lambda each: each.step_seconds)
        slower = 100 * (slowest.step_seconds / best.step_seconds - 1)
        why += f"; the slowest, {slowest.name}, takes {slower:.0f} % longer"
    else:
        why += "; all others are as fast"
    return Advice(best, why)
