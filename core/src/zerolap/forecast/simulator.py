"""A rank in simulated time: the training loop, the lane and the groups, and what joins them to other ranks. No tensors, no torch.

What the machine asks for is done here, in its order and on the threads on which the engine does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from enum import Enum

from zerolap.forecast.event_loop import Flag, Queue, SimulatedRank, Thread
from zerolap.forecast.workload import Traffic
from zerolap.schedule.machine import AT_ONCE, Action, Machine, Verb

_MAX_STEPS = 12  # until each takes as long as the one before
_SAME = 1e-6
_DDP_WIDTH = 2  # all-reduces under way at once in DDP's own group
_NO_TIME = frozenset({Verb.MIGRATE, Verb.FINISH})  # or only once


class Pattern(Enum):
    """Who exchanges with whom, and in how many steps that wait for each other."""

    STAGED = "staged"  # in each stage all with all at once
    RING = "ring"  # each with its neighbour, n - 1 times


def one_stage(num_ranks: int) -> tuple[int, ...]:
    """All ranks exchange at once."""
    return (num_ranks,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins a rank to the others. The rate is that in each direction; latency is that of an exchange of nothing."""

    bytes_per_second: float
    latency: float = 0.0  # seconds, in each step of an exchange
    seconds_per_message: float = 0.0
    pattern: Pattern = Pattern.STAGED
    stage_sizes: Callable[[int], tuple[int, ...]] = one_stage  # an adapter's, where exchanges are staged

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not (self.latency >= 0 and self.seconds_per_message >= 0):
            raise ValueError(f"a link has a rate, and its times are not negative, got {self}")

    def stages(self, world_size: int) -> tuple[int, ...]:
        """How many ranks exchange in each stage; they multiply to the number of ranks."""
        return self.stage_sizes(world_size) if self.pattern is Pattern.STAGED else one_stage(world_size)

    def messages(self, world_size: int) -> tuple[int, ...]:
        """How many messages a rank sends in each step."""
        if self.pattern is Pattern.RING:
            return (1,) * (world_size - 1)
        return tuple(size - 1 for size in self.stages(world_size))

    def latency_of(self, world_size: int) -> float:
        """Of one exchange, all steps together."""
        if world_size == 1:
            return 0.0
        return sum(self.latency + num * self.seconds_per_message for num in self.messages(world_size))

    def width(self, world_size: int) -> int | None:
        """How many exchanges of one group are under way at once; None for any number."""
        return None if self.pattern is Pattern.STAGED and len(self.messages(world_size)) < 2 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What a rank computes in a step, and how fast.

    ``cores`` are those that forward and backward, updates and moving bytes share; the time they take alone is that on one.
    """

    forward: float  # seconds
    backward: float
    step_seconds_per_element: float = 0.0  # that is updated by itself; matrices' updates cost more
    host_seconds_per_bucket: float = 0.0
    cpu_seconds_per_byte: float = 0.0  # sent and received; 0 where the device moves bytes by itself
    cores: float = 1.0

    def __post_init__(self) -> None:
        if not self.cores > 0 or not all(value >= 0 for value in astuple(self)):
            raise ValueError(f"computing has cores, and its times are not negative, got {self}")


class Rank:
    """One rank. Its threads begin when they are started on its clock."""

    def __init__(self, traffic: Sequence[Traffic], *, link: Link, compute: Compute, world_size: int) -> None:
        self.clock = SimulatedRank(
            cores=compute.cores,
            bytes_per_second=link.bytes_per_second,
            cpu_seconds_per_byte=compute.cpu_seconds_per_byte,
        )
        self.most_copied = 0
        self._copied = 0
        self._traffic = traffic
        self._compute = compute
        self._world_size = world_size
        self._latency = link.latency_of(world_size)
        self._reduces, self._gathers = (Queue(self.clock, width=link.width(world_size)) for _ in range(2))
        self._jobs: deque[tuple[tuple[Action, ...], Flag]] = deque()
        self._wake = Flag()
        self._reducing: list[Flag] = []
        self._gathering: dict[int, Flag] = {}
        self._step_done, self._next_step = Flag(), Flag()

    def settle(self, training: Thread) -> tuple[float, float]:
        """Train until a step takes as long as the one before: that long, and how long the wire is used in it."""
        self.clock.start(training)
        last = 0.0
        for _ in range(_MAX_STEPS):
            self._step_done, self._next_step.is_set = Flag(), True
            start, wire_start = self.clock.now, self.clock.wire_seconds
            self.clock.run_until(self._step_done)
            seconds = self.clock.now - start
            if not self._gathering or abs(seconds - last) <= _SAME * seconds:
                break
            last = seconds
        return seconds, self.clock.wire_seconds - wire_start

    def training(self, machine: Machine) -> Thread:
        """The training loop: forward, which waits for what it uses; backward, which hands over buckets; step()."""
        compute, last = self._compute, len(self._traffic) - 1
        while True:
            yield from self._forward()
            self._reducing, job, at = [], Flag(is_set=True), 0.0
            for index, bucket in enumerate(self._traffic):
                yield (bucket.ready_at - at) * compute.backward + compute.host_seconds_per_bucket / 2
                at = bucket.ready_at
                actions = machine.bucket_ready(index, is_last=index == last, is_known=True)
                for verb, each in actions:
                    if verb in AT_ONCE:
                        self._do_at_once(verb, each)
                job = self._submit(actions)
            yield (1 - at) * compute.backward
            yield job  # DDP waits for every bucket, and the lane is done with the last one last
            actions = machine.step_called()
            if actions:
                yield self._submit(actions)
            yield self._end_step()

    def plain_training(self, step: float) -> Thread:
        """The same with DDP alone."""
        compute, size = self._compute, self._world_size
        latency = 2 * self._latency
        queue = Queue(self.clock, width=_DDP_WIDTH)
        while True:
            yield from self._forward()
            reducing, at = [], 0.0
            for bucket in self._traffic:
                yield (bucket.ready_at - at) * compute.backward
                at = bucket.ready_at
                reducing.append(queue.start(2 * (size - 1) / size * bucket.gradient_bytes, latency=latency))
            yield (1 - at) * compute.backward
            yield from reducing
            yield step
            yield self._end_step()

    def lane(self) -> Thread:
        """Does what the machine asks for, in its order; a reduction that is under way holds up all behind it."""
        while True:
            while self._jobs:
                actions, done = self._jobs.popleft()
                for verb, bucket in actions:
                    if verb not in AT_ONCE:
                        yield from self._do(verb, bucket)
                done.is_set = True
            self._wake = Flag()
            yield self._wake

    def _do_at_once(self, verb: Verb, index: int | None) -> None:
        if verb is not Verb.START_REDUCE or index is None:  # a layout is recorded, and its owners assigned, only once
            raise NotImplementedError(f"the forecast does not know what {verb} of a bucket takes")
        self._start_reduce(index)

    def _do(self, verb: Verb, index: int | None) -> Thread:
        if index is None:
            if verb is Verb.WAIT:
                for gathered in list(self._gathering):
                    yield from self._wait_for(gathered)
            elif verb not in _NO_TIME:
                raise NotImplementedError(f"the forecast does not know what {verb} of all buckets takes")
            return
        bucket, compute = self._traffic[index], self._compute
        match verb:
            case Verb.FINISH_REDUCE:
                yield self._reducing[index]
                self._copied -= bucket.reduce_copy_bytes
            case Verb.AGREE:
                yield self._gathers.start(0, latency=2 * self._latency)
            case Verb.STEP:
                yield from self._wait_for(index)
                yield compute.host_seconds_per_bucket / 2 + bucket.updated * compute.step_seconds_per_element
            case Verb.GATHER:
                yield from self._wait_for(index)
                self._hold(bucket.gather_copy_bytes)
                if self._world_size > 1:
                    self._gathering[index] = self._gathers.start(bucket.gather_bytes, latency=self._latency)
            case _:
                if verb not in _NO_TIME:
                    raise NotImplementedError(f"the forecast does not know what {verb} of a bucket takes")

    def _end_step(self) -> Flag:
        """What the next one waits for: a step that takes no time would otherwise be followed by others for ever."""
        self._step_done.is_set, self._next_step = True, Flag()
        return self._next_step

    def _forward(self) -> Thread:
        at = 0.0
        for index in sorted(range(len(self._traffic)), key=lambda i: self._traffic[i].used_at):
            used_at = self._traffic[index].used_at
            yield (used_at - at) * self._compute.forward
            at = used_at
            yield from self._wait_for(index)
        yield (1 - at) * self._compute.forward

    def _wait_for(self, index: int) -> Thread:
        """For the bucket's gather, if one is under way."""
        gathering = self._gathering.get(index)
        if gathering is not None:
            yield gathering
            if self._gathering.pop(index, None) is not None:
                self._copied -= self._traffic[index].gather_copy_bytes

    def _start_reduce(self, index: int) -> None:
        bucket = self._traffic[index]
        self._hold(bucket.reduce_copy_bytes)
        self._reducing.append(self._reduces.start(bucket.reduce_bytes, latency=self._latency))

    def _hold(self, num_bytes: int) -> None:
        self._copied += num_bytes
        self.most_copied = max(self.most_copied, self._copied)

    def _submit(self, actions: tuple[Action, ...]) -> Flag:
        done = Flag()
        self._jobs.append((actions, done))
        self._wake.is_set = True
        return done
