"""Adapters with one thing wrong each, and the requirement that must catch it. Made where they are used, by name."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

import zerolap
from zerolap import Adapter, Capabilities, Parts, Pending
from zerolap.lane import HostSide, ThreadLane
from zerolap_cpu_gloo import CpuGlooAdapter

# What each must fail, first; beside it, what else may fail by the same fault. Everything else must stay green.
BREAKERS: dict[str, tuple[str, frozenset[str]]] = {}


EVERYTHING = "*"  # nothing can be asked of such an adapter


def caught_by(requirement: str, *others: str) -> Callable[[type[Adapter]], type[Adapter]]:
    def register(cls: type[Adapter]) -> type[Adapter]:
        BREAKERS[cls.__name__] = (requirement, frozenset(others))
        return cls

    return register


_REAL = CpuGlooAdapter.capabilities


def _declaring(**changes: Any) -> Capabilities:
    values = {name: getattr(_REAL, name) for name in Capabilities.__slots__}
    return Capabilities(**(values | changes))


class Later(Pending):
    """A collective with something done to it when it has arrived."""

    __slots__ = ("_after", "_inner")

    def __init__(self, inner: Pending, after: Callable[[], object]) -> None:
        super().__init__((), tensors=(), what="", sent_bytes=inner.sent_bytes)
        self._inner = inner
        self._after = after

    def wait(self) -> None:
        self._inner.wait()
        self._after()


# --- tier 0 -----------------------------------------------------------------------------------------------------------


@caught_by("DEV-1")
class HasNoDevice(CpuGlooAdapter):
    def why_unavailable(self) -> str:
        return "the cable is not plugged in"


@caught_by("DEV-2")
class HasNoName(CpuGlooAdapter):
    name = ""


@caught_by("DEV-3")
class StatesNonsense(CpuGlooAdapter):
    capabilities = _declaring(futures_complete_at_enqueue=None)


@caught_by("DEV-2", EVERYTHING)
class MisplacesItsDevice(CpuGlooAdapter):
    def device(self, local_rank: int) -> torch.device:
        return torch.device("meta")


@caught_by("DEV-5")
class CannotDiagnose(CpuGlooAdapter):
    def diagnose(self) -> list[str]:
        raise OSError("no such file: libdiagnose.so")


@caught_by("DEV-6", EVERYTHING)
class CannotSynchronize(CpuGlooAdapter):
    def synchronize(self) -> None:
        raise RuntimeError("synchronize() is not implemented")


@caught_by("DEV-7")
class CutsTooFinely(CpuGlooAdapter):
    capabilities = _declaring(exact_cut=1)


# --- tier 1 -----------------------------------------------------------------------------------------------------------


class _WithLane(CpuGlooAdapter):
    made: type[ThreadLane]

    def lane(self, name: str, *, device: torch.device) -> zerolap.Lane:
        return self.made(name)


class _Shuffling(ThreadLane):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._held: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[[], Any]) -> Future[Any]:
        """Every other job waits for the one behind it."""
        if len(self._held) == 0:
            promise: Future[Any] = Future()
            self._held.append((fn, promise))
            return promise
        (held, promise), self._held = self._held[0], []
        result = super().submit(fn)

        def run_held() -> None:
            promise.set_result(held())

        super().submit(run_held)
        return result

    def run(self, fn: Callable[[], Any]) -> Any:
        while self._held:
            self.submit(lambda: None)
        return super().submit(fn).wait()


@caught_by("LANE-1", "LANE-2", "LANE-5", "LANE-7")
class RunsInAnotherOrder(_WithLane):
    made = _Shuffling


class _Swallowing(ThreadLane):
    def submit(self, fn: Callable[[], Any]) -> Future[Any]:
        def quietly() -> Any:
            try:
                return fn()
            except Exception:
                return None

        return super().submit(quietly)


@caught_by("LANE-2")
class SwallowsErrors(_WithLane):
    made = _Swallowing


class _Forgetful(ThreadLane):
    def run(self, fn: Callable[[], Any]) -> Any:
        self.submit(fn)
        return None


@caught_by("LANE-3", "LANE-1", "LANE-2", "LANE-4", "LANE-6", "LANE-8", "DEV-6")
class DoesNotWaitForItsLane(_WithLane):
    made = _Forgetful


class _Early(ThreadLane):
    def submit(self, fn: Callable[[], Any]) -> Future[Any]:
        super().submit(fn)
        early: Future[Any] = Future()
        early.set_result(None)
        return early


@caught_by("LANE-5", "LANE-2", "LANE-3", "LANE-4", "LANE-6", "LANE-8", "LANE-1")
class CompletesFuturesEarly(_WithLane):
    made = _Early


class _WithGrad(ThreadLane):
    def submit(self, fn: Callable[[], Any]) -> Future[Any]:
        def with_grad() -> Any:
            with torch.enable_grad():
                return fn()

        return super().submit(with_grad)


@caught_by("LANE-6")
class RecordsForAutograd(_WithLane):
    made = _WithGrad


class _Abrupt(ThreadLane):
    def close(self) -> None:
        if getattr(self, "is_closed", False):
            raise RuntimeError("this lane is closed")
        self.is_closed = True
        super().close()


@caught_by("LANE-7")
class CannotCloseTwice(_WithLane):
    made = _Abrupt


class _Deaf(HostSide):
    def start(self, fn: Callable[[], Pending]) -> Pending:
        pending = fn()
        return Later(Pending((), tensors=(), what="", sent_bytes=pending.sent_bytes), lambda: None)


@caught_by("SIDE-1", "SIDE-2")
class ForgetsItsSide(CpuGlooAdapter):
    def side(self, device: torch.device) -> zerolap.Side:
        return _Deaf()


@caught_by("TIME-1")
class MeasuresInMilliseconds(CpuGlooAdapter):
    def seconds_between(self, start: object, end: object) -> float:
        return 1000 * super().seconds_between(start, end)


# --- tier 2 -----------------------------------------------------------------------------------------------------------


@caught_by(
    "GRP-1", "GRP-2", "GRP-3", "COL-1", "COL-3", "COL-4", "COL-5", "COL-7", "COL-8", "COL-9", "ORD-1", "ORD-5", "SIDE-2"
)
class SwapsRanks(CpuGlooAdapter):
    def make_backend(self, spec: zerolap.GroupSpec) -> Any:
        return dist.ProcessGroupGloo(spec.store, spec.size - 1 - spec.rank, spec.size, spec.timeout)

    def open_group(self, like: dist.ProcessGroup, *, name: str) -> dist.ProcessGroup:
        spec_rank, size = like.size() - 1 - like.rank(), like.size()
        store = dist.PrefixStore(name, like.get_group_store())
        group = dist.ProcessGroup(store, spec_rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(store, spec_rank, size, self.timeout(like))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_group_name(dist.GroupName(name))
        return group


@caught_by("GRP-4")
class ForgetsTimeouts(CpuGlooAdapter):
    def timeout(self, group: dist.ProcessGroup) -> Any:
        return super().timeout(group) * random.choice([1, 2, 3, 4, 5, 6, 7, 8])


@caught_by("COL-1", "GRP-3", "ORD-2", "ORD-3", "SIDE-1", "DEV-8", "CAP-2")
class SumsTwice(CpuGlooAdapter):
    def all_reduce(self, tensor: Tensor, *, op: Any, **options: Any) -> Pending:
        pending = super().all_reduce(tensor, op=op, **options)
        return Later(pending, lambda: tensor.mul_(2) if op == dist.ReduceOp.SUM else None)


@caught_by("COL-1", "DEV-8")
class AveragesSmallOnes(CpuGlooAdapter):
    def all_reduce(self, tensor: Tensor, *, op: Any, group: dist.ProcessGroup, what: str) -> Pending:
        pending = super().all_reduce(tensor, op=op, group=group, what=what)
        is_small = tensor.numel() < 10 and op == dist.ReduceOp.SUM and tensor.is_floating_point()
        return Later(pending, lambda: tensor.div_(group.size()) if is_small else None)


@caught_by("COL-2")
class TakesTheSumForTheMaximum(CpuGlooAdapter):
    def all_reduce(self, tensor: Tensor, *, op: Any, **options: Any) -> Pending:
        tensor.add_(1 if op == dist.ReduceOp.MAX else 0)
        return super().all_reduce(tensor, op=dist.ReduceOp.SUM, **options)


@caught_by("COL-3", "GRP-2")
class BroadcastsFromRankZero(CpuGlooAdapter):
    def broadcast(self, tensor: Tensor, *, src: Any, **options: Any) -> Pending:
        return super().broadcast(tensor, src=zerolap.plan.GroupRank(0), **options)  # type: ignore[attr-defined]


class _Scatters(CpuGlooAdapter):
    """Does something to the result of a reduce-scatter, or to its parts."""

    def spoil(self, parts: Parts, into: Tensor) -> None:
        raise NotImplementedError

    def reduce_scatter(self, parts: Parts, *, into: Tensor, **options: Any) -> Pending:
        pending = super().reduce_scatter(parts, into=into, **options)
        return Later(pending, lambda: self.spoil(parts, into))


_SCATTERED = ("GRP-2", "COL-5", "COL-6", "COL-9", "ORD-1", "ORD-5", "SIDE-2")


@caught_by("COL-4", *_SCATTERED)
class DropsTheLastOfOddSizes(_Scatters):
    def spoil(self, parts: Parts, into: Tensor) -> None:
        if into.numel() % 2:
            into[-1] = 0


@caught_by("COL-5", "COL-6")
class FailsOnUnevenParts(_Scatters):
    def spoil(self, parts: Parts, into: Tensor) -> None:
        if not parts.is_equal and into.numel():
            into[0] += 1


@caught_by("COL-6", "ORD-4")
class ChangesItsInput(_Scatters):
    def spoil(self, parts: Parts, into: Tensor) -> None:
        for part in parts.tensors:
            part.add_(1)


@caught_by("ORD-4", *_SCATTERED, "COL-4")
class SumsDifferentlyEachTime(_Scatters):
    def spoil(self, parts: Parts, into: Tensor) -> None:
        if into.dtype == torch.float32 and into.numel():
            into[0] *= 1 + random.random() * 1e-6


@caught_by("ORD-1", "ORD-5")
class MixesUpTags(CpuGlooAdapter):
    """Results of two collectives under way at once are exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, tuple[int, Tensor]] = {}

    def reduce_scatter(self, parts: Parts, *, into: Tensor, tag: int, group: dist.ProcessGroup, what: str) -> Pending:
        pending = super().reduce_scatter(parts, into=into, tag=tag, group=group, what=what)
        before = self._last.get(group.group_name)
        self._last[group.group_name] = (tag, into)

        def swap() -> None:
            if before is not None and before[0] not in (tag, 0) and before[1].numel():
                into[: before[1].numel()].copy_(before[1][: into.numel()])

        return Later(pending, swap)


@caught_by("ORD-3", "COL-1", "GRP-3", "ORD-2", "SIDE-1", "DEV-8", "COL-2", "CAP-2")
class DoesNotWait(CpuGlooAdapter):
    """An all-reduce that says it is done when it has begun."""

    def all_reduce(self, tensor: Tensor, *, op: Any, **options: Any) -> Pending:
        sent = tensor.clone()
        pending = super().all_reduce(sent, op=op, **options)
        self._kept = [*getattr(self, "_kept", []), pending]
        return Pending((), tensors=(), what="")


@caught_by("ORD-2")
class SendsWhatWasThere(CpuGlooAdapter):
    """Sends zeros now and then: as if it had not waited for its caller."""

    def all_reduce(self, tensor: Tensor, *, op: Any, **options: Any) -> Pending:
        if tensor.numel() == 50_000:
            tensor.zero_()
        return super().all_reduce(tensor, op=op, **options)


@caught_by("ORD-5")
class FreesTooEarly(_Scatters):
    """What it has received is lost when its caller lets go."""

    def __init__(self) -> None:
        super().__init__()
        self._num = 0

    def spoil(self, parts: Parts, into: Tensor) -> None:
        if into.numel() == 30_011:
            self._num += 1
            if self._num > 10:
                into.fill_(-1.0)


class _Gathers(CpuGlooAdapter):
    def spoil(self, parts: Parts, rank: int) -> None:
        raise NotImplementedError

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, **options: Any) -> Pending:
        pending = super().all_gather(parts, group=group, **options)
        return Later(pending, lambda: self.spoil(parts, group.rank()))


@caught_by("COL-7", "COL-8", "COL-9")
class LosesItsOwnPart(_Gathers):
    def spoil(self, parts: Parts, rank: int) -> None:
        parts.tensors[rank].zero_()


@caught_by("COL-8")
class GathersEqualPartsOnly(_Gathers):
    def spoil(self, parts: Parts, rank: int) -> None:
        if not parts.is_equal:
            for part in parts.tensors:
                part.zero_()


@caught_by("COL-9")
class NeedsOneBuffer(_Gathers):
    def spoil(self, parts: Parts, rank: int) -> None:
        if parts.whole is None:
            for part in parts.tensors:
                part.zero_()


@caught_by("COL-5")
class HangsOnEmptyParts(CpuGlooAdapter):
    def reduce_scatter(self, parts: Parts, **options: Any) -> Pending:
        if parts.nbytes == 0:
            time.sleep(3600)
        return super().reduce_scatter(parts, **options)


@caught_by("BYTES-1")
class CountsNoBytes(CpuGlooAdapter):
    def all_gather(self, parts: Parts, **options: Any) -> Pending:
        pending = super().all_gather(parts, **options)
        pending.sent_bytes = 0
        return pending


@caught_by("CAP-1")
class BoastsOfItsFutures(CpuGlooAdapter):
    capabilities = _declaring(futures_complete_at_enqueue=True)


# --- tier 3 -----------------------------------------------------------------------------------------------------------


@caught_by("OVL-1")
class ForgetsToReduceInTraining(_Scatters):
    """Right for whatever the collectives' own requirements try, wrong for a bucket of a model."""

    def spoil(self, parts: Parts, into: Tensor) -> None:
        if parts.whole is not None and parts.whole.numel() > 900 and parts.whole.numel() % 31 == 0:
            into.mul_(1.01)


@caught_by("HOOK-1")
class BroadcastsOldParameters(CpuGlooAdapter):
    def broadcast(self, tensor: Tensor, *, src: Any, group: dist.ProcessGroup, what: str) -> Pending:
        if "updated parameters" in what and group.rank() != src:
            kept = tensor.clone()
            return Later(super().broadcast(tensor, src=src, group=group, what=what), lambda: tensor.copy_(kept))
        return super().broadcast(tensor, src=src, group=group, what=what)
