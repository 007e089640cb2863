"""The probe: what is noted of an engine as it goes, and how much it costs nobody. It decides nothing, and nothing waits for it.

The engine and its buckets append what clocks say to the lists of the update at hand: some hundred nanoseconds for a bucket, and no
call of a function. Updates are summed up when somebody asks, or when there are many. Where waiting happens on streams the host knows
nothing of it: only a recorder does, which is here while a trace is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.autograd import profiler

from zerolap._torch import is_profiling
from zerolap.backend.lanes import Pending, Side, Waiter

T = TypeVar("T")

AT_BACKWARDS_END = "backward's end"
IN_STEP = "step()"
IN_CHECK = "clipping, unscaling or an audit"

# What a verb of the lane is in a trace. Starting a gather takes the lane's time as waiting for a reduction does.
_ON_LANE = {
    "finish_reduce": ("wait", "reduce"),
    "gather": ("wait", "gather"),
    "step": ("step", None),
    "agree": ("agree", None),
    "migrate": ("migrate", None),
}
_NOTHING = nullcontext()
MOST_UPDATES = 256  # that are kept before they are summed up

Interval = tuple[float, float]


class Recorder(Protocol):
    """Where moments go while a trace is taken."""

    update: int

    def begin(self, kind: str, bucket: int | None = None, *, name: str | None = None, ahead: int = 0) -> Any: ...
    def end(self, noted: Any, cut: object | None = None) -> None: ...
    def mark(self, kind: str, bucket: int | None) -> None: ...
    def moment(self) -> object: ...
    def name_of(self, param: Tensor | None) -> str | None: ...
    def start(self, kind: str, bucket: int, side: Side, fn: Callable[[], Pending]) -> Pending: ...
    def reducing(self, bucket: int, start: Callable[[], Waiter[Tensor]]) -> Waiter[Tensor]: ...


@dataclass(slots=True)
class Times:
    """Of one update, on this rank."""

    # When collectives began and ended: by whoever starts them and waits for them. Which is whose does not matter. Nobody sees a lazy
    # gather end before it is needed, so it is not here.
    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    steps: list[Interval] = field(default_factory=list)  # updates of shards; by the lane
    blocked: list[Interval] = field(default_factory=list)  # the training thread has waited for the lane
    used: list[Interval] = field(default_factory=list)  # somebody has waited for a parameter
    checked: list[Interval] = field(default_factory=list)  # the training thread has clipped, unscaled or audited


class Probe:
    """What one engine has done, in numbers; and what it is doing, for a recorder."""

    def __init__(self, *, waits_on_host: bool) -> None:
        self.trace: Recorder | None = None
        self.has_times = waits_on_host  # seconds are counted without a trace
        self.num_backwards = 0
        self.num_steps = 0  # calls of step()
        self.num_updates = 0
        self.reduced_bytes = 0  # sent for reductions; by backward's thread
        self.gathered_bytes = 0  # sent for gathers; by the lane
        self.now = Times()  # of the update at hand
        self.before: list[Times] = []  # of those that are over, and not summed up yet
        self.backward_ended_at = 0.0
        self.lane_ended_at = 0.0  # the lane has done what the last bucket's future stands for
        self._exposed = 0.0
        self._communication = 0.0
        self._lane_moment: object | None = None
        self._blocked: Any = None

    @property
    def sent_bytes(self) -> int:
        return self.reduced_bytes + self.gathered_bytes

    @property
    def exposed_seconds(self) -> float:
        """The training thread has waited, and not for an update."""
        self.sum_up()
        return self._exposed + _exposed(self.now)

    @property
    def communication_seconds(self) -> float:
        """Something was under way; of lazy gathers only what was waited for."""
        self.sum_up()
        return self._communication + _communication(self.now)

    def begin_update(self) -> None:
        """A backward begins that a recorder wants to know of, or before which there were many."""
        if self.trace is not None:
            self.trace.update = self.num_backwards
        if len(self.before) >= MOST_UPDATES:
            self.sum_up()

    def sum_up(self) -> None:
        """Keep no more than their sums of the updates that are over."""
        over, self.before = self.before, []
        if self.has_times:
            self._exposed += sum(map(_exposed, over))
            self._communication += sum(map(_communication, over))

    # --- while a trace is taken, or torch's profiler runs -------------------------------------------------------------

    def start(self, kind: str, bucket: int, side: Side, fn: Callable[[], Pending]) -> Pending:
        """Start a collective on a side."""
        with _labelled(kind, bucket):
            return side.start(fn) if self.trace is None else self.trace.start(kind, bucket, side, fn)

    def reducing(self, bucket: int, start: Callable[[], Waiter[Tensor]]) -> Waiter[Tensor]:
        """Start a reduction of somebody else's, which runs where it likes."""
        with _labelled("reduce", bucket):
            return start() if self.trace is None else self.trace.reducing(bucket, start)

    def do(self, verb: str, bucket: int | None, fn: Callable[[], T]) -> T:
        """Do what the machine asked for, seen by whoever wants to know."""
        kind, name = _ON_LANE.get(verb, (None, None))
        with _labelled(verb, bucket), self.noting(kind, bucket, name):
            return fn()

    def note_lane(self, trace: Recorder) -> None:
        self._lane_moment = trace.moment()

    def backward_ends(self, trace: Recorder) -> None:
        """All gradients are computed, and DDP is about to wait for the futures."""
        self._blocked = trace.begin("blocked", name=AT_BACKWARDS_END)

    def backward_ended(self, trace: Recorder) -> None:
        """DDP has waited, and has given gradients to parameters. That is its own work, so the lane's end counts."""
        blocked, self._blocked = self._blocked, None
        if blocked is not None:
            trace.end(blocked, cut=self._lane_moment)

    # --- on the training thread, seldom -------------------------------------------------------------------------------

    @contextmanager
    def blocked(self, where: str) -> Iterator[None]:
        """The training thread waits for the lane."""
        start = perf_counter()
        with (
            self.noting("optimizer" if where is IN_STEP else None),
            self.noting("blocked", None, where),
            self.noting("check" if where is IN_CHECK else None),
        ):
            yield
        (self.now.checked if where is IN_CHECK else self.now.blocked).append((start, perf_counter()))

    def noting(
        self, kind: str | None, bucket: int | None = None, name: str | None = None
    ) -> AbstractContextManager[None]:
        """A span of this kind, if a trace is taken."""
        return _NOTHING if self.trace is None or kind is None else _span(self.trace, kind, bucket, name)


def _exposed(times: Times) -> float:
    waits = (*times.blocked, *times.checked)
    updating = sum(max(0.0, min(end, b) - max(start, a)) for start, end in waits for a, b in times.steps)
    return sum(end - start for start, end in (*waits, *times.used)) - updating


def _communication(times: Times) -> float:
    return _under_way(times.begun, times.ended) + sum(end - start for start, end in (*times.used, *times.checked))


def _under_way(begun: Sequence[float], ended: Sequence[float]) -> float:
    """Seconds in which more had begun than ended; what has not ended yet is left out."""
    ends = sorted(ended)
    starts = sorted(begun)[: len(ends)]
    if not starts:
        return 0.0
    # All that began before a pause had ended before it.
    pauses = sum(max(0.0, start - end) for end, start in zip(ends, starts[1:], strict=False))
    return ends[-1] - starts[0] - pauses


@contextmanager
def _span(trace: Recorder, kind: str, bucket: int | None, name: str | None) -> Iterator[None]:
    noted = trace.begin(kind, bucket, name=name)
    yield
    trace.end(noted)


def _labelled(verb: str, bucket: int | None) -> AbstractContextManager[object]:
    """A label for torch's profiler, if one runs."""
    if not is_profiling():
        return _NOTHING
    return profiler.record_function(f"zerolap:{verb}" if bucket is None else f"zerolap:{verb} bucket {bucket}")
