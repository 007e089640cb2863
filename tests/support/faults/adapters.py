"""Adapters that have a fault: of a host device and of the simulated one with streams; lanes, clocks, groups and facts that go wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

import zerolap
from support.faults.collectives import LEAKS, FaultyCollectives, Uses, Wrapped, leak
from support.faults.product import Fault
from zerolap import Adapter, Pending
from zerolap._torch import under
from zerolap.backend.streams import StreamLane
from zerolap_cpu_gloo import CpuGlooAdapter
from zerolap_cpu_gloo.pages import give_back

_ERRORS = {"KeyError": KeyError, "OSError": OSError}


class FaultyLane:
    """Around a lane of either kind."""

    def __init__(self, inner: Any, fault: Fault, number: int, kept: list[Any]) -> None:
        self._inner, self._fault, self._number, self._kept = inner, fault, number, kept
        self._uses = Uses()
        self._has_failed = False
        self._is_closed = False
        self._last: Any = None
        self._held: tuple[Callable[[], Any], Future[Any]] | None = None
        self._num_queued = 0

    def _is_on(self) -> bool:
        use = self._uses.next()
        for name, value in self._fault.conditions:
            of_use = self._uses.holds(name, value, use)
            holds = (
                of_use
                if of_use is not None
                else self._number >= value
                if name == "lane_number"
                else self._num_queued >= value
                if name == "queued"
                else True
            )
            if not holds:
                return False
        return True

    def _gives_as_said(self, value: Any) -> bool:
        kinds = {"tensor": isinstance(value, Tensor), "tuple": isinstance(value, tuple | list), "none": value is None}
        return all(kinds[wanted] for name, wanted in self._fault.conditions if name == "gives")

    def _spoiled(self, fn: Callable[[], Any]) -> Callable[[], Any]:
        effect, value = self._fault.effect

        def run() -> Any:
            if effect == "skips" and not any(name == "gives" for name, _ in self._fault.conditions):
                return None
            if effect == "delays":
                time.sleep(value)
            elif effect == "hangs":
                time.sleep(10_000)
            elif effect in LEAKS:
                leak(effect, self._kept)
            context = torch.enable_grad() if effect == "records_gradients" else contextlib.nullcontext()
            try:
                with context:
                    given = fn()
            except Exception as error:
                if effect in ("hides_errors", "goes_on_after_errors"):
                    return None
                if effect == "another_error":
                    raise _ERRORS.get(value, RuntimeError)(str(error)) from error
                raise
            if not self._gives_as_said(given):
                return given
            if effect == "runs_twice":
                fn()
            elif effect in ("loses_the_result", "skips"):
                return None
            elif effect == "gives_the_last_result":
                given, self._last = self._last, given
            return given

        return run

    def submit(self, fn: Callable[[], Any]) -> Future[Any]:
        effect = self._fault.effect[0]
        self._num_queued += 1

        def counted() -> Any:
            try:
                return fn()
            finally:
                self._num_queued -= 1

        if self._is_closed and effect == "runs_after_close" and self._is_on():
            return _done(fn())
        held = self._take_held()
        if not self._is_on():
            future = self._inner.submit(counted)
        elif effect == "close_drops":
            return _never(self, counted)
        elif effect == "swaps_order" and held is None:
            promise: Future[Any] = Future()
            self._held = (counted, promise)
            return promise
        elif effect == "done_early":
            future = self._early(counted)
        elif effect == "ignores_its_caller":
            future = _done(self._beside(counted))
        else:
            future = self._inner.submit(self._spoiled(counted))
        self._run_held(held)
        return future

    def run(self, fn: Callable[[], Any]) -> Any:
        effect = self._fault.effect[0]
        held = self._take_held()
        self._run_held(held)
        if not self._is_on() or effect in ("close_drops", "swaps_order", "close_fails", "runs_after_close"):
            return self._inner.run(fn)
        if effect == "done_early":
            return self._inner._start(fn, None) if isinstance(self._inner, StreamLane) else self._early(fn).wait()
        if effect == "ignores_its_caller":
            return self._beside(fn)
        return self._inner.run(self._spoiled(fn))

    def _take_held(self) -> Any:
        held, self._held = self._held, None
        return held

    def _run_held(self, held: Any) -> None:
        if held is not None:
            fn, promise = held
            self._inner.submit(lambda: promise.set_result(fn()))

    def _early(self, fn: Callable[[], Any]) -> Future[Any]:
        if isinstance(self._inner, StreamLane):
            value = self._inner._start(fn, None)
            future: Future[Any] = Future(devices=[self._inner._device])
            future.set_result(value)
            return future
        self._inner.submit(fn)
        return _done(None)

    def _beside(self, fn: Callable[[], Any]) -> Any:
        with under(self._inner._stream), torch.no_grad():
            return fn()

    def as_caller(self) -> Any:
        return self._inner.as_caller()

    def is_caller(self) -> bool:
        return bool(self._inner.is_caller())

    def close(self) -> None:
        if self._is_closed and self._fault.effect[0] == "close_fails" and self._is_on():
            raise RuntimeError("this lane is closed")
        self._is_closed = True
        self._run_held(self._take_held())
        self._inner.close()


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _never(lane: FaultyLane, fn: Callable[[], Any]) -> Future[Any]:
    """Runs when somebody waits, and not if the lane is closed before."""
    outcome: Future[Any] = Future()

    def run() -> None:
        time.sleep(0.05)
        if not lane._is_closed:
            outcome.set_result(fn())

    lane._inner.submit(run)
    return outcome


class FaultySide:
    def __init__(self, inner: Any, fault: Fault, kept: list[Any]) -> None:
        self._inner, self._fault, self._kept, self._uses = inner, fault, kept, Uses()
        self._num_active = 0

    def _is_on(self) -> bool:
        use = self._uses.next()
        return all(
            self._num_active >= value if name == "in_flight" else self._uses.holds(name, value, use) is not False
            for name, value in self._fault.conditions
        )

    def start(self, fn: Callable[[], Pending]) -> Pending:
        effect, value = self._fault.effect
        is_on = self._is_on()
        self._num_active += 1
        if not is_on:
            return self._counted(self._inner.start(fn))
        if effect == "delays":
            time.sleep(value)
        elif effect == "hangs":
            time.sleep(10_000)
        elif effect in LEAKS:
            leak(effect, self._kept)
        elif effect == "ignores_its_caller":
            with torch.Stream(device=self._inner._device):
                return self._inner.start(fn)
        pending = self._counted(self._inner.start(fn))
        if effect == "counts_bytes":
            pending.sent_bytes = int(pending.sent_bytes * value)
        if effect == "arrives_late":
            self._kept.append(pending)
            return Pending((), tensors=(), what="", sent_bytes=pending.sent_bytes)
        return pending

    def _counted(self, pending: Pending) -> Pending:
        def end(inner: Pending) -> None:
            self._num_active -= 1
            inner.wait()

        if any(name == "in_flight" for name, _ in self._fault.conditions):
            return _Again(pending, end)
        return pending


class _Again(Wrapped):
    """Whoever waits again waits again."""

    __slots__ = ()

    def wait(self) -> None:
        around, self._around = self._around, Pending.wait
        around(self._inner)


class FaultyClock(Adapter):
    """``moment`` and ``seconds_between`` that go wrong."""

    fault: Fault
    kept: list[Any]

    def seconds_between(self, start: Any, end: Any) -> float:
        seconds = super().seconds_between(start, end)
        if self.fault.verb != "clock":
            return seconds
        uses = self.__dict__.setdefault("_clock_uses", Uses())
        use = uses.next()
        for name, value in self.fault.conditions:
            of_use = uses.holds(name, value, use)
            if not (of_use if of_use is not None else abs(seconds) > value):
                return seconds
        effect, value = self.fault.effect
        if effect in LEAKS:
            leak(effect, self.kept)
        match effect:
            case "scales":
                return seconds * value
            case "stands_still":
                return 0.0
            case "runs_backwards":
                return -seconds
            case "jumps":
                return seconds + value
            case "wraps":
                return seconds % value
            case "is_coarse":
                return round(seconds / value) * value
        return seconds


class FaultyDevice(Adapter):
    """``synchronize``, groups and facts that go wrong."""

    fault: Fault
    kept: list[Any]

    def synchronize(self) -> None:
        if self.fault.verb != "synchronize":
            return super().synchronize()
        uses = self.__dict__.setdefault("_sync_uses", Uses())
        use = uses.next()
        if all(uses.holds(name, value, use) for name, value in self.fault.conditions):
            effect = self.fault.effect[0]
            if effect == "skips":
                return None
            if effect == "one_stream_only":
                return torch.accelerator.current_stream().synchronize()
            leak(effect, self.kept)
        return super().synchronize()

    # --- groups ---

    def open_group(self, like: dist.ProcessGroup, *, name: str) -> dist.ProcessGroup:
        shapes = self.__dict__.setdefault("_shapes", {})
        ranks = dist.get_process_group_ranks(like)
        shape = "group_reversed" if ranks != sorted(ranks) else "group_gapped" if ranks != [*range(len(ranks))] else ""
        number = len(shapes) + 1
        is_on = self.fault.verb == "group" and all(
            number >= value if condition == "group_number" else shape == condition
            for condition, value in self.fault.conditions
        )
        effect, value = self.fault.effect
        if is_on and effect == "cuts_names":
            name = name[:value]
        if is_on and effect == "hangs":
            time.sleep(10_000)
        if is_on and effect == "delays":
            time.sleep(value)
        if is_on and effect in LEAKS:
            leak(effect, self.kept)
        if is_on and effect == "swaps_ranks":
            group = super().open_group(_Reversed(like), name=name)  # type: ignore[arg-type]
        elif is_on and effect == "forgets_timeouts":
            self._factor = value
            group = super().open_group(like, name=name)
            del self._factor
        else:
            group = super().open_group(like, name=name)
        shapes[group.group_name] = shape
        if is_on:
            self.__dict__.setdefault("_bad_groups", []).append(group)
        return group

    def make_backend(self, spec: zerolap.GroupSpec) -> Any:
        factor = getattr(self, "_factor", None)
        return super().make_backend(
            spec if factor is None else dataclasses.replace(spec, timeout=spec.timeout * factor)
        )

    def shape_of(self, group_name: str) -> str:
        return str(self.__dict__.get("_shapes", {}).get(group_name, ""))

    def close_group(self, group: dist.ProcessGroup) -> None:
        bad: list[Any] = self.__dict__.get("_bad_groups", [])
        closed = self.__dict__.setdefault("_closed", set())
        effect = self.fault.effect[0]
        if group in bad and effect == "close_fails_twice" and group.group_name in closed:
            raise KeyError(group.group_name)
        closed.add(group.group_name)
        super().close_group(group)
        if group in bad and effect == "close_breaks_others":
            self._is_broken = True

    def _reduced(self, tensor: Tensor, pending: Pending) -> Pending:
        def around(inner: Pending) -> None:
            inner.wait()
            tensor.zero_()

        return Wrapped(pending, around) if getattr(self, "_is_broken", False) else pending

    def reduce_scatter(self, parts: zerolap.Parts, *, into: Tensor, **options: Any) -> Pending:
        return self._reduced(into, super().reduce_scatter(parts, into=into, **options))


class _Reversed:
    """A group, as the last rank would see it if it were the first."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def rank(self) -> int:
        return int(self._inner.size() - 1 - self._inner.rank())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FaultyRecycler:
    def __init__(self, inner: Any, fault: Fault, kept: list[Any]) -> None:
        self._inner, self._fault, self._kept, self._uses = inner, fault, kept, Uses()

    def _is_on(self, nbytes: int) -> bool:
        use = self._uses.next()
        return all(
            nbytes > value if name == "bytes_over" else self._uses.holds(name, value, use) is not False
            for name, value in self._fault.conditions
        )

    def discard(self, tensor: Tensor) -> None:
        effect, value = self._fault.effect
        is_on = self._is_on(tensor.nbytes)
        self._inner.discard(tensor)
        if not is_on:
            return
        if effect in LEAKS:
            leak(effect, self._kept)
        elif effect == "delays":
            time.sleep(value)
        elif effect == "fails":
            raise MemoryError("no more pages")
        elif effect == "touches_neighbours":
            give_back((tensor.data_ptr() + tensor.nbytes) // 4096 * 4096, 4096)

    def refill(self, tensor: Tensor) -> None:
        self._inner.refill(tensor)
        if self._is_on(tensor.nbytes) and self._fault.effect[0] == "loses_a_page":
            page, data = -(-tensor.data_ptr() // 4096) * 4096, tensor.data_ptr()

            def lose() -> None:
                time.sleep(0.002)
                if page + 4096 <= data + tensor.nbytes:
                    give_back(page, 4096)

            import threading

            threading.Thread(target=lose, daemon=True).start()

    def release(self, most_bytes: int = 0) -> None:
        if self._fault.effect[0] == "keeps_after_release" and self._is_on(2**30):
            return
        self._inner.release(most_bytes)

    @property
    def num_bytes(self) -> int:
        number = int(self._inner.num_bytes)
        if self._fault.effect[0] == "counts_bytes" and self._is_on(2**30):
            number = int(number * self._fault.effect[1]) if self._fault.effect[1] > 0 else -1
        return number


# --- the adapters -------------------------------------------------------------------------------------------------------


class _Ours(FaultyClock, FaultyDevice, FaultyCollectives):
    """What an adapter of either kind has, in front of the real one."""

    def shape_of(self, group_name: str) -> str:
        return FaultyDevice.shape_of(self, group_name)

    def lane(self, name: str, *, device: torch.device) -> Any:
        lane = super().lane(name, device=device)
        if self.fault.verb != "lane":
            return lane
        self._num_lanes = getattr(self, "_num_lanes", 0) + 1
        return FaultyLane(lane, self.fault, self._num_lanes, self.kept)

    def side(self, device: torch.device) -> Any:
        side = super().side(device)
        return side if self.fault.verb != "side" else FaultySide(side, self.fault, self.kept)

    def recycler(self) -> Any:
        recycler = super().recycler()
        return recycler if self.fault.verb != "recycler" else FaultyRecycler(recycler, self.fault, self.kept)


def make(fault: Fault) -> Adapter:
    """A new adapter with this fault, on a rank."""
    real: type[Any] = CpuGlooAdapter
    if fault.device == "stream":
        import zerolap_sim

        zerolap_sim.install()
        real = zerolap_sim.SimAdapter
    made: Adapter = type("Faulty", (_Ours, real), {"fault": fault, **_facts(fault, real)})()
    return made


def _facts(fault: Fault, real: type[Any]) -> dict[str, Any]:
    if fault.verb != "facts":
        return {}
    effect, value = fault.effect

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError("no such file: libacme.so")

    capabilities = real.capabilities
    match effect:
        case "exact_cut":
            return {"capabilities": dataclasses.replace(capabilities, exact_cut=value)}
        case "has_float64" | "one_issue_order" | "futures_complete_at_enqueue":
            return {"capabilities": dataclasses.replace(capabilities, **{effect: not getattr(capabilities, effect)})}
        case "device":
            return {"device": lambda self, local_rank: torch.device(value)}
        case "name":
            return {"name": value}
        case "why_unavailable":
            return {effect: fail if value == "raises" else lambda self: value}
        case "diagnose":
            return {effect: fail if value == "raises" else lambda self: value if value is None else [value]}
        case "stage_sizes":
            return {effect: lambda self, num_ranks: (num_ranks, value) if num_ranks > 2 and value > 1 else (1,)}
        case "kept_bytes" | "max_receive_bytes":
            return {effect: property(lambda self: value)}
    return {"release_memory": fail if value == "raises" else _zeroes}


def _zeroes(self: Any) -> None:
    """Takes memory back that is in use: the largest there is."""
    import gc

    tensors = [o for o in gc.get_objects() if isinstance(o, Tensor) and o.numel() > 1000 and not o.requires_grad]
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()
