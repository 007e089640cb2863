"""The engine: drives one rank's overlap machine. It turns actions into adapter calls and decides nothing itself.

Two threads meet here. DDP calls ``on_bucket`` on the thread that runs backward: there the machine is fed, and reductions
are started. Everything that may wait runs on the lane, in the order the machine asked for it. Futures carry results back to
DDP, which waits for them at the end of backward.

[Note: failures]
An error that crosses DDP's C++ in a future loses its type, and one raised by the hook leaves DDP in the middle of a backward. So
neither happens: a failure is kept, DDP gets its own gradients back and ends in order, and behind it, in the last callback of that
backward, the failure is raised to whoever called it.

``Engine`` is what all ways of sharing the work have in common; ``HookEngine`` reduces by another DDP hook and gathers by
broadcasts.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd.graph import increment_version
from torch.futures import Future

from zerolap.backend.base import Adapter
from zerolap.backend.collectives import Pending
from zerolap.backend.lanes import Waiter, forget_frames, forget_locals
from zerolap.errors import CollectiveError, IllegalEventError, ZerolapError, forked
from zerolap.runtime.failure_report import LastWords, Words
from zerolap.runtime.gradient_watch import Gradient, GradientWatch
from zerolap.runtime.param_groups import Options, options_of
from zerolap.runtime.probe import IN_CHECK, IN_STEP, Watch
from zerolap.runtime.shards import (
    BucketShard,
    FlatParams,
    GradSlot,
    LocalOptimizer,
    Marks,
    ShardBook,
    stand_in_for,
)
from zerolap.runtime.state_pieces import by_param, strides_in_bucket
from zerolap.runtime.state_transfer import move_states
from zerolap.schedule.machine import Action, Agreement, Gather, Machine, Phase, Schedule, Verb
from zerolap.schedule.ownership import (
    BucketPlan,
    GroupRank,
    Layout,
    Piece,
    Plan,
    Policy,
    Slot,
    early_buckets,
    make_plan,
)

T = TypeVar("T")

_NO_BUFFER = torch.empty(0)  # that is no bucket's
# When buckets change, states go to their new owners in so many portions, unless these would be small.
_NUM_MOVES = 8
_LEAST_MOVED_BYTES = 16 * 2**20

# A collective's own timeout says more than ours, so it gets this much longer to speak first.
_GRACE_SECONDS = 5.0


class Reduction(Protocol):
    """A bucket's reduction under way."""

    def wait(self, timeout: float) -> Tensor:
        """The memory that holds the reduced gradients of this rank's shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What DDP's bucket holds of the optimizer's parameters, and where their gradients start in it."""

    # Kept while DDP has it, so that no other bucket can ever get its identity: the same buffer means the same bucket.
    buffer: Tensor
    indices: tuple[int, ...]
    params: tuple[Tensor, ...]
    offsets: tuple[int, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(index, param.numel()) for index, param in zip(self.indices, self.params, strict=True))


@dataclass(slots=True)
class Arrival:
    """A bucket of the backward at hand. ``reduced`` is set by the lane once the reduction is done."""

    recorded: Recorded
    reduction: Reduction
    used: list[bool] | None
    reduced: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Installed:
    """A planned bucket, ready to be updated. ``used`` is None while every parameter was used by some rank."""

    flat: FlatParams
    planned: BucketPlan
    shard: BucketShard | None
    marks: Marks | None
    used: list[bool] | None = None


_version_of = attrgetter("_version")  # no function of ours: called for every parameter of a lazy gather, twice


def _done_already(_: Engine, __: int | None) -> None:
    """By backward's thread, when the machine asked for it."""


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _note_fork() -> None:
    """A child has neither the threads nor the connections that its copies of engines rely on."""
    for engine in list(_engines):
        engine._failure, engine._is_forked = forked(), True


os.register_at_fork(after_in_child=_note_fork)


def _let_end(gathers: dict[int, Pending], group: dist.ProcessGroup) -> None:
    """An engine was dropped, which does not wait: what it still sends goes on, or other ranks would wait for it in vain."""

    def wait(gathers: list[Pending], group: dist.ProcessGroup) -> None:
        with suppress(CollectiveError):  # there is nobody left to tell
            for pending in gathers:
                pending.wait()

    if gathers:
        args = (list(gathers.values()), group)
        threading.Thread(target=wait, args=args, name="zerolap-last-gathers", daemon=True).start()


class Engine(ABC):
    """Overlaps one optimizer with one DDP on this rank."""

    def __init__(
        self,
        book: ShardBook,
        *,
        adapter: Adapter,
        group: dist.ProcessGroup,
        schedule: Schedule,
        agreement: Agreement,
        on_update: Callable[[], None],
        gather: Gather = Gather.EAGER,
    ) -> None:
        self.schedule = schedule
        self.gather = gather
        self.is_tuning = False  # schedule and gather are being tried
        self._book = book
        self._adapter = adapter
        self._group = group
        self._agreement = agreement
        self._on_update = on_update
        self._machine = Machine(schedule, gather=gather, agreement=agreement)
        self.device = device = book.params[0].device
        self._lane = adapter.lane("update", device=device)
        self._gather_side = adapter.side(device)
        self._timeout = adapter.timeout(group).total_seconds() + _GRACE_SECONDS
        self._me = f"rank {dist.get_rank()}"
        self._last_words = LastWords(group)
        self.run_name = group.group_name  # the same on all ranks, and another in every run

        # The layout at hand and the one planned for: written by backward's thread only.
        self._recording: list[Recorded] = []
        self._layout: list[Recorded] = []
        self._plan: Plan | None = None
        self._index_of: dict[Tensor, int] = {}
        self._outside: list[Tensor] = []
        self._failure: ZerolapError | None = None  # the first one
        self._untold: ZerolapError | None = None  # the same, until it was raised on the training thread
        self._is_forked = False
        self._ending = -1  # the backward whose last callback is ours
        self._gradient_watch = GradientWatch()
        self._watched_layout: list[Recorded] = []
        self._num_backwards = 0
        self._num_steps = 0
        self._is_stepped = True  # step() was called since the last backward
        self.watch = Watch(waits_on_host=not adapter.capabilities.futures_complete_at_enqueue)

        # The backward at hand: filled by backward's thread, used by the lane.
        self._arrivals: list[Arrival] = []

        # Written by the lane only.
        self._installed: list[Installed] = []
        self._options: list[Options] | None = None
        self._divisor: Tensor | None = None  # of the gradients at hand, where the optimizer applies it
        self._stepped: LocalOptimizer | None = None
        self._bucket_of: dict[Tensor, int] = {}

        # Gathers under way: started by the lane, waited for by the lane or by whoever uses a parameter first. The lock is
        # held while waiting, so that nobody takes a gather that another thread waits for as finished.
        self._gathers: dict[int, Pending] = {}
        # Versions and marks of lazy gathers' parameters, when they began. See [Note: writes that come too early].
        self._sealed: dict[int, tuple[list[int], Tensor | None]] = {}
        self._gather_lock = threading.Lock()

        cls = type(self)  # not methods of this one, which would lead back to it: it ends with the last reference
        self._on_lane: dict[Verb, Callable[[Any, Any], None]] = {
            Verb.RECORD: _done_already,
            Verb.PLAN: _done_already,
            Verb.REDUCE: cls._finish_reduce,
            Verb.MIGRATE: lambda self, _: self._install(),
            Verb.AGREE: cls._agree,
            Verb.STEP: cls._step,
            Verb.GATHER: cls._gather,
            Verb.WAIT: lambda self, _: self._finish_gathers(),
            Verb.FINISH: lambda self, _: self._finish_update(),
        }
        _engines.add(self)
        self._end_later = weakref.finalize(self, _let_end, self._gathers, group)
        self._end_later.atexit = False
        if adapter.capabilities.futures_complete_at_enqueue:
            self._end_later.detach()  # the device ends what it was given

    # --- how the work is shared: for subclasses -----------------------------------------------------------------------

    @abstractmethod
    def _make_plan(self, layout: Layout) -> Plan:
        """Who owns what of a layout."""

    @abstractmethod
    def _start_reduce(self, index: int, recorded: Recorded, bucket: GradBucket) -> Reduction:
        """Start reducing a bucket; on backward's thread."""

    @abstractmethod
    def _gradients(self, arrival: Arrival) -> Tensor:
        """What DDP shall take for the bucket's gradients."""

    @abstractmethod
    def _make_shard(self, recorded: Recorded, flat: FlatParams, owned: Sequence[Piece]) -> BucketShard:
        """This rank's part of a bucket, given what it owns of it."""

    def _mark(self, recorded: Recorded, flat: FlatParams, owned: Sequence[Piece]) -> Marks | None:
        """Elements of what this rank owns of a bucket that nothing but a mistake changes while it is gathered."""
        return None

    @abstractmethod
    def _start_gather(self, index: int, installed: Installed) -> Pending:
        """Start sending a bucket's updated shards to all ranks; on the lane."""

    def _shall_update(self) -> bool:
        """Whether step() may update; on the training thread, before it does."""
        return True

    # --- what the hooks and the optimizer call ------------------------------------------------------------------------

    @property
    def has_seen_buckets(self) -> bool:
        return bool(self._layout or self._recording)

    @property
    def num_buckets(self) -> int:
        return len(self._layout)

    @property
    def num_steps(self) -> int:
        """Calls of step()."""
        return self._num_steps

    @property
    def flat_bytes(self) -> int:
        return sum(installed.flat.buffer.nbytes for installed in self._installed)

    @property
    def phase(self) -> Phase:
        return self._machine.phase

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket from DDP. The future gives its gradients; the last one also means that backward's part is done."""
        index = bucket.index()
        if self._failure is not None:
            return self._give_back(bucket)
        try:
            is_last, is_known = bucket.is_last(), self._is_known(index, bucket)
            actions = self._machine.bucket_ready(index, is_last=is_last, is_known=is_known)
            if not is_known:
                self._record(bucket)
            arrival = self._arrive(index, bucket)
            if is_last:
                self._refuse_thawed()
                self._watch_gradients()
            if self._machine.phase is Phase.LAYOUT_SEEN:
                actions += self._close_recording()
        except Exception as error:
            self._fail(error, f"bucket {index}")
            return self._give_back(bucket)
        future = self._lane.submit(partial(self._do_for_bucket, actions, arrival))
        if is_last and torch._C._current_graph_task_id() == -1:
            future.wait()  # a rank that has joined: no backward ends here
            self._raise_failure()
        return future

    def _give_back(self, bucket: GradBucket) -> Future[Tensor]:
        """A bucket as it came, for DDP to end its backward with. See [Note: failures]."""
        if torch._C._current_graph_task_id() == -1:
            self._raise_failure()
        self._watch_gradients()
        buffer = bucket.buffer()
        is_on_stream = self._adapter.capabilities.futures_complete_at_enqueue
        future: Future[Tensor] = Future(devices=[buffer.device] if is_on_stream else None)
        future.set_result(buffer)
        return future

    def step_called(self) -> None:
        """The user called step(). Does what is left to do: all of the update on_step, else nothing."""
        self.raise_if_failed()
        self._num_steps += 1
        self._is_stepped = True
        self._refuse_changed_gradients()
        if not self._shall_update():
            return
        try:
            actions = self._machine.step_called()
        except IllegalEventError as error:
            self._fail(error, "step() after a backward that did not finish")
            self._raise_failure()
        if actions:
            self._run_on_lane(partial(self._do, actions), IN_STEP)

    def reschedule(self, schedule: Schedule, gather: Gather) -> None:
        """Go on in another way, from the next backward on; all ranks at the same one."""
        self.wait_for_params()
        self._machine.reschedule(schedule, gather)
        self.schedule, self.gather = schedule, gather

    def run_between_updates(self, fn: Callable[[], T]) -> T:
        """Run something that uses the optimizer's own group, on all ranks between the same two updates."""
        return self._run_on_lane(fn)

    def forget_layout(self) -> None:
        """Plan anew at the end of the next backward: the optimizer's parameters have changed."""
        self._layout = []

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def raise_if_failed(self) -> None:
        if self._failure is None:
            return
        if self._is_forked:
            raise forked()
        self._machine.failed()
        self.close()  # not by the lane itself: a job put behind the end of the lane would never be answered
        self._untold = None
        raise ZerolapError(
            f"{self._me}: the overlap failed earlier, parameters may differ between ranks; "
            f"start again from a checkpoint. First error: {self._failure}"
        ) from self._failure

    def close(self) -> None:
        """End the progress thread; groups close with the last reference to them."""
        self._lane.close()
        forget_locals(self._failure)

    def dispose(self) -> None:
        """Close, and let go of groups and of whatever leads back here: nothing waits for the garbage collector."""
        self.close()
        forget_frames(self._failure)
        self._end_later.detach()
        self._arrivals = []
        self._gathers = {}
        del self._group

    # --- waiting for parameters: on any thread ------------------------------------------------------------------------

    def wait_for_param(self, param: Tensor) -> None:
        """Return when ``param`` has its updated value; nothing to do in most calls."""
        if self._gathers:
            index = self._bucket_of.get(param)
            if index is not None:
                self._wait_for_bucket(index, param, is_lane=False)

    def wait_for_params(self) -> None:
        """Return when every parameter has its updated value."""
        self._wait_for_all(is_lane=False)

    def _wait_for_all(self, *, is_lane: bool = True) -> None:
        for index in list(self._gathers):
            self._wait_for_bucket(index, is_lane=is_lane)

    def _wait_for_bucket(self, index: int, param: Tensor | None = None, *, is_lane: bool = True) -> None:
        if index not in self._gathers:
            return
        if self._is_forked:
            raise forked()  # the lock may be held by a thread that is not here
        with self.watch.waiting(index, param, is_lane=is_lane), self._gather_lock:
            pending = self._gathers.get(index)
            if pending is None:
                return
            try:
                pending.wait()
            except Exception as error:
                self._note_failure(error)
                if is_lane:
                    raise self._failure from error  # type: ignore[misc]  # it was just noted
                self._raise_failure()
            sealed = self._sealed.pop(index, None)
            if sealed is not None:
                versions, values = sealed
                flat, marks = self._installed[index].flat, self._installed[index].marks
                if versions != list(map(_version_of, flat.params)) or (
                    marks is not None and values is not None and not torch.equal(values, marks.read())
                ):
                    self._refuse_early_write(index, versions, values, is_lane=is_lane)
            if self._lane.is_caller():
                if self.gather is Gather.EAGER:
                    self.watch.ended.append(perf_counter())
                del self._gathers[index]  # or else the lane or another stream has waited, and the next one must, too

    def _refuse_early_write(self, index: int, versions: Sequence[int], values: Tensor | None, *, is_lane: bool) -> None:
        """[Note: writes that come too early] Who reaches a parameter through its module or its optimizer waits for it, but
        a reference that somebody holds does not. What is written by it while the gather is under way is overwritten on some
        ranks and sent on by others. Autograd counts writes, and ours are all done when a gather begins: whoever waits first
        finds out. Writes by ``param.data``, NumPy and torch's fused optimizers are not counted, but as a rule change some of
        the marks, elements that this rank owns. Marks can be read where values are at hand on the host.
        """
        installed = self._installed[index]
        written = {p for p, version in zip(installed.flat.params, versions, strict=True) if p._version != version}
        if installed.marks is not None and values is not None:
            changed = (values != installed.marks.read()).tolist()
            written |= {p for p, is_changed in zip(installed.marks.params, changed, strict=True) if is_changed}
        names = [self._name_of(param) for param in installed.flat.params if param in written]
        failure = self._note_failure(
            ZerolapError(
                f"{self._me}, bucket {index}: parameters were written between their update and the end of their gather, which "
                f"is lost on some ranks and not on others: {', '.join(names[:5])}. Reach them through their modules or "
                "optimizer.param_groups, which wait, or call handle.finish() before you write by references of your own, or use "
                'gather="eager"'
            )
        )
        if is_lane:
            raise failure
        self._raise_failure()

    def _name_of(self, param: Tensor) -> str:
        return f"parameter {self._index_of.get(param)} of the optimizer"

    # --- on backward's thread -----------------------------------------------------------------------------------------

    def _is_known(self, index: int, bucket: GradBucket) -> bool:
        """Whether this is the very bucket the plan was made for; a rank that joined early gets new ones every time."""
        return (
            self._machine.phase is not Phase.DDP_HAS_REBUILT_BUCKETS
            and index < len(self._layout)
            and bucket.buffer() is self._layout[index].buffer
        )

    def _record(self, bucket: GradBucket) -> None:
        if bucket.index() == 0:
            self._recording = []
            self._forget_buffers()
            self._index_of = {param: index for index, param in enumerate(self._book.params)}
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided:
            raise ValueError("sparse gradients cannot be updated inside backward; use sparse=False")
        # Of bucket.gradients() only the offsets are right: it has row-by-row strides even where DDP has others.
        held = [
            (index, param, int(grad.storage_offset() - buffer.storage_offset()))
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if (index := self._index_of.get(param)) is not None  # DDP may reduce for another optimizer, too
        ]
        indices, params, offsets = zip(*held, strict=True) if held else ((), (), ())
        self._recording.append(Recorded(buffer=buffer, indices=indices, params=params, offsets=offsets))

    def _forget_buffers(self) -> None:
        """DDP has other buckets now; those it had shall not be held beside them."""
        self._layout = [replace(recorded, buffer=_NO_BUFFER) for recorded in self._layout]
        self._watched_layout = []
        self._gradient_watch.watch(())
        self._adapter.release_memory()

    def _arrive(self, index: int, bucket: GradBucket) -> Arrival:
        if index == 0:
            self._begin_backward()
        if self.watch.trace is not None:
            self.watch.trace.mark("ready", index)
        recorded = (self._recording or self._layout)[index]
        # Read now: once the bucket is reduced DDP gives a gradient to parameters that only other ranks used.
        used = None if self._agreement is Agreement.NEVER else [param.grad is not None for param in recorded.params]
        self.watch.begun.append(perf_counter())
        try:
            reduction = self._start_reduce(index, recorded, bucket)
        except ZerolapError:
            raise  # it knows more
        except RuntimeError as error:
            raise CollectiveError(f"the reduction could not be started: {type(error).__name__}: {error}") from error
        arrival = Arrival(recorded, reduction, used)
        self._arrivals.append(arrival)
        return arrival

    def _begin_backward(self) -> None:
        self._arrivals = []  # what a skipped step() has left behind
        self._num_backwards += 1
        self.watch.begin_update(self._num_backwards)
        if torch._C._current_graph_task_id() == -1:
            return  # a rank that has joined
        if not self._is_stepped and self._num_steps and self.schedule is not Schedule.ON_STEP:
            raise ZerolapError(
                "step() was not called after the last backward, as it was before: here every backward is an update, whether "
                "step() is called or not. Call it after every backward, or never; accumulate gradients under ddp.no_sync(); "
                'to skip updates use zerolap.attach(ddp, optimizer, schedule="on_step")'
            )
        self._is_stepped = False

    def _close_recording(self) -> tuple[Action, ...]:
        recording, self._recording = self._recording, []
        is_changed = [b.indices for b in recording] != [b.indices for b in self._layout]
        early = early_buckets([sum(param.numel() for param in recorded.params) for recorded in recording])
        actions = self._machine.layout_seen(is_changed=is_changed, early=early)
        self._layout = recording
        if is_changed:
            self._plan = self._make_plan(tuple(recorded.slots for recorded in recording))
            inside = {index for b in recording for index in b.indices}
            self._outside = [param for param, index in self._index_of.items() if index not in inside]
            self._refuse_thawed()
        return actions

    def _refuse_thawed(self) -> None:
        thawed = sum(param.requires_grad for param in self._outside)
        if thawed:
            raise ValueError(
                f"{thawed} trainable parameters of the optimizer are in none of DDP's buckets, so their gradients are not "
                "reduced; wrap the model in DDP again after changing requires_grad, and attach a new optimizer to it"
            )

    def _watch_gradients(self) -> None:
        """See to it that gradients are noted at the very end of backward, after DDP has written them."""
        self._gradient_watch.noted = []
        task = torch._C._current_graph_task_id()
        if task in (-1, self._ending):
            return  # a rank that has joined runs hooks without a backward
        self._ending = task
        # Twice, for DDP queues the callback that waits for our futures and writes gradients after this one.
        torch.autograd.Variable._execution_engine.queue_callback(self._let_ddp_finish)

    def _let_ddp_finish(self) -> None:
        self.watch.backward_ends()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._ending = -1
        self.watch.backward_ended()
        if self._failure is not None:
            self._raise_failure()
        if self._watched_layout is not self._layout:
            self._watched_layout = self._layout
            self._gradient_watch.watch(
                [
                    Gradient(param, index, recorded.buffer, offset)
                    for recorded in self._layout
                    for param, index, offset in zip(recorded.params, recorded.indices, recorded.offsets, strict=True)
                ]
            )
        self._gradient_watch.note()

    def _refuse_changed_gradients(self) -> None:
        is_on_step = self.schedule is Schedule.ON_STEP
        change = self._gradient_watch.find_change(may_be_cleared=not is_on_step)
        if change is not None:
            raise RuntimeError(
                f"gradients were changed between backward and step(), which has no effect here: {change}. "
                + (
                    "step() uses their means, which are in the shards. Clip by optimizer.clip_grad_norm_() and scale losses by "
                    "zerolap.GradScaler; to change gradients in any other way, use overlap_with_ddp=False"
                    if is_on_step
                    else "The update has used the reduced ones. Use zerolap.attach(ddp, optimizer, "
                    'schedule="on_step") with optimizer.clip_grad_norm_() and zerolap.GradScaler, or overlap_with_ddp=False'
                )
            )

    def _fail(self, error: Exception, where: str) -> None:
        kind = CollectiveError if isinstance(error, CollectiveError) else ZerolapError
        named = kind(f"{self._me}, {where}: {type(error).__name__}: {error}")
        named.__cause__ = error
        self._note_failure(named)
        self._machine.failed()
        self.close()

    def _note_failure(self, error: Exception) -> ZerolapError:
        """Keep the first failure for the training thread, and tell the other ranks of it."""
        if self._failure is None:
            named, cause = error, error.__cause__
            if not isinstance(named, ZerolapError):
                named, cause = ZerolapError(f"{self._me}: {type(error).__name__}: {error}"), error
            failure = self._explained(named)
            failure.__cause__ = cause
            self._failure = self._untold = failure
        return self._failure

    def _raise_failure(self) -> None:
        """Raise what has failed, if anything has; on the training thread. At first as it is, then as what failed earlier."""
        failure, self._untold = self._untold, None
        if failure is not None and not self._is_forked:
            # A copy: an error keeps alive whoever it is raised to, and the engine keeps this one.
            raise type(failure)(str(failure)) from failure.__cause__
        self.raise_if_failed()

    def _run_on_lane(self, fn: Callable[[], T], where: str = IN_CHECK) -> T:
        """Run something on the lane, and wait for it; if it fails, so has the overlap."""
        with self.watch.blocked(where):
            try:
                return self._lane.run(partial(self._noting_failure, fn))
            except ZerolapError:
                self._raise_failure()
                raise

    def _noting_failure(self, fn: Callable[[], T]) -> T:
        try:
            return fn()
        except Exception as error:
            failure = self._note_failure(error)
            if failure is error:
                raise
            raise failure from error

    def _do_quietly(self, fn: Callable[[], None]) -> None:
        """On the lane: do something whose failure is raised when backward ends. See [Note: failures]."""
        if self._failure is None:
            with suppress(ZerolapError):  # which was noted
                self._noting_failure(fn)

    def _explained(self, error: ZerolapError) -> ZerolapError:
        """Tell the other ranks of it, and if it is them who did not come, add what became of them."""
        mine = Words(
            rank=self._me,
            num_backwards=self._num_backwards,
            num_steps=self._num_steps,
            error=f"{type(error).__name__}: {error}",
        )
        is_theirs = isinstance(error, CollectiveError)
        account = self._last_words.exchange(mine, listen=is_theirs)
        return CollectiveError(f"{error}{account}") if account else error

    # --- on the lane --------------------------------------------------------------------------------------------------

    def _do_for_bucket(self, actions: Sequence[Action], arrival: Arrival) -> Tensor:
        gradients = arrival.recorded.buffer
        if self._failure is None:
            try:
                self._do(actions)
                gradients = self._gradients(arrival)
            except Exception as error:
                self._note_failure(error)
        watch = self.watch
        watch.lane_ended = perf_counter()
        if watch.trace is not None:
            watch.note_lane(watch.trace)
        return gradients

    def _do(self, actions: Sequence[Action]) -> None:
        """Do what may wait; the rest was done when the actions were emitted."""
        is_idle = self.watch.is_idle
        for verb, bucket in actions:
            try:
                if is_idle:
                    self._on_lane[verb](self, bucket)
                else:
                    self.watch.do(verb.name.lower(), bucket, partial(self._on_lane[verb], self))
            except Exception as error:
                if error is self._failure or isinstance(error, CollectiveError):
                    raise  # already names rank and bucket
                where = f"{self._me}, {'all buckets' if bucket is None else f'bucket {bucket}'}, {verb.name.lower()}"
                raise ZerolapError(f"{where}: {type(error).__name__}: {error}") from error

    def _finish_reduce(self, index: int) -> None:
        arrival = self._arrivals[index]
        try:
            arrival.reduced = arrival.reduction.wait(self._timeout)
        except Exception as error:
            raise CollectiveError(f"{self._me}, bucket {index}: the reduction failed: {error}") from error
        self.watch.ended.append(perf_counter())

    def _agree(self, index: int) -> None:
        used = self._arrivals[index].used
        if not used:
            return
        # Not of a smaller type: some backends reduce none.
        votes = torch.tensor(used, dtype=torch.int32, device=self._arrivals[index].recorded.buffer.device)
        what = f"{self._me}, bucket {index}: all-reduce of which parameters were used"
        self._adapter.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, what=what).wait()
        agreed = [bool(vote) for vote in votes.tolist()]
        self._installed[index].used = None if all(agreed) else agreed

    def _step(self, index: int) -> None:
        installed, arrival = self._installed[index], self._arrivals[index]
        if self._gathers:
            self._wait_for_bucket(index)  # of the last update: it reads the memory that is about to be written
        # As an optimizer's own writing would: a node of this backward that still needs an old value now raises.
        increment_version(arrival.recorded.params)
        if installed.shard is None:
            return
        assert arrival.reduced is not None, "a bucket is reduced before it is stepped"
        start = perf_counter()
        installed.shard.set_grads(arrival.reduced, installed.used)
        self._step_local(installed.shard.local)
        self.watch.steps.append((start, perf_counter()))

    def _step_local(self, local: LocalOptimizer) -> None:
        if self._options is None:
            # Every bucket of an update sees the same options, even if the optimizer itself changes them in its step.
            self._options = [options_of(group) for group in self._book.groups]
        local.take_options(self._options)
        local.step(self._divisor)
        self._stepped = local

    def _gather(self, index: int) -> None:
        installed = self._installed[index]
        if not installed.flat.is_intact():
            raise ZerolapError(
                "parameters have left their flat buffer (param.data was set, or the module was moved or cast); "
                "move the model before it is wrapped in DDP and load into it by copy_ or load_state_dict"
            )
        if self._book.world_size > 1:
            if self._gathers:
                self._wait_for_bucket(index)
            if self.gather is Gather.EAGER:
                self.watch.begun.append(perf_counter())
            else:
                marks = installed.marks
                self._sealed[index] = (
                    list(map(_version_of, installed.flat.params)),
                    None if marks is None else marks.read(),
                )
            try:
                self._gathers[index] = self._start_gather(index, installed)
            except ZerolapError:
                raise  # it knows more
            except RuntimeError as error:
                raise CollectiveError(
                    f"{self._me}, bucket {index}: the gather could not be started: {error}"
                ) from error

    def _finish_gathers(self) -> None:
        self._wait_for_all()
        self._gathers.clear()  # whoever waits for the lane has waited for them

    def _finish_update(self) -> None:
        if self._options is None:
            self._step_local(self._book.locals[0])  # nothing here is ours: step over nothing, so that counters go on
        assert self._options is not None
        assert self._stepped is not None
        # What the optimizer itself changed or added shows in the exposed groups, as with a plain optimizer.
        for exposed, before, after in zip(self._book.groups, self._options, self._stepped.options(), strict=True):
            exposed.update((key, value) for key, value in after.items() if before.get(key, self) is not value)
        self._options = self._divisor = None
        self._arrivals = []
        self._on_update()

    def _install(self) -> None:
        """Bring states to their new owners, parameters into flat buffers, and an optimizer to every shard."""
        assert self._plan is not None
        self._finish_gathers()
        book = self._book
        params = book.params
        routes: dict[int, list[tuple[int, int, GroupRank]]] = {}
        params_of: list[set[int]] = []
        for planned in self._plan.buckets:
            params_of.append(set())
            for owner, pieces in planned.segments():
                for param, start, stop in pieces:
                    routes.setdefault(param, []).append((start, stop, owner))
                    params_of[-1].add(param)
        # What DDP does not reduce has no gradient, but keeps its state, where it is.
        outside = set(range(len(params))) - routes.keys()
        rest = {
            Piece(i, 0, params[i].numel()): stand_in_for(params[i]) for i in outside if book.owners.get(i) == book.rank
        }
        before, older = book.locals, self._stepped or book.locals[0]

        def bring(wanted: set[int], locals_: Sequence[LocalOptimizer]) -> None:
            """States of these parameters to those who have them now. Some at a time, for what moves is here twice."""
            moved = move_states(
                {piece: state for local in before for piece, state in local.take_states(wanted).items()},
                routes=lambda i: routes.get(i) or [(0, params[i].numel(), book.owners[i])],
                group=self._group,
                device=params[0].device,
                what="moving optimizer states",
            )
            states = by_param(moved)
            for local in locals_:
                local.load(states, copies=False)
            del moved, states
            self._adapter.release_memory()

        book.locals = [book.make_local(rest)]
        book.locals[0].inherit(older)
        if outside:
            bring(outside, book.locals)
        self._installed = []
        num_bytes = sum(param.nbytes for recorded in self._layout for param in recorded.params)
        num_moves = max(1, min(_NUM_MOVES, num_bytes // _LEAST_MOVED_BYTES))
        at_once = -(-len(self._layout) // num_moves)
        for first in range(0, len(self._layout), max(1, at_once)):
            arriving: list[LocalOptimizer] = []
            layout, buckets = self._layout[first : first + at_once], self._plan.buckets[first : first + at_once]
            for recorded, planned in zip(layout, buckets, strict=True):
                with self._lane.as_caller():  # their memory is the model's
                    flat = FlatParams(recorded.params)
                owned = planned.owned_by(book.rank)
                shard = self._make_shard(recorded, flat, owned) if owned else None
                marks = self._mark(recorded, flat, owned)
                self._installed.append(Installed(flat=flat, planned=planned, shard=shard, marks=marks))
                if shard is not None:
                    shard.local.inherit(older)
                    arriving.append(shard.local)
            bring(set().union(*params_of[first : first + at_once]), arriving)
            book.locals += arriving
        self._bucket_of = {param: i for i, recorded in enumerate(self._layout) for param in recorded.params}


class HookEngine(Engine):
    """Reduces by a wrapped DDP hook, and sends whole parameters from their owners by broadcast."""

    def __init__(
        self, book: ShardBook, *, reduce: Callable[[GradBucket], Future[Tensor]], policy: Policy, **options: Any
    ) -> None:
        super().__init__(book, **options)
        self._reduce = reduce
        self._policy = policy

    def _make_plan(self, layout: Layout) -> Plan:
        return make_plan(layout, world_size=self._book.world_size, policy=self._policy)

    def _start_reduce(self, index: int, recorded: Recorded, bucket: GradBucket) -> Reduction:
        return self.watch.reducing(index, lambda: Waiter(self._reduce(bucket)))

    def _gradients(self, arrival: Arrival) -> Tensor:
        assert arrival.reduced is not None, "every bucket's actions start with its reduction"
        return arrival.reduced

    def _make_shard(self, recorded: Recorded, flat: FlatParams, owned: Sequence[Piece]) -> BucketShard:
        mine = {piece.param: piece for piece in owned}
        stand_ins: dict[Piece, Tensor] = {}
        slots = []
        for place, (index, param) in enumerate(zip(recorded.indices, recorded.params, strict=True)):
            if index in mine:
                stand_ins[mine[index]] = stand_in_for(param)
                slots.append(GradSlot(place, param.size(), strides_in_bucket(param), recorded.offsets[place]))
        return BucketShard(stand_ins=list(stand_ins.values()), slots=slots, local=self._book.make_local(stand_ins))

    def _start_gather(self, index: int, installed: Installed) -> Pending:
        return self.watch.start("gather", index, self._gather_side, partial(self._start_broadcasts, index, installed))

    def _start_broadcasts(self, index: int, installed: Installed) -> Pending:
        pending, first = [], 0
        for owner, pieces in installed.planned.segments():
            part = installed.flat.slice(first, first + len(pieces))
            first += len(pieces)
            if part.numel():
                what = f"{self._me}, bucket {index}: broadcast of updated parameters from group rank {owner}"
                pending.append(self._adapter.broadcast(part, src=owner, group=self._group, what=what))
        return Pending(pending, tensors=(), what=f"{self._me}, bucket {index}")
