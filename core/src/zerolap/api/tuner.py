"""``schedule="auto"``: tries the ways to overlap while training goes on, and keeps the fastest.

What is tried are real iterations, and whatever the way, their updates are the same. The tuner acts before a forward, when the
iteration before it is over, and so at the same point of training on all ranks. They compare what they measured, and the slowest
rank's time counts for all. Which other bucket size is worth a try is forecast from a trace of some iterations. If it does about as
well as the first, the best way of each is tried once more: what takes only seconds may have met a slow phase of the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zerolap._logging import logger_of
from zerolap._torch import can_rebucket, own_caps_of, rebucket
from zerolap.backend.base import Adapter, Moment
from zerolap.forecast.bucket_sizes import Profile, common_profile, profile, seconds_by_size
from zerolap.forecast.workload import Param, Workload
from zerolap.observe.trace import take
from zerolap.runtime.checks import is_compiled
from zerolap.runtime.engine import Engine
from zerolap.runtime.exchange_strategies import ReduceScatter
from zerolap.runtime.peers import all_gather_json
from zerolap.schedule.machine import Gather, Schedule
from zerolap.schedule.ownership import Slot

logger = logger_of("zerolap.auto")

_MB = 2**20
_NUM_VISITS = 2  # to each choice, of which the quieter counts
_NUM_MEASURED = 3  # iterations of a visit, behind one to get going
_NUM_TO_SETTLE = 3  # iterations until DDP has rebuilt new buckets and states have moved
_WORTH_A_CHANGE = 0.01
_WORTH_ANOTHER_LOOK = 1.1
_NUM_TRACED = 3
_WORTH_A_TRY = 1.05  # of the forecast for the current size: forecasts err by some percent
_ARE_EQUAL = 0.002  # forecasts this near: what they leave out, such as caches, speaks for fewer buckets
_OTHER_BUCKET_MB = (100.0, 50.0, 25.0, 10.0, 5.0, 2.5, 1.0)
_FIRST_GUESSES_MB = (25.0, 5.0)  # where there is no forecast: DDP's default, and what suits slow networks
_FIRST_BUCKET_MB = 1.0  # as DDP's own: what is ready first should not wait for more


class Choice(NamedTuple):
    """One way to overlap."""

    schedule: Schedule
    gather: Gather
    bucket_mb: float

    def __str__(self) -> str:
        return f"{self.schedule.value} {self.gather.value}, buckets of {self.bucket_mb:g} MB"


class Iterations(NamedTuple):
    start: Moment
    end: Moment
    how_many: int  # one, unless the model was called in other ways in between


_Way = tuple[Schedule, Gather]
_Script = Generator[None, Iterations, None]  # runs on from the end of an iteration to that of the next


class Tuner:
    """Tries choices in turn, and ends with the best one in use."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        engine: Engine,
        *,
        adapter: Adapter,
        group: dist.ProcessGroup,
        schedules: Sequence[Schedule],
        gathers: Sequence[Gather],
        use_gather: Callable[[Gather], None],
    ) -> None:
        self._ddp = ddp
        self._engine = engine
        self._adapter = adapter
        self._group = group
        self._use_gather = use_gather
        self._visits: dict[Choice, list[list[Iterations]]] = {}
        self._num_updates = 0
        self._last: Moment = adapter.moment()
        self._ways = [(schedule, gather) for gather in gathers for schedule in schedules]
        self.choice = Choice(*self._ways[0], ddp.bucket_bytes_cap / _MB)
        self._seconds: dict[Choice, float] = {}
        self._foreseen: dict[float, float] = {}
        self._may_be_lazy = Gather.LAZY in gathers
        self._is_compiled = False
        self._script: _Script | None = self._run()
        next(self._script)
        self._hook = ddp.register_forward_pre_hook(self)
        engine.is_tuning = True

    @property
    def is_done(self) -> bool:
        return self._script is None

    def close(self) -> None:
        """Stay with what is in use."""
        self._hook.remove()
        if self._script is not None:
            self._script.close()
        self._script = None
        self._engine.is_tuning = False
        vars(self).pop("_group", None)  # which ends with the last reference to it

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return (_no_tuner, ())  # a copy of DDP, or one from a file, is not tuned

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives its decorator no types
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Before every forward of DDP."""
        num_updates = self._engine.probe.num_updates
        if self._script is None or num_updates == self._num_updates:
            return  # a forward without an update before it: evaluation, or gradients are being accumulated
        taken = Iterations(self._last, self._adapter.moment(), num_updates - self._num_updates)
        self._num_updates = num_updates
        self._is_compiled = self._is_compiled or (self._may_be_lazy and _is_called_by_compiled())
        try:
            self._script.send(taken)
        except StopIteration:
            self.close()
        self._last = self._adapter.moment()

    def _run(self) -> _Script:
        for _ in range(_NUM_TO_SETTLE):  # as DDP rebuilds its first buckets, too
            yield
        ways = self._ways
        is_compiled = self._is_compiled or (self._may_be_lazy and bool(compiled_parts(self._ddp)))
        if any(self._tell_all(is_compiled, "whether forward is compiled")):
            ways = [way for way in ways if way[1] is Gather.EAGER]  # what is compiled cannot wait for a parameter
        ways = yield from self._try(ways, self.choice.bucket_mb)
        for size in (yield from self._other_sizes(ways)):
            ways = yield from self._try(ways, size)
        finalists = self._finalists()
        if len(finalists) > 1:
            for choice in finalists:
                yield from self._visit(choice)
            self._seconds = self._compare()
        seconds = self._seconds
        best = min(seconds.values())
        chosen = next(choice for choice, taken in seconds.items() if taken <= best * (1 + _WORTH_A_CHANGE))
        yield from self._settle(chosen.bucket_mb)
        self._use(chosen)
        if self._group.rank() == 0:
            tried = "; ".join(f"{choice}: {taken * 1e3:.1f} ms" for choice, taken in seconds.items())
            foreseen = ", ".join(f"{size:g} MB {taken * 1e3:.1f}" for size, taken in self._foreseen.items())
            logger.info(
                "auto has chosen %s, by the time of an iteration: %s%s",
                chosen,
                tried,
                foreseen and f"; foreseen milliseconds by bucket size: {foreseen}",
            )

    def _try(self, ways: list[_Way], bucket_mb: float) -> Generator[None, Iterations, list[_Way]]:
        """Measure these ways with buckets of this size; returns those that may be the best with others, too."""
        choices = [Choice(*way, bucket_mb) for way in ways]
        for choice in _NUM_VISITS * choices:
            yield from self._visit(choice)
        self._seconds = self._compare()
        best = min(self._seconds[choice] for choice in choices)
        return [way for way, choice in zip(ways, choices, strict=True) if self._is_near(choice, best)]

    def _visit(self, choice: Choice) -> _Script:
        yield from self._settle(choice.bucket_mb)
        self._use(choice)
        yield
        visit = []
        for _ in range(_NUM_MEASURED):
            visit.append((yield))
        self._visits.setdefault(choice, []).append(visit)

    def _finalists(self) -> list[Choice]:
        """The best of each bucket size, if it may be the best of all."""
        seconds = self._seconds
        sizes = dict.fromkeys(choice.bucket_mb for choice in seconds)  # the current one is the last
        best_of = [
            min((each for each in seconds if each.bucket_mb == size), key=lambda c: seconds[c]) for size in sizes
        ]
        return [choice for choice in best_of if self._is_near(choice, min(seconds.values()))]

    def _is_near(self, choice: Choice, seconds: float) -> bool:
        return self._seconds[choice] < _WORTH_ANOTHER_LOOK * seconds

    def _other_sizes(self, ways: list[_Way]) -> Generator[None, Iterations, list[float]]:
        """Which bucket sizes to try besides the current one: the largest with the best forecast, if it may be worth it."""
        if not _can_rebucket(self._ddp):
            return []
        here, engine = self.choice.bucket_mb, self._engine
        self._use(Choice(*ways[0], here))
        is_free = engine.probe.trace is None  # or else somebody takes a trace of their own
        with take(engine, ranks=(), module=self._ddp.module, path=None) if is_free else nullcontext() as trace:
            for _ in range(_NUM_TRACED):
                yield
        spans = trace.spans if trace is not None else []
        workload, num_ranks = _workload_of(engine), self._group.size()
        profiles = self._tell_all(profile(spans, workload, world_size=num_ranks), "what an iteration is made of")
        others = [size for size in _OTHER_BUCKET_MB if not 0.5 < size / here < 2]
        if any(each is None for each in profiles):
            return [size for size in others if size in _FIRST_GUESSES_MB]
        agreed = common_profile([Profile(*each) for each in profiles])
        stage_sizes = self._adapter.stage_sizes
        self._foreseen = seconds_by_size(
            agreed, workload, [here, *others], ways=ways, world_size=num_ranks, stage_sizes=stage_sizes
        )
        most = _WORTH_A_TRY * self._foreseen.get(here, float("inf"))
        forecasts = {size: taken for size, taken in self._foreseen.items() if size != here and taken < most}
        best = min(forecasts.values(), default=0.0)
        return [max(size for size, taken in forecasts.items() if taken <= best * (1 + _ARE_EQUAL))] if forecasts else []

    def _settle(self, bucket_mb: float) -> _Script:
        if bucket_mb != self.choice.bucket_mb:
            self._engine.wait_for_params()
            _rebucket(self._ddp, bucket_mb)
            self.choice = self.choice._replace(bucket_mb=bucket_mb)
            for _ in range(_NUM_TO_SETTLE):
                yield

    def _use(self, choice: Choice) -> None:
        self._engine.reschedule(choice.schedule, choice.gather)
        self._use_gather(choice.gather)
        self.choice = choice

    def _compare(self) -> dict[Choice, float]:
        """Every choice's time of an iteration: of a visit the median, on the slowest rank; of its visits the shortest."""
        since = self._adapter.seconds_between
        mine = [
            [statistics.median(since(each.start, each.end) / each.how_many for each in visit) for visit in visits]
            for visits in self._visits.values()
        ]
        said = self._tell_all(mine, "how long iterations take")
        slowest = ([max(times) for times in zip(*visits, strict=True)] for visits in zip(*said, strict=True))
        return {choice: min(visits) for choice, visits in zip(self._visits, slowest, strict=True)}

    def _tell_all(self, mine: Any, what: str) -> list[Any]:
        return self._engine.common.run_on_lane(lambda: all_gather_json(mine, group=self._group, what=f"telling {what}"))


def _workload_of(engine: Engine) -> Workload:
    """What is trained, in the buckets at hand, for forecasts; when it is used and ready is not known here."""
    assert isinstance(engine.strategy, ReduceScatter), "auto is a way of attach"
    params: list[Param] = []
    layout: list[tuple[Slot, ...]] = []
    for bucket in engine.layout:
        layout.append(tuple(Slot(len(params) + i, param.numel()) for i, param in enumerate(bucket.params)))
        params += [
            Param(
                param.numel(),
                dtype=str(param.dtype),
                itemsize=param.itemsize,
                optimizer=engine.books.number_of(place),
                cut=engine.strategy.cut_of(place, param.dtype),
                update_cost=engine.books.load_of(place, param).work,
            )
            for place, param in zip(bucket.places, bucket.params, strict=True)
        ]
    reduced_as, gathered_as = engine.strategy.precision.reduce_dtype, engine.strategy.precision.gather_dtype
    return Workload(
        params=tuple(params),
        layout=tuple(layout),
        reduce_itemsize=reduced_as.itemsize if reduced_as else None,
        gather_itemsize=gathered_as.itemsize if gathered_as else None,
        wire=engine.strategy.precision.wire,
    )


def compiled_parts(ddp: DistributedDataParallel) -> list[str]:
    """The names of modules that are compiled, and so cannot wait for a parameter."""
    return [name or "ddp itself" for name, module in ddp.named_modules() if is_compiled(module)]


def _no_tuner() -> Callable[[nn.Module, Any], None]:
    return _do_nothing


def _do_nothing(module: nn.Module, args: Any) -> None:
    """In place of a tuner."""


def _is_called_by_compiled() -> bool:
    from zerolap.runtime.lazy_params import (
        is_called_by_compiled,  # takes a second to import, and only where gathers may be lazy
    )

    return is_called_by_compiled()


def _can_rebucket(ddp: DistributedDataParallel) -> bool:
    """Not with a static graph: that is learned in the first backward, which then must not be one without synchronisation."""
    return can_rebucket(ddp) and not own_caps_of(ddp) and not ddp.static_graph


def _rebucket(ddp: DistributedDataParallel, bucket_mb: float) -> None:
    cap = int(bucket_mb * _MB)
    rebucket(ddp, cap=cap, first_cap=min(cap, int(_FIRST_BUCKET_MB * _MB)))
