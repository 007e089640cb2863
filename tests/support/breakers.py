"""Adapters with one thing wrong each, and what must catch it; here those of a device without streams, up to tier 2.

Made where they are used, by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

import zerolap
from zerolap import Adapter, Capabilities, Parts, Pending
from zerolap.backend.lanes import HostSide, ThreadLane
from zerolap_cpu_gloo import CpuGlooAdapter
from zerolap_cpu_gloo.pages import Pages, give_back


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """What must fail on an adapter, what may by the same fault, and what beyond tier 2 must not. Tiers 0 to 2 must not either."""

    adapter: str
    must_fail: Sequence[str]
    may_fail: frozenset[str]
    must_pass: Sequence[str]


BREAKERS: dict[str, Breaker] = {}
EVERYTHING = "*"  # nothing can be asked of such an adapter


def caught_by(*must_fail: str, may: str = "", but_not_by: str = "") -> Callable[[type[Adapter]], type[Adapter]]:
    """Register a broken adapter. Ids of what may fail and of what must not are given in one string."""

    def register(cls: type[Adapter]) -> type[Adapter]:
        BREAKERS[cls.__name__] = Breaker(
            adapter=f"{cls.__module__}:{cls.__name__}",
            must_fail=must_fail,
            may_fail=frozenset(may.split()),
            must_pass=but_not_by.split(),
        )
        return cls

    return register


_REAL = CpuGlooAdapter.capabilities


def _declaring(**changes: Any) -> Capabilities:
    values = {name: getattr(_REAL, name) for name in Capabilities.__slots__}
    return Capabilities(**(values | changes))


class Later(Pending):
    """A collective with something done to it when it has arrived, once."""

    __slots__ = ("_after", "_inner")

    def __init__(self, inner: Pending, after: Callable[[], object]) -> None:
        super().__init__((), tensors=(), what="", sent_bytes=inner.sent_bytes)
        self._inner = inner
        self._after = after

    def wait(self) -> None:
        self._inner.wait()
        after, self._after = self._after, _nothing
        after()


def _nothing() -> None:
    pass


# --- tier 0 -----------------------------------------------------------------------------------------------------------


@caught_by("DEV-1", may=EVERYTHING)
class HasNoDevice(CpuGlooAdapter):
    def why_unavailable(self) -> str:
        return "the cable is not plugged in"


@caught_by("DEV-2")
class HasNoName(CpuGlooAdapter):
    name = ""


@caught_by("DEV-3")
class StatesNonsense(CpuGlooAdapter):
    capabilities = _declaring(futures_complete_at_enqueue=None)


@caught_by("DEV-2", may=EVERYTHING)
class MisplacesItsDevice(CpuGlooAdapter):
    def device(self, local_rank: int) -> torch.device:
        return torch.device("meta")


class _Rounding(TorchDispatchMode):
    """Multiplies in 16 bits, whatever it is given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor and result.dtype == torch.float32:
            return result.bfloat16().float()
        return result


@caught_by("DEV-4")
class ComputesInSixteenBits(CpuGlooAdapter):
    """Fast mathematics, turned on for everybody by whoever uses the device."""

    def __init__(self) -> None:
        super().__init__()
        _Rounding().__enter__()


@caught_by("DEV-8")
class ReducesDoublesAsSingles(CpuGlooAdapter):
    def all_reduce(self, tensor: Tensor, **options: Any) -> Pending:
        if tensor.dtype != torch.float64:
            return super().all_reduce(tensor, **options)
        single = tensor.float()
        return Later(super().all_reduce(single, **options), lambda: tensor.copy_(single))


@caught_by("DEV-5")
class CannotDiagnose(CpuGlooAdapter):
    def diagnose(self) -> list[str]:
        raise OSError("no such file: libdiagnose.so")


@caught_by("DEV-6", may=EVERYTHING)
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


@caught_by("LANE-1", may="LANE-2 LANE-4 LANE-5 LANE-7 SIDE-1")
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


@caught_by("LANE-3", may="LANE-1 LANE-2 LANE-4 LANE-6 LANE-8 DEV-6")
class DoesNotWaitForItsLane(_WithLane):
    made = _Forgetful


class _Early(ThreadLane):
    def submit(self, fn: Callable[[], Any]) -> Future[Any]:
        super().submit(fn)
        early: Future[Any] = Future()
        early.set_result(None)
        return early


@caught_by("LANE-5", may="LANE-1 LANE-2 LANE-3 LANE-4 LANE-6 LANE-8 DEV-6 SIDE-1")
class CompletesFuturesEarly(_WithLane):
    made = _Early


class _WithGrad(ThreadLane):
    def submit(self, fn: Callable[[], Any]) -> Future[Any]:
        def with_grad() -> Any:
            with torch.enable_grad():
                return fn()

        return super().submit(with_grad)


class _Uncaring(ThreadLane):
    @contextmanager
    def as_caller(self) -> Any:
        with torch.inference_mode():  # "nothing here is for autograd", but what is made is the model's
            yield


@caught_by("LANE-8")
class MakesMemoryNobodyCanUse(_WithLane):
    made = _Uncaring


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


@caught_by("SIDE-1", may="SIDE-2")
class ForgetsItsSide(CpuGlooAdapter):
    def side(self, device: torch.device) -> zerolap.Side:
        return _Deaf()


@caught_by("TIME-1")
class MeasuresInMilliseconds(CpuGlooAdapter):
    def seconds_between(self, start: object, end: object) -> float:
        return 1000 * super().seconds_between(start, end)


# --- tier 2 -----------------------------------------------------------------------------------------------------------


@caught_by("GRP-1", may="GRP-2 GRP-3 COL-1 COL-2 COL-3 COL-4 COL-5 COL-7 COL-8 COL-9 ORD-1 ORD-3 ORD-5 ORD-6 SIDE-2")
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


@caught_by("GRP-2")
class TakesGlobalRanksForItsOwn(CpuGlooAdapter):
    def open_group(self, like: dist.ProcessGroup, *, name: str) -> dist.ProcessGroup:
        store, rank = dist.PrefixStore(name, like.get_group_store()), dist.get_rank()
        group = dist.ProcessGroup(store, rank, like.size())
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(store, rank, like.size(), self.timeout(like))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_group_name(dist.GroupName(name))
        return group


@caught_by("GRP-3")
class TellsMessagesByTagOnly(CpuGlooAdapter):
    """Two groups that reduce with the same tag at once get each other's results."""

    def __init__(self) -> None:
        super().__init__()
        self._under_way: dict[tuple[int, str], tuple[Pending, Tensor]] = {}

    def reduce_scatter(self, parts: Parts, *, into: Tensor, tag: int, group: dist.ProcessGroup, what: str) -> Pending:
        pending = super().reduce_scatter(parts, into=into, tag=tag, group=group, what=what)
        self._under_way[tag, group.group_name] = (pending, into)

        def mix_up() -> None:
            del self._under_way[tag, group.group_name]
            for (other_tag, _), (other, theirs) in self._under_way.items():
                if other_tag == tag and theirs.shape == into.shape:
                    other.wait()
                    mine = into.clone()
                    into.copy_(theirs)
                    theirs.copy_(mine)

        return Later(pending, mix_up)


@caught_by("GRP-4")
class ForgetsTimeouts(CpuGlooAdapter):
    def make_backend(self, spec: zerolap.GroupSpec) -> Any:
        return dist.ProcessGroupGloo(spec.store, spec.rank, spec.size, timedelta(minutes=30))


@caught_by("COL-1", may="GRP-3 ORD-2 ORD-3 SIDE-1 DEV-8 CAP-2")
class SumsTwice(CpuGlooAdapter):
    def all_reduce(self, tensor: Tensor, *, op: Any, **options: Any) -> Pending:
        pending = super().all_reduce(tensor, op=op, **options)
        return Later(pending, lambda: tensor.mul_(2) if op == dist.ReduceOp.SUM else None)


@caught_by("COL-1", may="DEV-8")
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


@caught_by("COL-3", may="GRP-2 ORD-3")
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


_SCATTERED = "GRP-2 GRP-3 COL-5 COL-6 COL-9 ORD-1 ORD-2 ORD-3 ORD-5 ORD-6 SIDE-2"


@caught_by("COL-4", may=_SCATTERED)
class DropsTheLastOfOddSizes(_Scatters):
    def spoil(self, parts: Parts, into: Tensor) -> None:
        if into.numel() % 2:
            into[-1] = 0


@caught_by("COL-5", may="COL-6 ORD-6")
class FailsOnUnevenParts(_Scatters):
    def spoil(self, parts: Parts, into: Tensor) -> None:
        if not parts.is_equal and into.numel():
            into[0] += 1


@caught_by("COL-6", may="ORD-3 ORD-4")
class ChangesItsInput(_Scatters):
    def spoil(self, parts: Parts, into: Tensor) -> None:
        for part in parts.tensors:
            part.add_(1)


@caught_by("ORD-4")
class RoundsByLot(_Scatters):
    """Whole numbers have nothing to round, so sums of them are right."""

    def spoil(self, parts: Parts, into: Tensor) -> None:
        if into.is_floating_point():
            self._num = getattr(self, "_num", 0) + 1
            up = torch.nextafter(into, into.new_full((), float("inf")))
            into.copy_(torch.where((into != into.round()) & (self._num % 2 == 0), up, into))


@caught_by("ORD-1")
class MixesUpTags(CpuGlooAdapter):
    """The result of a collective that is overtaken by the next one is the next one's."""

    def __init__(self) -> None:
        super().__init__()
        self._under_way: dict[str, list[Tensor]] = {}

    def reduce_scatter(self, parts: Parts, *, into: Tensor, tag: int, group: dist.ProcessGroup, what: str) -> Pending:
        pending = super().reduce_scatter(parts, into=into, tag=tag, group=group, what=what)
        under_way = self._under_way.setdefault(group.group_name, [])
        under_way.append(into)

        def mix_up() -> None:
            del under_way[0]
            if under_way and into.numel():
                into[0] = under_way[0][0]

        return Later(pending, mix_up)


@caught_by("ORD-3", may="COL-1 GRP-3 ORD-2 SIDE-1 DEV-8 COL-2 CAP-2")
class DoesNotWait(CpuGlooAdapter):
    """An all-reduce that says it is done when it has begun."""

    def all_reduce(self, tensor: Tensor, *, op: Any, **options: Any) -> Pending:
        sent = tensor.clone()
        pending = super().all_reduce(sent, op=op, **options)
        self._kept = [*getattr(self, "_kept", []), pending]
        return Pending((), tensors=(), what="")


@caught_by("ORD-5", may="ORD-1")  # what it sends late may be taken for what it sends next
class SendsWhenItLikes(CpuGlooAdapter):
    """Rank 0 says that a reduce-scatter is done when it has received everything, though it has not sent anything yet."""

    def __init__(self) -> None:
        super().__init__(shares_memory=False)  # rank 0 sends messages of its own making
        self._sends = ThreadLane("sends")

    def reduce_scatter(self, parts: Parts, *, into: Tensor, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        if group.rank() != 0 or group.size() != 2:
            return super().reduce_scatter(parts, into=into, group=group, tag=tag, what=what)
        mine, theirs = parts.tensors
        received, number = torch.empty_like(mine), 4096 * tag
        works = [group.recv([received], 1, number)] if mine.numel() else []

        def send() -> None:
            time.sleep(0.01)
            group.send([theirs], 1, number).wait()

        if theirs.numel():
            self._sends.submit(send)
        return Pending(
            works,
            tensors=(parts, into),
            what=what,
            sent_bytes=theirs.nbytes,
            finish=lambda: torch.add(mine, received, out=into),
        )


class _Gathers(CpuGlooAdapter):
    def spoil(self, parts: Parts, rank: int) -> None:
        raise NotImplementedError

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, **options: Any) -> Pending:
        pending = super().all_gather(parts, group=group, **options)
        return Later(pending, lambda: self.spoil(parts, group.rank()))


@caught_by("COL-7", may="COL-8 COL-9 GRP-3 ORD-1 ORD-3 ORD-6")
class LosesItsOwnPart(_Gathers):
    def spoil(self, parts: Parts, rank: int) -> None:
        parts.tensors[rank].zero_()


@caught_by("COL-8", may="ORD-6")
class GathersEqualPartsOnly(_Gathers):
    def spoil(self, parts: Parts, rank: int) -> None:
        if not parts.is_equal:
            for part in parts.tensors:
                part.zero_()


@caught_by("COL-9", may="ORD-6")
class NeedsOneBuffer(_Gathers):
    def spoil(self, parts: Parts, rank: int) -> None:
        if parts.whole is None:
            for part in parts.tensors:
                part.zero_()


@caught_by("COL-10", may="OVL-18")
class SendsToTheNextOne(CpuGlooAdapter):
    """What an all-to-all brings from one rank lies where that of another belongs: byte by byte the other way round."""

    def all_to_all(self, sent: Parts, received: Parts, **options: Any) -> Pending:
        pending = super().all_to_all(sent, received, **options)

        def spoil() -> None:
            assert received.whole is not None
            received.whole.copy_(received.whole.flip(0))

        return Later(pending, spoil)


@caught_by("COL-5", may="BYTES-2")
class HangsOnEmptyParts(CpuGlooAdapter):
    """One rank waits for what nobody sends."""

    def reduce_scatter(self, parts: Parts, *, group: dist.ProcessGroup, **options: Any) -> Pending:
        if min(part.numel() for part in parts.tensors) == 0 and parts.nbytes and group.rank() == 0:
            time.sleep(1.3 * self.timeout(group).total_seconds())
        return super().reduce_scatter(parts, group=group, **options)


@caught_by("BYTES-1")
class CountsNoBytes(CpuGlooAdapter):
    def all_gather(self, parts: Parts, **options: Any) -> Pending:
        pending = super().all_gather(parts, **options)
        pending.sent_bytes = 0
        return pending


@caught_by("BYTES-2")
class SendsAllAsLongAsTheLongest(CpuGlooAdapter):
    """Pads parts of very different length, and says so."""

    def all_gather(self, parts: Parts, **options: Any) -> Pending:
        pending = super().all_gather(parts, **options)
        if 2 * parts.nbytes < parts.longest_nbytes * len(parts.tensors) or not all(p.numel() for p in parts.tensors):
            pending.sent_bytes = parts.longest_nbytes * (len(parts.tensors) - 1)
        return pending


@caught_by("CAP-1")
class BoastsOfItsFutures(CpuGlooAdapter):
    capabilities = _declaring(futures_complete_at_enqueue=True)


@caught_by("CAP-2")
class HasOneQueue(CpuGlooAdapter):
    """All groups share a queue, so ranks that start collectives in different orders wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self._queue = ThreadLane("queue")

    def all_reduce(self, tensor: Tensor, *, what: str, **options: Any) -> Pending:
        reduce = super().all_reduce
        work = self._queue.submit(lambda: reduce(tensor, what=what, **options).wait())
        return Pending([work], tensors=(tensor,), what=what)


# --- memory that is handed on -----------------------------------------------------------------------------------------


@caught_by("MEM-1", but_not_by="OVL-1")
class HandsOnPagesThatAreShared(CpuGlooAdapter):
    """Whole pages that a tensor touches, not those that are its own: what lies beside it is lost."""

    def recycler(self) -> Pages:
        class Outward(Pages):
            def discard(self, tensor: Tensor) -> None:
                super().discard(tensor)
                give_back((tensor.data_ptr() + tensor.nbytes) // 4096 * 4096, 4096)

        return Outward()


@caught_by("MEM-1", "OVL-15", but_not_by="OVL-1")
class HandsOnWhatIsInUseAgain(CpuGlooAdapter):
    """Forgets that what was filled again has its own memory still."""

    def recycler(self) -> Pages:
        class Forgetful(Pages):
            def refill(self, tensor: Tensor) -> None:
                start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                own = [spare for spare in self._spare if start <= spare.start < end]
                super().refill(tensor)
                self._spare += own

        return Forgetful()
