"""Collectives that go wrong as a fault says. Everything here is in the order of the device, and nothing is looked at on the host."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.faults.product import Fault
from zerolap import Adapter, CollectiveError, Parts, Pending

INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LATE_SECONDS = 0.03
OF_THE_WAIT = {"out_of_order", "waits_elsewhere", "under_way"}


@dataclass(eq=False, slots=True)
class Call:
    """A collective that was asked for."""

    verb: str
    outs: list[Tensor]
    ins: list[Tensor]
    group: dist.ProcessGroup
    use: int
    number: int  # of its group
    tag: int = 0
    is_max: bool = False
    root: int | None = None
    start: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)
    is_done: bool = False

    @property
    def first(self) -> Tensor:
        return self.outs[0]


class Uses:
    """What conditions of use are about: how often, since when, by whom."""

    def __init__(self) -> None:
        self.born = time.monotonic()
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count

    def holds(self, name: str, value: Any, use: int) -> bool | None:
        """None for what is about something else."""
        match name:
            case "nth":
                return use == value
            case "from_nth":
                return use >= value
            case "every":
                return use % value == 0
            case "after_seconds":
                return time.monotonic() - self.born > value
            case "off_thread":
                return threading.current_thread() is not threading.main_thread()
        return None


def leak(kind: str, kept: list[Any], like: Tensor | None = None) -> None:
    """Keep something more, for ever."""
    if kind == "leaks_memory":
        kept.append(like.clone() if like is not None and like.numel() > 1000 else torch.ones(250_000))
    elif kind == "leaks_objects":
        kept.append([len(kept)])
    elif kind == "leaks_descriptors":
        kept.append(os.open(os.devnull, os.O_RDONLY))
    elif kind == "leaks_threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class Wrapped(Pending):
    """A collective with something around its wait. Whoever waits again waits for nothing."""

    __slots__ = ("_around", "_inner")

    def __init__(self, inner: Pending, around: Callable[[Pending], None]) -> None:
        super().__init__((), tensors=(), what="", sent_bytes=inner.sent_bytes)
        self._inner, self._around = inner, around

    def wait(self) -> None:
        around, self._around = self._around, Pending.wait
        around(self._inner)


class FaultyCollectives(Adapter):
    """Mixed into an adapter; ``fault`` says what goes wrong."""

    fault: Fault

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept: list[Any] = []
        self.uses = Uses()
        self._active: list[Call] = []
        self._numbers: dict[str, int] = {}
        self._last: dict[Any, Tensor] = {}

    # --- what is asked for ---

    def all_reduce(self, tensor: Tensor, *, op: Any, group: dist.ProcessGroup, what: str) -> Pending:
        start = lambda: super(FaultyCollectives, self).all_reduce(tensor, op=op, group=group, what=what)  # noqa: E731
        return self._try("all_reduce", start, [tensor], [tensor], group, is_max=op == dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor, *, src: Any, group: dist.ProcessGroup, what: str) -> Pending:
        start = lambda: super(FaultyCollectives, self).broadcast(tensor, src=src, group=group, what=what)  # noqa: E731
        return self._try("broadcast", start, [tensor], [tensor], group, root=src)

    def reduce_scatter(self, parts: Parts, *, into: Tensor, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        start = lambda: super(FaultyCollectives, self).reduce_scatter(  # noqa: E731
            parts, into=into, group=group, tag=tag, what=what
        )
        return self._try("reduce_scatter", start, [into], list(parts.tensors), group, tag=tag)

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        start = lambda: super(FaultyCollectives, self).all_gather(parts, group=group, tag=tag, what=what)  # noqa: E731
        outs = list(parts.tensors)
        return self._try("all_gather", start, outs, [outs[group.rank()]], group, tag=tag)

    def _try(
        self,
        verb: str,
        start: Callable[[], Pending],
        outs: list[Tensor],
        ins: list[Tensor],
        group: dist.ProcessGroup,
        **more: Any,
    ) -> Pending:
        if verb != self.fault.verb:
            return start()
        number = self._numbers.setdefault(group.group_name, len(self._numbers) + 1)
        call = Call(verb, outs, ins, group, self.uses.next(), number, **more)
        if not all(self._holds_at_start(call, *condition) for condition in self.fault.conditions):
            return self._noted(call, start())
        return self._go_wrong(call, start)

    def _noted(self, call: Call, pending: Pending) -> Pending:
        """Known to be under way, for those that come meanwhile."""
        self._active.append(call)

        def around(inner: Pending) -> None:
            try:
                inner.wait()
            finally:
                self._over(call)
            self._remember(call)

        return Wrapped(pending, around)

    def _over(self, call: Call) -> None:
        call.is_done = True
        if call in self._active:
            self._active.remove(call)

    def _remember(self, call: Call) -> None:
        if self.fault.effect[0] == "stale" and sum(t.nbytes for t in call.outs) < 2**20:
            self._last[self._key(call)] = torch.cat([t.reshape(-1) for t in call.outs])

    def _key(self, call: Call) -> Any:
        return (tuple(t.numel() for t in call.outs), call.first.dtype, call.is_max)

    # --- conditions ---

    def _holds_at_start(self, call: Call, name: str, value: Any) -> bool:
        of_use = self.uses.holds(name, value, call.use)
        if of_use is not None:
            return of_use
        tensors, group = call.outs, call.group
        sizes = [t.numel() for t in (call.ins if call.verb == "reduce_scatter" else tensors)]
        match name:
            case "bytes_over":
                return sum(t.nbytes for t in tensors) > value
            case "bytes_under":
                return 0 < sum(t.nbytes for t in tensors) < value
            case "multiple_of":
                return call.first.numel() > 0 and call.first.numel() % value == 0
            case "odd":
                return call.first.numel() > 1 and call.first.numel() % 2 == 1
            case "dtype":
                return call.first.dtype == getattr(torch, value)
            case "rank":
                return group.rank() == value
            case "root":
                return call.root == value
            case "group_number":
                return call.number >= value
            case "group_reversed" | "group_gapped":
                return self.shape_of(group.group_name) == name
            case "in_flight":
                return len(self._active) >= value
            case "other_group":
                return any(other.group.group_name != group.group_name for other in self._active)
            case "offset":
                return any(t.storage_offset() for t in tensors)
            case "tag_over":
                return call.tag >= value
            case "uneven":
                return len(set(sizes)) > 1
            case "has_empty":
                return 0 in sizes and any(sizes)
            case "scattered":
                return Parts.of(call.ins if call.verb == "reduce_scatter" else tensors).whole is None
            case "is_max":
                return call.is_max
            case "scalar":
                return not call.first.dim()
        return True  # of the wait

    def _holds_at_wait(self, call: Call, name: str, value: Any) -> bool:
        match name:
            case "out_of_order":
                return bool(self._active) and any(other.use < call.use for other in self._active)
            case "waits_elsewhere":
                return threading.get_ident() != call.thread
            case "under_way":
                return time.monotonic() - call.start > value
        return True

    def shape_of(self, group_name: str) -> str:
        return ""

    # --- effects ---

    def _go_wrong(self, call: Call, start: Callable[[], Pending]) -> Pending:
        effect, value = self.fault.effect
        if effect == "counts_bytes":
            pending = start()
            pending.sent_bytes = int(pending.sent_bytes * value)
            return self._noted(call, pending)
        before = [t.clone() for t in call.outs] if effect in ("leaves_what_was_there", "arrives_late") else []
        if effect == "another_order":
            before = self._in_another_order(call)
        pending = start()
        self._active.append(call)

        def around(inner: Pending) -> None:
            names = {name for name, _ in self.fault.conditions}
            try:
                self._wait(call, inner, is_on=not names & OF_THE_WAIT)
                is_on = all(self._holds_at_wait(call, *condition) for condition in self.fault.conditions)
            finally:
                self._over(call)
            if is_on:
                with torch.no_grad():
                    self._spoil(call, before)
            self._remember(call)

        return Wrapped(pending, around)

    def _wait(self, call: Call, inner: Pending, *, is_on: bool) -> None:
        effect, value = self.fault.effect
        if not is_on:
            inner.wait()
        elif effect == "delays":
            time.sleep(value)
            inner.wait()
        elif effect == "hangs":
            time.sleep(10_000)
        elif effect == "fails":
            inner.wait()
            raise CollectiveError("out of tickets")
        elif effect == "hides_errors":
            with contextlib.suppress(Exception):
                inner.wait()
        elif effect == "another_error":
            try:
                inner.wait()
            except Exception as error:
                raise {"KeyError": KeyError, "OSError": OSError, "TimeoutError": TimeoutError}.get(value, RuntimeError)(
                    str(error)
                ) from error
        else:
            inner.wait()

    def _spoil(self, call: Call, before: Sequence[Tensor]) -> None:
        effect, value = self.fault.effect
        received = [t for t in call.outs if t.numel()]
        if effect in LEAKS:
            leak(effect, self.kept, call.first)
        elif not received:
            return
        elif effect in AT_A_PLACE:
            tensor, place = _placed(received, value)
            AT_A_PLACE[effect](tensor.reshape(-1) if tensor.dim() == 0 else tensor, place)
        elif effect in EVERYWHERE:
            for tensor in received:
                if (effect.startswith("integers")) != tensor.is_floating_point():
                    EVERYWHERE[effect](tensor)
        elif effect == "through":
            for tensor in received:
                if tensor.is_floating_point():
                    tensor.copy_(tensor.to(getattr(torch, value)))
        elif effect == "loses_the_tail":
            last = received[-1].reshape(-1)
            last[-min(value, last.numel()) :] = 0
        elif effect in ("leaves_what_was_there", "another_order"):
            for tensor, old in zip(call.outs, before, strict=bool(before)):
                tensor.copy_(old)
        elif effect == "stale":
            last = self._last.get(self._key(call))
            if last is not None:
                for tensor, old in zip(call.outs, last.split([t.numel() for t in call.outs]), strict=True):
                    tensor.copy_(old.reshape(tensor.shape))
        elif effect == "swaps_results":
            self._swap_with_another(call)
        elif effect == "swaps_parts":
            same = [t for t in call.outs if t.numel() == call.outs[-1].numel()]
            if len(same) > 1:
                _swap(same[0], same[-1])
        elif effect == "writes_beyond":
            _write_beyond(received[-1])
        elif effect == "changes_its_input":
            others = [t for r, t in enumerate(call.ins) if t.numel() and r != call.group.rank()]
            if others:
                _flip(*_placed(others, value))
        elif effect == "arrives_late":
            self._let_it_come_late(call, before)

    def _swap_with_another(self, call: Call) -> None:
        for other in self._active:
            if other.verb == call.verb and self._key(other) == self._key(call) and other.outs[0] is not call.outs[0]:
                for mine, theirs in zip(call.outs, other.outs, strict=True):
                    mine.copy_(theirs)  # which has what was there before, or has come already
                return

    def _let_it_come_late(self, call: Call, before: Sequence[Tensor]) -> None:
        final = [t.clone() for t in call.outs]
        for tensor, old in zip(call.outs, before, strict=True):
            tensor.copy_(old)
        outs = list(call.outs)

        def come() -> None:
            time.sleep(LATE_SECONDS)
            with torch.no_grad():
                for tensor, new in zip(outs, final, strict=True):
                    tensor.copy_(new)

        threading.Thread(target=come, daemon=True).start()

    def _in_another_order(self, call: Call) -> list[Tensor]:
        """The sum of what all ranks have, the last rank first; each rank's part of it for a reduce-scatter."""
        group, size = call.group, call.group.size()
        totals = []
        for part in call.ins:
            total = None
            for root in reversed(range(size)):
                sent = part.clone() if group.rank() == root else torch.empty_like(part)
                if sent.numel():
                    group.broadcast(sent, root=root).wait()
                total = sent if total is None else total + sent
            totals.append(total)
        mine = totals[group.rank()] if call.verb == "reduce_scatter" else totals[0]
        assert mine is not None
        return [mine]


LEAKS = ("leaks_memory", "leaks_objects", "leaks_descriptors", "leaks_threads")


def _placed(tensors: Sequence[Tensor], share: float) -> tuple[Tensor, int]:
    """A tensor, and a place in it, by the share of all elements that lie before it."""
    total = sum(t.numel() for t in tensors)
    place = min(total - 1, math.floor(share * total))
    for tensor in tensors:
        if place < tensor.numel():
            return tensor, place
        place -= tensor.numel()
    raise AssertionError


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTS[tensor.element_size()]) if tensor.dtype != torch.bool else tensor


def _flip(tensor: Tensor, place: int) -> None:
    bits = _bits(tensor)
    bits[place : place + 1] ^= 1


def _zero(tensor: Tensor, place: int) -> None:
    tensor[place : place + 1] = 0


def _add_one(tensor: Tensor, place: int) -> None:
    tensor[place : place + 1] += 1


def _swap_neighbours(tensor: Tensor, place: int) -> None:
    a = min(place, tensor.numel() - 2)
    if a >= 0:
        tensor[a : a + 2] = tensor[a : a + 2].flip(0)


AT_A_PLACE: dict[str, Callable[[Tensor, int], None]] = {
    "flips_a_bit": _flip,
    "zeroes": _zero,
    "adds_one": _add_one,
    "swaps_neighbours": _swap_neighbours,
}


def _put(tensor: Tensor, where: Tensor, value: Any) -> None:
    tensor.copy_(torch.where(where, torch.full_like(tensor, value), tensor))


def _saturate(tensor: Tensor) -> None:
    if tensor.dtype == torch.int64:
        tensor.clamp_(-(2**31), 2**31 - 1)


def _as_doubles(tensor: Tensor) -> None:
    if tensor.dtype == torch.int64:
        tensor.copy_(tensor.double())


EVERYWHERE: dict[str, Callable[[Tensor], None]] = {
    "loses_negative_zero": lambda t: _put(t, t == 0, 0.0),
    "loses_nan": lambda t: _put(t, t.isnan(), 0.0),
    "loses_nan_payload": lambda t: _put(t, t.isnan(), math.nan),
    "loses_infinity": lambda t: t.clamp_(torch.finfo(t.dtype).min, torch.finfo(t.dtype).max),
    "flushes_denormals": lambda t: _put(t, t.abs() < torch.finfo(t.dtype).tiny, 0.0),
    "integers_saturate": _saturate,
    "integers_as_doubles": _as_doubles,
}


def _swap(a: Tensor, b: Tensor) -> None:
    mine = a.clone()
    a.copy_(b)
    b.copy_(mine)


def _write_beyond(tensor: Tensor) -> None:
    """The element behind the last, if the memory goes on there."""
    end = tensor.storage_offset() + tensor.numel()
    if end < tensor.untyped_storage().nbytes() // tensor.element_size():
        tensor.as_strided((1,), (1,), end).fill_(1)
