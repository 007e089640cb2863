"""The overlap machine: events in, actions out. No tensors, no torch, no threads, no waiting.

Theory of operation
-------------------
DDP hands its gradient buckets to a hook in bucket order, once per synchronised backward. Which parameters lie in which
bucket is its *layout*; DDP changes it once or never, between two backwards. A shard can be updated while backward still
runs only if its bucket's place in the layout is known beforehand, so the machine has two ways through a backward:

* a layout not seen yet is **recorded**: buckets are reduced as they come, and behind the last one everything is updated;
* a layout already planned for is **overlapped**: a bucket is updated when the schedule says so.

Both apply every update, the first backward's included, and both emit the same collectives in the same order:
``START_REDUCE 0..n-1`` on one group, every bucket's ``AGREE`` and ``GATHER`` in a fixed order on another. That is the law that
makes deadlock impossible when some ranks record while others overlap (a rank that has joined early always records).

Whoever interprets the actions does those of ``AT_ONCE`` before it returns to DDP, and all others behind each other in one lane.

Two rules are not of one phase, and stand in ``Machine._refuse``: buckets come in order, and who calls ``step()`` after one backward
that has updated calls it after all of them.

A lazy gather starts with what the next forward needs first, and DDP fills its buckets from the model's end: the last bucket
goes first. Interleaved, the ``early`` buckets are gathered at once all the same, while backward still computes.

UNINITIALIZED and INITIALIZED are torch's words (``_OverlapStatus``); RECORDING is entered where torch waits for
DDP_HAS_REBUILT_BUCKETS, but from the first backward on, before DDP has rebuilt anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from functools import cache
from types import MappingProxyType
from typing import Final, NamedTuple

from zerolap.errors import IllegalEventError


class Schedule(Enum):
    """When a bucket whose layout is known is updated."""

    INTERLEAVED = "interleaved"  # as soon as it is reduced, inside backward
    AFTER_BACKWARD = "after_backward"  # once the last bucket is computed, while reductions are outstanding
    ON_STEP = "on_step"  # when the user calls step(): gradients can be clipped, unscaled or skipped before


class Gather(Enum):
    """When updated parameters are waited for."""

    EAGER = "eager"  # before backward or step() returns
    LAZY = "lazy"  # when they are used next


class Agreement(Enum):
    """How often the ranks must agree on which parameters were used by any of them."""

    NEVER = auto()  # DDP insists that every parameter is used
    PER_LAYOUT = auto()  # the graph is static: once for each layout
    ALWAYS = auto()  # DDP looks for unused parameters in every forward


class _Named(Enum):
    """Members are looked up for every bucket, and an Enum's own hash is a function of Python's; there is one of each anyway."""

    __hash__ = object.__hash__


class Phase(_Named):
    """Where the machine stands between two events."""

    UNINITIALIZED = auto()  # at the start: no layout has been seen whole
    RECORDING = (
        auto()
    )  # a bucket that may not fit the plan arrived: what this backward's buckets hold is being recorded
    LAYOUT_SEEN = auto()  # the last of those buckets arrived: is the layout new, or the planned one again?
    INITIALIZED = auto()  # between two backwards, with a plan that fits
    OVERLAPPING = auto()  # inside a backward whose buckets fit the plan
    REDUCED = auto()  # backward is over, its update waits for step(); a new backward means that it was left out
    FAILED = auto()  # something broke: the parameters of the ranks may differ, nothing may go on


class Event(_Named):
    """What the machine is told."""

    BUCKET = auto()  # a bucket that fits the plan is ready, others follow
    LAST_BUCKET = auto()  # the backward's last bucket is ready, and fits the plan
    UNKNOWN_BUCKET = auto()  # a bucket that may not fit the plan is ready, others follow
    LAST_UNKNOWN_BUCKET = auto()  # the backward's last bucket is ready, and may not fit the plan
    LAYOUT_KEPT = auto()  # the buckets just recorded are those of the plan
    LAYOUT_CHANGED = auto()  # the buckets just recorded need a new plan
    STEP_CALLED = auto()  # the user called step()
    STEP_SKIPPED = auto()  # the user called step(), and its update must not be made
    FAILURE = auto()  # an action failed


class Verb(_Named):
    """What the machine asks for. The engine knows how."""

    RECORD = auto()  # remember what this bucket holds
    START_REDUCE = auto()  # start reducing this bucket's gradients: a collective
    FINISH_REDUCE = auto()  # wait until this bucket's gradients are reduced
    ASSIGN = auto()  # decide who owns what in the layout just recorded
    MIGRATE = auto()  # bring every optimizer state to its new owner: a collective
    AGREE = auto()  # find out which of this bucket's parameters any rank used: a collective
    STEP = auto()  # update this rank's shard of this bucket
    GATHER = auto()  # start sending this bucket's updated shards to all ranks: a collective
    WAIT = auto()  # make sure that all parameters are back before backward or step() returns
    FINISH = auto()  # the update is over


# Done on the thread that feeds the machine, when it is asked for: a reduction must not wait behind what the lane does. All other verbs
# are the lane's.
AT_ONCE: Final = frozenset({Verb.RECORD, Verb.START_REDUCE, Verb.ASSIGN})


class Action(NamedTuple):
    """One thing to do, in the order emitted; ``bucket`` is None where it concerns all of them."""

    verb: Verb
    bucket: int | None = None


class _Do(_Named):
    """The table's shorthand for groups of actions."""

    RECORD = auto()
    REDUCE = auto()  # START_REDUCE, FINISH_REDUCE
    ASSIGN = auto()  # ASSIGN, MIGRATE
    UPDATE_EARLY = (
        auto()
    )  # AGREE, STEP, and GATHER unless that can wait, of the bucket at hand if the schedule is interleaved
    UPDATE_REST = auto()  # AGREE, STEP of every bucket not updated yet, GATHER of those not gathered yet
    FINISH = auto()  # WAIT, unless the gather is lazy, and FINISH


class Transition(NamedTuple):
    to: Phase
    do: tuple[_Do, ...] = ()


_RECORDED = (_Do.RECORD, _Do.REDUCE)

Table = Mapping[Phase, Mapping[Event, Transition]]

# Every phase has a row, every legal event an entry. What is not here is illegal.
IN_BACKWARD: Final[Table] = MappingProxyType(
    {
        Phase.UNINITIALIZED: {
            Event.UNKNOWN_BUCKET: Transition(Phase.RECORDING, _RECORDED),
            Event.LAST_UNKNOWN_BUCKET: Transition(Phase.LAYOUT_SEEN, _RECORDED),
            Event.STEP_CALLED: Transition(Phase.UNINITIALIZED),
            Event.FAILURE: Transition(Phase.FAILED),
        },
        Phase.RECORDING: {
            Event.UNKNOWN_BUCKET: Transition(Phase.RECORDING, _RECORDED),
            Event.LAST_UNKNOWN_BUCKET: Transition(Phase.LAYOUT_SEEN, _RECORDED),
            Event.FAILURE: Transition(Phase.FAILED),
        },
        Phase.LAYOUT_SEEN: {
            Event.LAYOUT_KEPT: Transition(Phase.INITIALIZED, (_Do.UPDATE_REST, _Do.FINISH)),
            Event.LAYOUT_CHANGED: Transition(Phase.INITIALIZED, (_Do.ASSIGN, _Do.UPDATE_REST, _Do.FINISH)),
            Event.FAILURE: Transition(Phase.FAILED),
        },
        Phase.INITIALIZED: {
            Event.BUCKET: Transition(Phase.OVERLAPPING, (_Do.REDUCE, _Do.UPDATE_EARLY)),
            Event.LAST_BUCKET: Transition(Phase.INITIALIZED, (_Do.REDUCE, _Do.UPDATE_REST, _Do.FINISH)),
            Event.UNKNOWN_BUCKET: Transition(Phase.RECORDING, _RECORDED),
            Event.LAST_UNKNOWN_BUCKET: Transition(Phase.LAYOUT_SEEN, _RECORDED),
            Event.STEP_CALLED: Transition(Phase.INITIALIZED),
            Event.FAILURE: Transition(Phase.FAILED),
        },
        Phase.OVERLAPPING: {
            Event.BUCKET: Transition(Phase.OVERLAPPING, (_Do.REDUCE, _Do.UPDATE_EARLY)),
            Event.LAST_BUCKET: Transition(Phase.INITIALIZED, (_Do.REDUCE, _Do.UPDATE_REST, _Do.FINISH)),
            Event.FAILURE: Transition(Phase.FAILED),
        },
        Phase.REDUCED: {},  # the update never waits for step()
        Phase.FAILED: {
            Event.FAILURE: Transition(Phase.FAILED),
        },
    }
)

# The same, but for the rows in which a backward ends.
ON_STEP: Final[Table] = MappingProxyType(
    {
        **IN_BACKWARD,
        Phase.LAYOUT_SEEN: {
            Event.LAYOUT_KEPT: Transition(Phase.REDUCED),
            Event.LAYOUT_CHANGED: Transition(Phase.REDUCED, (_Do.ASSIGN,)),
            Event.FAILURE: Transition(Phase.FAILED),
        },
        Phase.INITIALIZED: {
            Event.BUCKET: Transition(Phase.OVERLAPPING, (_Do.REDUCE,)),
            Event.LAST_BUCKET: Transition(Phase.REDUCED, (_Do.REDUCE,)),
            Event.UNKNOWN_BUCKET: Transition(Phase.RECORDING, _RECORDED),
            Event.LAST_UNKNOWN_BUCKET: Transition(Phase.LAYOUT_SEEN, _RECORDED),
            Event.STEP_CALLED: Transition(Phase.INITIALIZED),
            Event.FAILURE: Transition(Phase.FAILED),
        },
        Phase.OVERLAPPING: {
            Event.BUCKET: Transition(Phase.OVERLAPPING, (_Do.REDUCE,)),
            Event.LAST_BUCKET: Transition(Phase.REDUCED, (_Do.REDUCE,)),
            Event.FAILURE: Transition(Phase.FAILED),
        },
        Phase.REDUCED: {
            Event.BUCKET: Transition(Phase.OVERLAPPING, (_Do.REDUCE,)),
            Event.LAST_BUCKET: Transition(Phase.REDUCED, (_Do.REDUCE,)),
            Event.UNKNOWN_BUCKET: Transition(Phase.RECORDING, _RECORDED),
            Event.LAST_UNKNOWN_BUCKET: Transition(Phase.LAYOUT_SEEN, _RECORDED),
            Event.STEP_CALLED: Transition(Phase.INITIALIZED, (_Do.UPDATE_REST, _Do.FINISH)),
            Event.STEP_SKIPPED: Transition(Phase.INITIALIZED),
            Event.FAILURE: Transition(Phase.FAILED),
        },
    }
)

TABLES: Final[Mapping[Schedule, Table]] = MappingProxyType(
    {Schedule.INTERLEAVED: IN_BACKWARD, Schedule.AFTER_BACKWARD: IN_BACKWARD, Schedule.ON_STEP: ON_STEP}
)

_SETTLED: Final = frozenset({Phase.UNINITIALIZED, Phase.INITIALIZED})
_BETWEEN_BACKWARDS: Final = _SETTLED | {Phase.REDUCED}


class _Position(NamedTuple):
    """All that changes: the phase, and how far the backward at hand has come."""

    phase: Phase = Phase.UNINITIALIZED
    num_seen: int = 0
    num_updated: int = 0
    has_new_layout: bool = False  # no update has been made in this layout yet
    early: range = range(0)  # buckets whose lazy gather starts as soon as they are updated, if that is inside backward
    calls_step: bool = False  # the user has called step()
    is_step_due: bool = False  # and not since the last backward of this rank's own


class Machine:
    """One rank's overlap machine. Feed it events in the order they happen; do what it returns in that order."""

    def __init__(
        self, schedule: Schedule, *, gather: Gather = Gather.EAGER, agreement: Agreement = Agreement.NEVER
    ) -> None:
        self.schedule = schedule
        self.gather = gather
        self._agreement = agreement
        self._table = TABLES[schedule]
        self._at = _Position()
        self.phase = self._at.phase
        self._next = cache(self._next_anew)  # the same few, in every backward

    def reschedule(self, schedule: Schedule, gather: Gather) -> None:
        """Go on in another way, from the next backward on; all ranks at the same one. No update may be outstanding."""
        if self._at.phase not in _SETTLED:
            raise IllegalEventError(f"the schedule cannot be changed in phase {self._at.phase.name}")
        self.schedule, self.gather, self._table = schedule, gather, TABLES[schedule]
        self._next.cache_clear()

    @property
    def next_bucket(self) -> int:
        """The index of the bucket that must come next."""
        return 0 if self._at.phase in _BETWEEN_BACKWARDS else self._at.num_seen

    def bucket_ready(self, index: int, *, is_last: bool, is_known: bool, is_joined: bool = False) -> tuple[Action, ...]:
        """A bucket's gradients are computed. Buckets come in order, from 0 on, as DDP launches them.

        A rank that has joined hands over zeros for the backwards of others, and calls no step().
        """
        if is_known:
            return self._feed(Event.LAST_BUCKET if is_last else Event.BUCKET, index, is_joined)
        return self._feed(Event.LAST_UNKNOWN_BUCKET if is_last else Event.UNKNOWN_BUCKET, index, is_joined)

    def layout_seen(self, *, is_changed: bool, early: range = range(0)) -> tuple[Action, ...]:
        """All buckets of a recorded backward are there, and were compared with the plan's layout."""
        self._at = self._at._replace(early=early)
        return self._feed(Event.LAYOUT_CHANGED if is_changed else Event.LAYOUT_KEPT)

    def step_called(self) -> tuple[Action, ...]:
        """The user called step() between two backwards."""
        return self._feed(Event.STEP_CALLED)

    def step_skipped(self) -> None:
        """The user called step() behind a backward whose update must not be made."""
        self._feed(Event.STEP_SKIPPED)

    def failed(self) -> None:
        """An action failed, here or on the way; only a new machine can go on."""
        self._feed(Event.FAILURE)

    def _feed(self, event: Event, index: int | None = None, is_joined: bool = False) -> tuple[Action, ...]:
        self._at, actions = self._next(self._at, event, index, is_joined)
        self.phase = self._at.phase
        return actions

    def _next_anew(
        self, at: _Position, event: Event, index: int | None, is_joined: bool
    ) -> tuple[_Position, tuple[Action, ...]]:
        self._refuse(at, index, is_joined)
        row = self._table[at.phase]
        transition = row.get(event)
        if transition is None:
            raise IllegalEventError(
                f"{event.name} is illegal in phase {at.phase.name}; legal: {', '.join(e.name for e in row) or 'nothing'}"
            )
        num_seen = at.num_seen if index is None else index + 1
        num_updated = 0 if index == 0 else at.num_updated
        has_new_layout = at.has_new_layout or event is Event.LAYOUT_CHANGED
        actions = self._expand(transition.do, num_seen, num_updated, has_new_layout, at.early)
        is_step = event in (Event.STEP_CALLED, Event.STEP_SKIPPED)
        return _Position(
            phase=transition.to,
            num_seen=num_seen,
            num_updated=num_seen if any(verb is Verb.STEP for verb, _ in actions) else num_updated,
            has_new_layout=has_new_layout and Action(Verb.FINISH) not in actions,
            early=at.early,
            calls_step=at.calls_step or is_step,
            is_step_due=not is_step and (at.is_step_due or (index == 0 and not is_joined)),
        ), actions

    def _refuse(self, at: _Position, index: int | None, is_joined: bool) -> None:
        """The rules that hold in every phase."""
        if index is not None and index != self.next_bucket:
            raise IllegalEventError(
                f"bucket {index} is ready where bucket {self.next_bucket} was expected (phase {at.phase.name}): "
                "the previous backward did not finish, or two backwards run at once"
            )
        is_due = at.calls_step and at.is_step_due and self.schedule is not Schedule.ON_STEP
        if index == 0 and is_due and not is_joined:
            raise IllegalEventError(
                "step() was not called after the last backward, as it was before: here every backward is an update, whether "
                "step() is called or not. Call it after every backward, or never; accumulate gradients under ddp.no_sync(); "
                'to skip updates use zerolap.attach(ddp, optimizer, schedule="on_step")'
            )

    def _expand(
        self, do: tuple[_Do, ...], num_seen: int, num_updated: int, has_new_layout: bool, early: range
    ) -> tuple[Action, ...]:
        this = num_seen - 1
        is_interleaved, is_lazy = self.schedule is Schedule.INTERLEAVED, self.gather is Gather.LAZY
        waiting = [i for i in reversed(range(num_seen)) if i not in early] if is_interleaved and is_lazy else []
        due = range(num_updated, num_seen)
        if is_lazy and not is_interleaved:
            due = due[::-1]
        agrees = self._agreement is Agreement.ALWAYS or (self._agreement is Agreement.PER_LAYOUT and has_new_layout)
        actions: list[Action] = []
        for what in do:
            match what:
                case _Do.RECORD:
                    actions.append(Action(Verb.RECORD, this))
                case _Do.REDUCE:
                    actions += (Action(Verb.START_REDUCE, this), Action(Verb.FINISH_REDUCE, this))
                case _Do.ASSIGN:
                    actions += (Action(Verb.ASSIGN), Action(Verb.MIGRATE))
                case _Do.UPDATE_EARLY | _Do.UPDATE_REST:
                    if what is _Do.UPDATE_EARLY and not is_interleaved:
                        continue
                    for bucket in due:
                        if agrees:
                            actions.append(Action(Verb.AGREE, bucket))
                        actions.append(Action(Verb.STEP, bucket))
                        if bucket not in waiting:
                            actions.append(Action(Verb.GATHER, bucket))
                    if what is _Do.UPDATE_REST:
                        actions += (Action(Verb.GATHER, bucket) for bucket in waiting)
                case _Do.FINISH:
                    if self.gather is Gather.EAGER:
                        actions.append(Action(Verb.WAIT))
                    actions.append(Action(Verb.FINISH))
        return tuple(actions)
