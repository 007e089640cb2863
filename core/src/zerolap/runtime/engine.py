"""The engine: interprets one rank's overlap machine. It turns actions into calls of buckets, and decides nothing itself.

Two threads meet here. DDP calls ``on_bucket`` on the thread that runs backward: there the machine is fed, and what it wants at once is
done. Everything else, which may wait, runs on the lane, in the order the machine asked for it. Futures carry results back to
DDP, which waits for them at the end of backward. What fails is kept until then: see [Note: failures].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from zerolap._torch import GradBucket, current_graph_task_id, is_profiling, join_config_of
from zerolap.backend.lanes import forget_frames
from zerolap.errors import CollectiveError, IllegalEventError, ZerolapError
from zerolap.runtime.books import Books, StepCalls
from zerolap.runtime.bucket import Bucket, Update
from zerolap.runtime.checks import BackwardEnd, Rereads, Thawed, refuse_join
from zerolap.runtime.common import Common, Observer, let_end
from zerolap.runtime.exchange_strategies import ExchangeStrategy, for_views
from zerolap.runtime.migration import install_layout
from zerolap.runtime.probe import IN_STEP, MOST_UPDATES, Times
from zerolap.runtime.recording import Recording
from zerolap.runtime.reduced_gradients import ReducedGradients
from zerolap.runtime.shown_gradients import ShownGradients
from zerolap.schedule.machine import AT_ONCE, Action, Agreement, Gather, Machine, Phase, Schedule, Verb
from zerolap.schedule.ownership import early_buckets


class Engine:
    """Overlaps the optimizers of one DDP with it on this rank."""

    def __init__(
        self,
        books: Books,
        *,
        ddp: DistributedDataParallel,
        common: Common,
        strategy: ExchangeStrategy,
        machine: Machine,
        update: Update,
        on_update: Sequence[Callable[[], Callable[[], None] | None]],
    ) -> None:
        self.books, self.common = books, common
        self.strategy = strategy
        self.machine = machine
        self.update = update
        self.probe = common.probe
        self.is_tuning = False  # schedule and gather are being tried
        self.observers: list[Observer] = []
        self.default_state: object = None  # of the wrapped hook, where DDP has none for it
        assert common.group is not None
        self.run_name = common.group.group_name  # the same on all ranks, and another in every run
        self._ddp = weakref.ref(ddp)
        self._agreement = agreement_of(ddp)
        self._on_update = on_update
        self.shown = ShownGradients(books, ddp=ddp, common=common, update=update)
        self.shown.on_nonfinite = partial(_leave_out_nonfinite, weakref.ref(self))
        self._end = BackwardEnd(common, machine, self.shown)
        self._thawed = Thawed()
        self._rereads = Rereads(ddp.module, common=common, machine=machine)

        self.layout: list[Bucket] = []  # the buckets that owners were assigned for: by backward's thread
        self._recording = Recording(books, common, update)
        self.at_hand: list[Bucket] = []  # the buckets of this backward: filled by backward's thread, used by the lane
        self.installed: list[Bucket] = []  # by the lane
        self.bucket_of: dict[Tensor, Bucket] = {}  # by the lane; for whoever uses a parameter
        self.gradients = ReducedGradients(
            books, common=common, update=update, machine=machine, buckets=self.at_hand, shown=self.shown
        )
        self._calls = StepCalls(books.num_optimizers)
        self._end_later = weakref.finalize(self, let_end, common.in_flight, common.group)
        self._end_later.atexit = False
        if common.adapter.capabilities.futures_complete_at_enqueue:
            self._end_later.detach()  # the device ends what it was given

    # --- what the hooks and the optimizer call ------------------------------------------------------------------------

    def on_bucket(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket from DDP. The future gives its gradients; the last one also means that backward's part is done."""
        index = bucket.index()
        if self.common.failures.first is not None:
            return self._give_back(bucket)
        is_joined = current_graph_task_id() == -1  # its hook is run without a backward
        try:
            is_last, is_known = bucket.is_last(), self._is_known(index, bucket)
            actions = self.machine.bucket_ready(index, is_last=is_last, is_known=is_known, is_joined=is_joined)
            if index == 0:
                self._begin_backward()
            if self._rereads.is_watching or index == 0:
                self._rereads.bucket_ready(bucket)
            self._do_at_once(actions, bucket, state)
            if self.machine.phase is Phase.LAYOUT_SEEN:
                actions += self._compare_layouts(bucket)
            if is_last:
                self._thawed.refuse()
                self._end.expect(self.layout)
        except Exception as error:
            self._fail(error, f"bucket {index}")
            return self._give_back(bucket)
        future = self.common.lane.submit(partial(self._do_for_bucket, actions, self.at_hand[index]))
        if is_last and is_joined:
            future.wait()  # no backward ends here
            self._end.free_gradients()
            self.common.raise_failure()
        elif not is_last:
            _limit_memory(self, self.at_hand[index])
        return future

    def step_called(self, number: int = 0) -> None:
        """The user called step() of an optimizer. The last of them makes the update on_step; else it is made."""
        self.raise_if_failed()
        self.probe.num_steps += 1
        machine = self.machine
        try:
            if machine.phase is not Phase.REDUCED:
                machine.step_called()
            if machine.schedule is not Schedule.ON_STEP:
                self._end.gradients.refuse_changes(number, self.books.num_optimizers)
            if machine.phase is Phase.REDUCED:
                is_dropped = self.gradients.of(number).are_dropped
                self.shown.take(number, is_step=True, is_dropped=is_dropped)
                self._note_step(number, is_left_out=is_dropped)
        except IllegalEventError as error:
            self._fail(error, "step() after a backward that did not finish")
            self.common.raise_failure()

    def step_left_out(self, number: int) -> None:
        """Gradients of an optimizer were not finite, and a loss scaler may have left its step() out."""
        if self.machine.phase is Phase.REDUCED and number not in self._calls:
            self._note_step(number, is_left_out=True)

    def _note_step(self, number: int, *, is_left_out: bool) -> None:
        if number not in self._calls:
            self._calls[number] = is_left_out
            self.update.of[number].begin()  # with its options as they are now
        if not self._calls.are_all:
            _leave_out_nonfinite(weakref.ref(self))
            return
        left_out = self._calls.take()
        if all(left_out) or not all(each.may_update() for each in self.observers):
            self.gradients.drop()
            self.machine.step_skipped()
            self.update.forget()
        else:
            self.update.leave_out(left_out)
            self.common.run_on_lane(partial(_do, self, self.machine.step_called()), IN_STEP)
        if self.common.gradient_memory is not None:
            self._end.free_shards()

    def reschedule(self, schedule: Schedule, gather: Gather) -> None:
        """Go on in another way, from the next backward on; all ranks at the same one."""
        self.wait_for_params()
        self.machine.reschedule(schedule, gather)
        self.common.is_lazy = gather is Gather.LAZY

    def wait_for_params(self) -> None:
        """Return when every parameter has its updated value; on any thread."""
        for bucket in self.installed:
            bucket.wait()

    def raise_if_failed(self) -> None:
        if self.common.failures.first is not None:
            self.machine.failed()
            self.common.raise_if_failed()

    def _fail(self, error: Exception, where: str) -> None:
        self.common.failures.note_at(error, where)
        self.machine.failed()
        self.common.close()

    def dispose(self) -> None:
        """Close, and let go of groups and of whatever leads back here: nothing waits for the garbage collector."""
        self.common.close()
        forget_frames(self.common.failures.first)
        self._end_later.detach()
        for bucket in {*self.installed, *self.layout, *self.at_hand, *self._recording.buckets}:
            bucket.release()
        self.at_hand.clear()
        self._rereads.end()
        self.shown.clear()
        self.strategy.close()
        self.observers.clear()
        self.common.group = self.update.check = None

    # --- on backward's thread -----------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        ddp = self._ddp()
        assert ddp is not None, "a hook is called by a DDP that is alive"
        if agreement_of(ddp) is not self._agreement:
            raise ZerolapError("DDP's static_graph was changed after the hook was made; set it before")
        if join_config_of(ddp).enable:
            refuse_join(self.machine.schedule, self.common.adapter.capabilities, is_tuning=self.is_tuning)
        if self._calls:
            self._calls.refuse_some()
        self.at_hand.clear()  # of what a step() that was left out has left behind
        self.shown.nonfinite.clear()
        self.update.forget()  # and of that
        probe = self.probe
        probe.num_backwards += 1
        probe.before.append(probe.now)
        probe.now = Times()
        if probe.trace is not None or len(probe.before) >= MOST_UPDATES:
            probe.begin_update()
        for observer in self.observers:
            observer.backward_begins()

    def _is_known(self, index: int, bucket: GradBucket) -> bool:
        """Whether this is the very bucket that owners were assigned for; a rank that joined early gets new ones every time."""
        return (
            self.machine.phase is not Phase.RECORDING
            and index < len(self.layout)
            and bucket.buffer() is self.layout[index].buffer
        )

    def _do_at_once(self, actions: Sequence[Action], given: GradBucket, state: object) -> None:
        for verb, index in actions:
            if verb is Verb.START_REDUCE and index is not None:
                bucket = (self._recording.buckets or self.layout)[index]
                self.at_hand.append(bucket)
                if self.probe.trace is not None:
                    self.probe.trace.mark("ready", index)
                if bucket.scatter is None and self.common.hook is None:
                    self.strategy.prepare_reduce(bucket)
                is_joined = current_graph_task_id() == -1
                if self.shown.is_added_to or (
                    (is_joined or bucket.freed) and self.machine.schedule is Schedule.ON_STEP
                ):
                    self.shown.before_reduce(bucket, is_joined=is_joined)
                bucket.start_reduce(given, self.default_state if state is None else state)
            elif verb is Verb.RECORD:
                if index == 0:
                    self._end.forget_gradients()
                self._recording.take(given, before=self.layout)
            elif verb is Verb.ASSIGN:
                self.strategy.assign(self._recording.buckets)
                self._thawed.watch(self._recording.outside())
                self._rereads.layout_changed()

    def _compare_layouts(self, given: GradBucket) -> tuple[Action, ...]:
        """All buckets of a backward were recorded: is it the layout that owners were assigned for?"""
        buckets = self._recording.buckets
        is_changed = [bucket.places for bucket in buckets] != [bucket.places for bucket in self.layout]
        early = early_buckets([sum(param.numel() for param in bucket.params) for bucket in buckets])
        actions = self.machine.layout_seen(is_changed=is_changed, early=early)
        self._do_at_once(actions, given, None)
        self.layout, self._recording.buckets = buckets, []
        if self.common.gradient_memory is not None and current_graph_task_id() != -1:
            self.common.gradient_memory.watch([(each.freed.whole, each.params) for each in buckets if each.freed])
        return actions

    def _give_back(self, bucket: GradBucket) -> Future[Tensor]:
        """A bucket as it came, for DDP to end its backward with. See [Note: failures]."""
        self._rereads.end()
        if current_graph_task_id() == -1:
            self.common.raise_failure()
        self._end.expect(self.layout)
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=None if self.common.waits_on_host else [buffer.device])
        future.set_result(buffer)
        return future

    # --- on the lane --------------------------------------------------------------------------------------------------

    def _do_for_bucket(self, actions: Sequence[Action], bucket: Bucket) -> Tensor:
        if self.common.failures.first is None:
            try:
                _do(self, actions)
            except Exception as error:
                self.common.failures.note(error)
        self.probe.lane_ended_at = perf_counter()
        if self.probe.trace is not None:
            self.probe.note_lane(self.probe.trace)
        gradients, bucket.gradients = bucket.gradients, None
        if self.common.gradient_memory is not None:
            return for_views(bucket, self.common.gradient_memory)
        return bucket.buffer if gradients is None else gradients


def _finish_gathers(engine: Engine) -> None:
    for bucket in engine.installed:
        bucket.wait(is_lane=True)
        if bucket.gathering is not None:
            bucket.forget_gather()  # whoever waits for the lane has waited for it


def _finish_update(engine: Engine) -> None:
    engine.update.finish()
    while engine.at_hand:
        bucket = engine.at_hand.pop()
        bucket.reduced = bucket.wanted = None  # which may be memory of a hook's own
    engine.probe.num_updates += 1
    for note in filter(None, (each() for each in engine._on_update)):  # of optimizers that are alive
        note()


def _leave_out_nonfinite(found: weakref.ref[Engine]) -> None:
    """A loss scaler calls no step() of an optimizer whose gradients are not finite: others shall not wait for that."""
    engine = found()
    if engine is not None and (number := engine._calls.next_left_out(engine.shown.nonfinite)) is not None:
        engine._note_step(number, is_left_out=True)  # and then the next one


def _limit_memory(engine: Engine, bucket: Bucket) -> None:
    """Wait before more gradients come, if many are not reduced yet; not where other ranks may need those to get on."""
    memory, ddp = engine.common.gradient_memory, engine._ddp()
    try:
        if memory is not None and bucket.freed is not None and not join_config_of(ddp).enable:
            memory.make_room_behind(bucket.freed.whole)
    except CollectiveError as error:
        engine._fail(error, f"bucket {bucket.index}")


def _migrate(engine: Engine) -> None:
    _finish_gathers(engine)
    install_layout(engine)


# Every verb that is not done at once: of a bucket, or of all of them.
_DO: dict[Verb, Callable[[Any], None]] = {
    Verb.FINISH_REDUCE: Bucket.finish_reduce,
    Verb.MIGRATE: _migrate,
    Verb.AGREE: Bucket.agree,
    Verb.STEP: Bucket.step,
    Verb.GATHER: Bucket.start_gather,
    Verb.WAIT: _finish_gathers,
    Verb.FINISH: _finish_update,
}


def _do(engine: Engine, actions: Sequence[Action]) -> None:
    """Do what may wait; the rest was done when the machine asked for it."""
    is_seen = engine.probe.trace is not None or is_profiling()
    for verb, index in actions:
        if verb in AT_ONCE:
            continue
        try:
            do: Callable[[Any], None] = _DO[verb]
            target = engine if index is None else engine.at_hand[index]
            if is_seen:
                engine.probe.do(verb.name.lower(), index, partial(do, target))
            else:
                do(target)
        except Exception as error:
            if error is engine.common.failures.first or isinstance(error, CollectiveError):
                raise  # already names rank and bucket
            where = f"{engine.common.me}, {'all buckets' if index is None else f'bucket {index}'}, {verb.name.lower()}"
            raise ZerolapError(f"{where}: {type(error).__name__}: {error}") from error


def agreement_of(ddp: DistributedDataParallel) -> Agreement:
    """How often ranks must agree on which parameters were used."""
    if ddp.static_graph:
        return Agreement.PER_LAYOUT
    return Agreement.ALWAYS if ddp.find_unused_parameters else Agreement.NEVER


class DDPHook:
    """What DDP calls for every bucket. It takes one for its whole life, so this one can be switched off: then it averages as DDP does.

    A copy of DDP, or one from a file, has one that is off.
    """

    def __init__(self, group: Any = None, name: str = "zerolap") -> None:
        self._group = group
        self.__name__ = self.__qualname__ = name  # DDP notes it
        self.engine: Engine | None = None
        # Optimizers keep the engine, and not the other way round; who has the hook may have dropped the optimizers themselves.
        self.optimizers: object = None

    def __call__(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        if self.engine is None:
            return allreduce_hook(self._group, bucket)
        return self.engine.on_bucket(state, bucket)

    def turn_off(self) -> None:
        self.engine = self.optimizers = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (DDPHook, ())


# DDP compares annotations, and in this file they are strings.
vars(DDPHook)["__call__"].__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}
