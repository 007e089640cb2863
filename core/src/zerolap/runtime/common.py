"""What the parts of one engine share: names, the lane, groups, the probe, failures. It does not know the engine, nor decides anything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from zerolap._torch import GradBucket
from zerolap.backend.base import Adapter
from zerolap.backend.lanes import Lane, Pending, Side, forget_locals
from zerolap.errors import CollectiveError, ZerolapError
from zerolap.runtime.failures import Failures
from zerolap.runtime.gradient_memory import GradientMemory
from zerolap.runtime.probe import IN_CHECK, Probe
from zerolap.schedule.wire_format import Wire

T = TypeVar("T")

Hook = Callable[[Any, GradBucket], Future[Tensor]]


@dataclass(slots=True, kw_only=True)
class Common:
    """Of one engine, which ends with the last reference to it: so nothing here leads back to it."""

    me: str
    adapter: Adapter
    lane: Lane
    reduce_side: Side
    gather_side: Side
    timeout: float  # of a wait, in seconds
    failures: Failures
    probe: Probe
    names: Mapping[Tensor, str]  # of parameters, as the module has them
    is_lazy: bool
    is_alone: bool  # there is no other rank
    waits_on_host: bool  # what one thread has waited for is there for all
    asks_for_use: bool  # parameters may be unused, on this rank or on all
    group: dist.ProcessGroup | None  # that the lane uses; None once it was given up
    hook: Hook | None = None  # reduces, where that is somebody else's
    wire: Wire = field(default_factory=Wire)  # in what is sent
    tracks_norm: bool = False  # of the mean gradients, as they are used
    norm_dtype: torch.dtype = torch.float32  # the most exact in which they can be added up here
    gradient_memory: GradientMemory | None = None  # where gradients are given back as soon as they were used
    # Gathers, by bucket. Apart from the buckets: they go on when the engine is dropped, and must not keep it.
    in_flight: dict[int, Pending] = field(default_factory=dict)

    def close(self) -> None:
        """End the lane; groups close with the last reference to them."""
        self.lane.close()
        if self.gradient_memory is not None and self.failures.first is not None:
            self.gradient_memory.failed()
        forget_locals(self.failures.first)

    def raise_if_failed(self) -> None:
        """Raise what has failed earlier, if anything has."""
        if self.failures.first is not None:
            if not self.failures.is_forked:
                self.close()  # not by the lane itself: a job put behind the end of the lane would never be answered
            self.failures.raise_earlier()

    def raise_failure(self) -> None:
        """Raise what has failed, if anything has; on the training thread. At first as it is, then as what failed earlier."""
        self.failures.raise_untold()
        self.raise_if_failed()

    def refuse_scaling(self) -> None:
        """RuntimeError if a loss scaler, which is about to unscale gradients, cannot be right."""
        if self.wire.gradient_feedback:
            raise RuntimeError(
                "wire with gradient_feedback=True adds what was rounded off the last gradients to the next ones, which a loss scaler may "
                "have given another scale; use gradient_feedback=False with a scaler"
            )

    def run_on_lane(self, fn: Callable[[], T], where: str = IN_CHECK) -> T:
        """Run something on the lane, and wait for it; if it fails, so has the overlap. On the training thread."""
        with self.probe.blocked(where):
            try:
                return self.lane.run(partial(self._noting_failure, fn))
            except ZerolapError:
                self.raise_failure()
                raise

    def do_quietly(self, fn: Callable[[], None]) -> None:
        """On the lane: do something whose failure is raised when backward ends. See [Note: failures]."""
        if self.failures.first is None:
            with suppress(ZerolapError):  # which was noted
                self._noting_failure(fn)

    def over_all_ranks(self, value: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        """Reduce a small tensor; on the lane, the one thread that uses this group."""
        if not self.is_alone:
            assert self.group is not None
            self.adapter.all_reduce(value, op=op, group=self.group, what=f"{self.me}: {what}").wait()
        return value

    def _noting_failure(self, fn: Callable[[], T]) -> T:
        try:
            return fn()
        except Exception as error:
            failure = self.failures.note(error)
            if failure is error:
                raise
            raise failure from error


class Observer:
    """Somebody who is told what happens, and may raise, or have an update left out. As it stands it does nothing."""

    def backward_begins(self) -> None:
        """On the training thread."""

    def may_update(self) -> bool:
        """Whether step(), which is about to update, shall; on the training thread."""
        return True


def let_end(in_flight: dict[int, Pending], group: dist.ProcessGroup) -> None:
    """An engine was dropped, which does not wait: what it still sends goes on, or other ranks would wait for it in vain."""

    def wait(gathers: list[Pending], group: dist.ProcessGroup) -> None:
        with suppress(CollectiveError):  # there is nobody left to tell
            for pending in gathers:
                pending.wait()

    if in_flight:
        args = (list(in_flight.values()), group)
        threading.Thread(target=wait, args=args, name="zerolap-last-gathers", daemon=True).start()
