"""The stream path with one synchronisation missing, one class each. The checker must find every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

import zerolap
import zerolap_sim
from support.sim_programs import device_group
from support.stream_programs import Attached, sim_device, train
from zerolap._torch import under
from zerolap.backend.streams import StreamLane, StreamSide, _Arrived, _current
from zerolap.runtime import engine as engine_module
from zerolap.runtime.bucket import Bucket
from zerolap.runtime.engine import Engine
from zerolap.runtime.freed_gradients import FreedGradients
from zerolap.runtime.gradient_memory import GradientMemory

# --- lanes ------------------------------------------------------------------------------------------------------------


class LaneIgnoresItsCaller(StreamLane):
    """Runs at once, beside what its caller has queued."""

    def _start(self, fn: Callable[[], Any], future: Any) -> Any:
        with under(self._stream), torch.no_grad():
            value = fn()
            if future is not None:
                future.set_result(value)
            return value


class LaneHandsOutFuturesTooEarly(StreamLane):
    """A future that is done where the caller is, not where the lane is."""

    def submit(self, fn: Callable[[], Any]) -> Future[Any]:
        value = self._start(fn, None)
        future: Future[Any] = Future(devices=[self._device])
        future.set_result(value)
        return future


class LaneRunsAndForgets(StreamLane):
    """run() returns without making its caller wait."""

    def run(self, fn: Callable[[], Any]) -> Any:
        return self._start(fn, None)


class LaneDoesNotWaitForParameters(StreamLane):
    """as_caller() ends before what it did is done."""

    @contextmanager
    def as_caller(self) -> Iterator[None]:
        self._caller.wait_stream(self._stream)
        with under(self._caller):
            yield


# --- sides ------------------------------------------------------------------------------------------------------------


class SideIgnoresItsCaller(StreamSide):
    """Starts a collective before what it sends is there."""

    def start(self, fn: Callable[[], zerolap.Pending]) -> zerolap.Pending:
        with under(self._stream), torch.no_grad():
            pending = fn()
            pending.wait()
        return self._arrived(pending)

    def _arrived(self, pending: zerolap.Pending) -> zerolap.Pending:
        event = torch.Event(device=self._device)
        event.record(self._stream)
        return _Arrived(event, self._device, sent_bytes=pending.sent_bytes)


class SideDoesNotWait(SideIgnoresItsCaller):
    """Says that a collective has arrived when it has been started."""

    def start(self, fn: Callable[[], zerolap.Pending]) -> zerolap.Pending:
        self._stream.wait_stream(_current(self._device))
        with under(self._stream), torch.no_grad():
            pending = fn()
        self.kept = getattr(self, "kept", [])
        self.kept.append(pending)  # what is missing is the wait, not the memory
        return self._arrived(pending)


class SideRecordsTooEarly(SideIgnoresItsCaller):
    """Waits, but lets others go on from where it was before."""

    def start(self, fn: Callable[[], zerolap.Pending]) -> zerolap.Pending:
        self._stream.wait_stream(_current(self._device))
        with under(self._stream), torch.no_grad():
            pending = fn()
            arrived = self._arrived(pending)
            pending.wait()
        return arrived


class SideUsesItsCallersMemory(SideIgnoresItsCaller):
    """Starts a collective where the caller is: what it allocates is given back before the caller has waited."""

    def start(self, fn: Callable[[], zerolap.Pending]) -> zerolap.Pending:
        with torch.no_grad():
            pending = fn()
        with under(self._stream), torch.no_grad():
            pending.wait()
        return self._arrived(pending)


class _NeverWaits(_Arrived):
    __slots__ = ()

    def wait(self) -> None:
        pass


class NobodyWaitsForTheSide(SideIgnoresItsCaller):
    """Whoever waits for the collective goes on at once."""

    def start(self, fn: Callable[[], zerolap.Pending]) -> zerolap.Pending:
        self._stream.wait_stream(_current(self._device))
        with under(self._stream), torch.no_grad():
            pending = fn()
            pending.wait()
        return _NeverWaits(torch.Event(device=self._device), self._device, sent_bytes=pending.sent_bytes)


# --- adapters ---------------------------------------------------------------------------------------------------------


class ForgetsWhatItSends(zerolap_sim.SimAdapter):
    """A collective under way holds neither its work nor its tensors, and nobody waits for it in time to be freed."""

    def reduce_scatter(self, parts: zerolap.Parts, **options: Any) -> zerolap.Pending:
        return _forgetful(super().reduce_scatter(parts, **options))


class Late:
    """Waits for an event that was recorded behind the collective, without holding on to it."""

    def __init__(self, pending: zerolap.Pending) -> None:
        stream = torch.Stream(device=sim_device())
        with under(stream):
            for work in pending._works:
                work.wait()
        self._event = torch.Event(device=sim_device())
        self._event.record(stream)

    def wait(self) -> None:
        _current(sim_device()).wait_event(self._event)


def _forgetful(pending: zerolap.Pending) -> zerolap.Pending:
    late = Late(pending)
    pending._works, pending.tensors, pending._finish = (), (), None
    torch.empty(4096, device=sim_device()).fill_(1.0)  # the next allocation of this stream
    return zerolap.Pending([late], tensors=(), what="", sent_bytes=pending.sent_bytes)


class UsesWhatHasNotArrived(zerolap_sim.SimAdapter):
    """Takes padding off before the collective is done."""

    def all_gather(self, parts: zerolap.Parts, **options: Any) -> zerolap.Pending:
        pending = super().all_gather(parts, **options)
        if pending._finish is not None:
            pending._finish()
            pending._finish = None
        return pending


# --- engines and buckets -----------------------------------------------------------------------------------------------


class Mutant:
    """Methods that take the place of those of the engine or its buckets while it trains."""

    target: type = Bucket


class StepsBeforeTheReduction(Mutant):
    """Takes the gradients before they are reduced."""

    def finish_reduce(self: Any) -> None:
        self.reduced = self.shard_gradients


class GathersBeforeTheStep(Mutant):
    """Starts sending a bucket's parameters in the wrong order: before they are updated."""

    def step(self: Any) -> None:
        self.update.begin()
        START_GATHER(self)
        if self.shard is not None and self.reduced is not None:
            self.shard.set_grads(self.reduced, self.agreed)
            self.update.step(self.shard)

    def start_gather(self: Any) -> None:
        pass


class DoesNotWaitForGathers(Mutant):
    """Says that parameters are back when they are on their way."""

    def wait(self: Any, param: Tensor | None = None, *, is_lane: bool = False) -> None:
        if is_lane:
            self.forget_gather()
        else:
            WAIT(self, param)


class ParametersAreUsedTooEarly(Mutant):
    """Lazy gathers that nobody waits for."""

    def wait(self: Any, param: Tensor | None = None, *, is_lane: bool = False) -> None:
        if is_lane:
            WAIT(self, param, is_lane=True)


class GivesGradientsBackTooEarly(Mutant):
    """DDP may overwrite a bucket that is still being sent."""

    target = Engine

    def on_bucket(self: Any, state: Any, bucket: Any) -> Future[Tensor]:
        ON_BUCKET(self, state, bucket)
        future: Future[Tensor] = Future(devices=[sim_device()])
        future.set_result(bucket.buffer())
        return future


class FreesABucketBeforeItIsReduced(Mutant):
    """Makes room without waiting for the reduction."""

    target = GradientMemory

    def make_room_behind(self: Any, memory: Any) -> None:
        self._free(memory)


class FreesBucketsAsTheyAreHandedOver(Mutant):
    """On a device the lane only queues: that it has got so far means nothing."""

    target = GradientMemory

    def reduced(self: Any, memory: Any, reduction: Any) -> None:
        self._free(memory)


class FreesAShardBeforeItIsUsed(Mutant):
    """As above, of the gradients that the update is about to use."""

    target = FreedGradients

    def after_step(self: Any, cast: Tensor | None) -> None:
        with torch.Stream(device=sim_device()):
            self.used()
            torch.empty(1, device=sim_device())


START_GATHER, WAIT, ON_BUCKET = Bucket.start_gather, Bucket.wait, Engine.on_bucket


@contextmanager
def _replacing(mutant: type) -> Iterator[None]:
    kept: list[tuple[Any, str, Any]] = []
    if issubclass(mutant, Mutant):
        names = [name for name, value in vars(mutant).items() if isinstance(value, FunctionType)]
        kept = [(mutant.target, name, vars(mutant.target)[name]) for name in names]
    table = dict(engine_module._DO)
    try:
        for kind, name, original in kept:
            setattr(kind, name, vars(mutant)[name])
            engine_module._DO.update((verb, vars(mutant)[name]) for verb, do in table.items() if do is original)
        yield
    finally:
        for kind, name, original in kept:
            setattr(kind, name, original)
        engine_module._DO.update(table)


# --- running them -----------------------------------------------------------------------------------------------------


class _Adapter(zerolap_sim.SimAdapter):
    """An adapter with lanes and sides of the given kinds."""

    def __init__(self, lane: type[StreamLane] = StreamLane, side: type[StreamSide] = StreamSide) -> None:
        super().__init__()
        self._lane = lane
        self._side = side

    def lane(self, name: str, *, device: torch.device) -> zerolap.Lane:
        return self._lane(device)

    def side(self, device: torch.device) -> zerolap.Side:
        return self._side(device)


# What is broken, and a schedule and gather under which that matters.
MUTANTS: dict[type, tuple[str, str]] = {
    LaneIgnoresItsCaller: ("on_step", "eager"),
    LaneHandsOutFuturesTooEarly: ("interleaved", "eager"),
    LaneRunsAndForgets: ("on_step", "eager"),
    LaneDoesNotWaitForParameters: ("interleaved", "eager"),
    SideIgnoresItsCaller: ("interleaved", "eager"),
    SideDoesNotWait: ("interleaved", "eager"),
    SideRecordsTooEarly: ("after_backward", "eager"),
    SideUsesItsCallersMemory: ("interleaved", "eager"),
    NobodyWaitsForTheSide: ("interleaved", "lazy"),
    ForgetsWhatItSends: ("interleaved", "eager"),
    UsesWhatHasNotArrived: ("interleaved", "eager"),
    StepsBeforeTheReduction: ("interleaved", "eager"),
    GathersBeforeTheStep: ("after_backward", "eager"),
    DoesNotWaitForGathers: ("interleaved", "eager"),
    ParametersAreUsedTooEarly: ("interleaved", "lazy"),
    GivesGradientsBackTooEarly: ("interleaved", "eager"),
    FreesABucketBeforeItIsReduced: ("interleaved", "eager"),
    FreesBucketsAsTheyAreHandedOver: ("after_backward", "eager"),
    FreesAShardBeforeItIsUsed: ("interleaved", "eager"),
}


def adapter_of(mutant: type) -> zerolap.Adapter:
    if issubclass(mutant, StreamLane):
        return _Adapter(lane=mutant)
    if issubclass(mutant, StreamSide):
        return _Adapter(side=mutant)
    return mutant() if issubclass(mutant, zerolap.Adapter) else zerolap_sim.SimAdapter()


def run_mutants(num_runs: int, mutants: Sequence[type], delays: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """How many reports the checker gave in each run of each mutant."""
    group, found = device_group(), {}
    for delay in delays:
        zerolap_sim.configure(**({"delay_us": 0, "delay_probability": 0.0} | delay))
        for mutant in mutants:
            schedule, gather = MUTANTS[mutant]
            between = _clip if schedule == "on_step" else _nothing
            counts = []
            for _ in range(num_runs):
                frees = vars(mutant).get("target") in (GradientMemory, FreedGradients)
                way = Attached(partial(adapter_of, mutant), schedule=schedule, gather=gather, shard_gradients=frees)
                with _replacing(mutant):
                    train(sim_device(), group, way, between=between)
                torch.accelerator.synchronize()
                counts.append(len(zerolap_sim.take_reports()))
            found[f"{mutant.__name__}{', with delays' if delay else ''}"] = counts
    return found


def _clip(optimizer: Any) -> None:
    optimizer.clip_grad_norm_(0.1)


def _nothing(optimizer: Any) -> None:
    pass
