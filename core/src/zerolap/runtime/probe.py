"""The engine's watch: how long training waits, always where that is cheap, and every moment while a trace is taken.

Where waiting happens on the host, clocks are read around it, and the engine appends what they say to lists here: some hundred
nanoseconds for a bucket, no call of a function. They are summed up once an update. Where waiting happens on streams the host
knows nothing of it, and only a trace does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

from torch import Tensor
from torch.autograd import profiler

from zerolap.backend.base import Moment
from zerolap.backend.collectives import Pending
from zerolap.backend.lanes import Side, Waiter
from zerolap.observe.recorder import Noted, Recorder

AT_BACKWARDS_END = "backward's end"
IN_STEP = "step()"
IN_CHECK = "clipping, unscaling or an audit"

# What a verb is in a trace. Starting a gather takes the lane's time as waiting for a reduction does.
_ON_LANE = {"reduce": "wait", "gather": "wait", "step": "step", "agree": "agree", "migrate": "migrate"}

_NOTHING = nullcontext()


class Watch:
    """What the engine tells as it goes. Times are of this rank."""

    def __init__(self, *, waits_on_host: bool) -> None:
        self.trace: Recorder | None = None
        self.has_times = waits_on_host  # seconds are counted without a trace
        # When collectives began and ended, those of the update at hand: by whoever starts them and waits for them. Which is
        # whose does not matter. Nobody sees a lazy gather end before it is needed, so it is not here.
        self.begun: list[float] = []
        self.ended: list[float] = []
        self.steps: list[tuple[float, float]] = []  # updates of shards; by the lane
        self.lane_ended = 0.0  # the lane has done what the last bucket's future stands for
        self.update = 0
        self._exposed = 0.0
        self._communication = 0.0
        self._backward_ended = 0.0
        self._lane_moment: Moment | None = None
        self._blocked: Noted | None = None

    @property
    def exposed_seconds(self) -> float:
        """The training thread has waited, and not for an update."""
        return self._exposed

    @property
    def communication_seconds(self) -> float:
        """Something was under way; of lazy gathers only what was waited for."""
        return self._communication + _under_way(self.begun, self.ended)

    @property
    def is_idle(self) -> bool:
        """Whether nobody wants to know of every action."""
        return self.trace is None and not profiler._is_profiler_enabled

    def begin_update(self, number: int) -> None:
        """A backward begins; what the last one has begun has ended, but for lazy gathers."""
        self._communication += _under_way(self.begun, self.ended)
        self.begun, self.ended, self.steps = [], [], []
        self.update = number
        if self.trace is not None:
            self.trace.update = number

    # --- collectives --------------------------------------------------------------------------------------------------

    def start(self, kind: str, bucket: int, side: Side, fn: Callable[[], Pending]) -> Pending:
        """Start a collective on a side."""
        if self.trace is None and not profiler._is_profiler_enabled:
            return side.start(fn)
        with _labelled(kind, bucket):
            return side.start(fn) if self.trace is None else self.trace.start(kind, bucket, side, fn)

    def reducing(self, bucket: int, start: Callable[[], Waiter[Tensor]]) -> Waiter[Tensor]:
        """Start a reduction of somebody else's, which runs where it likes."""
        if self.is_idle:
            return start()
        with _labelled("reduce", bucket):
            return start() if self.trace is None else self.trace.reducing(bucket, start)

    # --- on the lane --------------------------------------------------------------------------------------------------

    def do(self, verb: str, bucket: int | None, fn: Callable[[int | None], None]) -> None:
        """Do what the machine asked for, seen by whoever wants to know."""
        kind = _ON_LANE.get(verb)
        with _labelled(verb, bucket), self._noting(kind, bucket, verb if kind == "wait" else None):
            fn(bucket)

    def note_lane(self, trace: Recorder) -> None:
        self._lane_moment = trace.moment()

    # --- on the training thread ---------------------------------------------------------------------------------------

    def backward_ends(self) -> None:
        """All gradients are computed, and DDP is about to wait for the futures."""
        self._backward_ended = perf_counter()
        if self.trace is not None:
            self._blocked = self.trace.begin("blocked", name=AT_BACKWARDS_END)

    def backward_ended(self) -> None:
        """DDP has waited, and has given gradients to parameters. That is its own work, so the lane's end counts."""
        self._count(self._backward_ended, min(perf_counter(), self.lane_ended))
        blocked, self._blocked = self._blocked, None
        if self.trace is not None and blocked is not None:
            self.trace.end(blocked, cut=self._lane_moment)

    @contextmanager
    def blocked(self, where: str) -> Iterator[None]:
        """The training thread waits for the lane."""
        start = perf_counter()
        with (
            self._noting("optimizer" if where is IN_STEP else None, None, None),
            self._noting("blocked", None, where),
            self._noting("check" if where is IN_CHECK else None, None, None),
        ):
            yield
        end = perf_counter()
        self._count(start, end)
        if where is IN_CHECK and self.has_times:
            self._communication += end - start

    def waiting(self, bucket: int, param: Tensor | None, *, is_lane: bool) -> AbstractContextManager[None]:
        """Somebody waits for a bucket's parameters, or would if they were not there yet: the lane, or who uses one first."""
        if not is_lane:
            return self._using(bucket, param)
        return _NOTHING if self.trace is None else _span(self.trace, "wait", bucket, "gather")

    @contextmanager
    def _using(self, bucket: int, param: Tensor | None) -> Iterator[None]:
        start = perf_counter()
        with self._noting("use", bucket, None if self.trace is None else self.trace.name_of(param)):
            yield
        if self.has_times:
            seconds = perf_counter() - start
            self._exposed += seconds
            self._communication += seconds

    def _count(self, start: float, end: float) -> None:
        if self.has_times and start < end:
            updating = sum(max(0.0, min(end, b) - max(start, a)) for a, b in self.steps)
            self._exposed += end - start - updating

    # --- common -------------------------------------------------------------------------------------------------------

    def _noting(self, kind: str | None, bucket: int | None, name: str | None) -> AbstractContextManager[None]:
        return _NOTHING if self.trace is None or kind is None else _span(self.trace, kind, bucket, name)


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
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(f"zerolap:{verb}" if bucket is None else f"zerolap:{verb} bucket {bucket}")
