"""The overlap machine, without a process group: every (phase, event) pair, and the law that makes deadlock impossible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest

from zerolap.errors import IllegalEventError
from zerolap.schedule.machine import AT_ONCE, TABLES, Action, Agreement, Event, Gather, Machine, Phase, Schedule, Verb

COLLECTIVES = {Verb.START_REDUCE, Verb.MIGRATE, Verb.AGREE, Verb.GATHER}


def known(machine: Machine, index: int, *, is_last: bool = False) -> tuple[Action, ...]:
    return machine.bucket_ready(index, is_last=is_last, is_known=True)


def unknown(machine: Machine, index: int, *, is_last: bool = False) -> tuple[Action, ...]:
    return machine.bucket_ready(index, is_last=is_last, is_known=False)


def reduce(index: int) -> tuple[Action, ...]:
    return (Action(Verb.START_REDUCE, index), Action(Verb.FINISH_REDUCE, index))


def _to_failed(machine: Machine) -> None:
    machine.failed()


def _to_recording(machine: Machine) -> None:
    unknown(machine, 0)


def _to_layout_seen(machine: Machine) -> None:
    unknown(machine, 0)
    unknown(machine, 1, is_last=True)


def _to_reduced(machine: Machine) -> None:
    _to_layout_seen(machine)
    machine.layout_seen(is_changed=True)


def _to_initialized(machine: Machine) -> None:
    _to_reduced(machine)
    if machine.phase is Phase.REDUCED:
        machine.step_called()


def _to_overlapping(machine: Machine) -> None:
    _to_initialized(machine)
    known(machine, 0)


REACH: dict[Phase, Callable[[Machine], None]] = {
    Phase.UNINITIALIZED: lambda machine: None,
    Phase.RECORDING: _to_recording,
    Phase.LAYOUT_SEEN: _to_layout_seen,
    Phase.INITIALIZED: _to_initialized,
    Phase.OVERLAPPING: _to_overlapping,
    Phase.REDUCED: _to_reduced,
    Phase.FAILED: _to_failed,
}

FEED: dict[Event, Callable[[Machine], object]] = {
    Event.BUCKET: lambda m: known(m, m.next_bucket),
    Event.LAST_BUCKET: lambda m: known(m, m.next_bucket, is_last=True),
    Event.UNKNOWN_BUCKET: lambda m: unknown(m, m.next_bucket),
    Event.LAST_UNKNOWN_BUCKET: lambda m: unknown(m, m.next_bucket, is_last=True),
    Event.LAYOUT_KEPT: lambda m: m.layout_seen(is_changed=False),
    Event.LAYOUT_CHANGED: lambda m: m.layout_seen(is_changed=True),
    Event.STEP_CALLED: lambda m: m.step_called(),
    Event.STEP_SKIPPED: lambda m: m.step_skipped(),
    Event.FAILURE: lambda m: m.failed(),
}


PHASES = [
    (schedule, phase)
    for schedule, phase in product(Schedule, Phase)
    if phase is not Phase.REDUCED or schedule is Schedule.ON_STEP
]


def test_every_phase_has_a_row_and_can_be_reached() -> None:
    for schedule, table in TABLES.items():
        assert set(table) == set(Phase) == set(REACH)
        reachable = {t.to for row in table.values() for t in row.values()} | {Phase.UNINITIALIZED}
        assert reachable == {phase for of, phase in PHASES if of is schedule}


@pytest.mark.parametrize(("schedule", "phase"), PHASES)
@pytest.mark.parametrize("event", Event)
def test_every_event_in_every_phase_follows_the_table_or_changes_nothing(
    schedule: Schedule, phase: Phase, event: Event
) -> None:
    machine, row = Machine(schedule), TABLES[schedule][phase]
    REACH[phase](machine)
    assert machine.phase is phase
    seen = machine.next_bucket
    if event in row:
        FEED[event](machine)
        assert machine.phase is row[event].to
    else:
        with pytest.raises(IllegalEventError, match=f"{event.name} is illegal in phase {phase.name}"):
            FEED[event](machine)
        assert (machine.phase, machine.next_bucket) == (phase, seen)


@pytest.mark.parametrize(("schedule", "phase"), PHASES)
def test_a_bucket_out_of_order_is_refused_and_changes_nothing(schedule: Schedule, phase: Phase) -> None:
    machine = Machine(schedule)
    REACH[phase](machine)
    seen = machine.next_bucket
    for index, is_last, is_known in product({0, 1, 2, 3} - {seen}, (False, True), (False, True)):
        with pytest.raises(IllegalEventError, match=f"bucket {index} is ready where bucket {seen} was expected"):
            machine.bucket_ready(index, is_last=is_last, is_known=is_known)
        assert (machine.phase, machine.next_bucket) == (phase, seen)


def test_interleaved_updates_a_bucket_as_soon_as_it_comes() -> None:
    machine = Machine(Schedule.INTERLEAVED)
    _to_initialized(machine)
    assert known(machine, 0) == (*reduce(0), Action(Verb.STEP, 0), Action(Verb.GATHER, 0))
    assert known(machine, 1, is_last=True) == (
        *reduce(1),
        Action(Verb.STEP, 1),
        Action(Verb.GATHER, 1),
        Action(Verb.WAIT),
        Action(Verb.FINISH),
    )


def test_after_backward_updates_everything_behind_the_last_bucket() -> None:
    machine = Machine(Schedule.AFTER_BACKWARD)
    _to_initialized(machine)
    assert known(machine, 0) == reduce(0)
    assert [a.verb for a in known(machine, 1, is_last=True)] == [
        Verb.START_REDUCE,
        Verb.FINISH_REDUCE,
        Verb.STEP,
        Verb.GATHER,
        Verb.STEP,
        Verb.GATHER,
        Verb.WAIT,
        Verb.FINISH,
    ]


@pytest.mark.parametrize("schedule", Schedule)
def test_the_first_backward_is_updated_too(schedule: Schedule) -> None:
    machine = Machine(schedule)
    _to_layout_seen(machine)
    actions = machine.layout_seen(is_changed=True)
    if schedule is Schedule.ON_STEP:
        actions += machine.step_called()
    assert actions == (
        Action(Verb.ASSIGN),
        Action(Verb.MIGRATE),
        Action(Verb.STEP, 0),
        Action(Verb.GATHER, 0),
        Action(Verb.STEP, 1),
        Action(Verb.GATHER, 1),
        Action(Verb.WAIT),
        Action(Verb.FINISH),
    )


def _backward(
    machine: Machine, *, num_buckets: int, is_known: bool, is_changed: bool, early: range = range(0)
) -> list[Action]:
    """One backward as DDP makes it: every bucket in order, known or not as a whole."""
    actions: list[Action] = []
    for index in range(num_buckets):
        actions += machine.bucket_ready(index, is_last=index == num_buckets - 1, is_known=is_known)
    if machine.phase is Phase.LAYOUT_SEEN:
        actions += machine.layout_seen(is_changed=is_changed, early=early)
    if machine.phase is Phase.REDUCED:
        actions += machine.step_called()
    return actions


def _histories(num_ranks: int, num_backwards: int) -> Iterator[list[tuple[bool, tuple[bool, ...]]]]:
    """Everything that can happen: DDP changes the layout for all ranks or for none; while it is kept, any rank may still
    meet unknown buffers (one that joined early does), the others their known ones."""
    kept = [(False, mask) for mask in product((False, True), repeat=num_ranks)]
    changed = [(True, (False,) * num_ranks)]
    for later in product(kept + changed, repeat=num_backwards - 1):
        yield [*changed, *later]


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("gather", Gather)
@pytest.mark.parametrize("agreement", Agreement)
@pytest.mark.parametrize("num_buckets", [1, 2, 5])
def test_all_ranks_emit_the_same_collectives_whatever_happens(
    schedule: Schedule, gather: Gather, agreement: Agreement, num_buckets: int
) -> None:
    num_ranks = 3
    for history in _histories(num_ranks, num_backwards=3):
        machines = [Machine(schedule, gather=gather, agreement=agreement) for _ in range(num_ranks)]
        for is_changed, masks in history:
            emitted = [
                _backward(
                    machine,
                    num_buckets=num_buckets,
                    is_known=is_known,
                    is_changed=is_changed,
                    early=range(1, num_buckets // 2 + 1),
                )
                for machine, is_known in zip(machines, masks, strict=True)
            ]
            # Reductions are on DDP's group, the others on the optimizer's: each group's order must agree.
            for group in ({Verb.START_REDUCE}, COLLECTIVES - {Verb.START_REDUCE}):
                sequences = [[a for a in actions if a.verb in group] for actions in emitted]
                assert all(sequence == sequences[0] for sequence in sequences), history
            for actions in emitted:  # and every bucket is reduced, stepped and gathered once, in this order
                for index in range(num_buckets):
                    of_bucket = [a.verb for a in actions if a.bucket == index and a.verb is not Verb.RECORD]
                    assert [v for v in of_bucket if v is not Verb.AGREE] == [
                        Verb.START_REDUCE,
                        Verb.FINISH_REDUCE,
                        Verb.STEP,
                        Verb.GATHER,
                    ]
                assert actions[-1] == Action(Verb.FINISH)
                assert (Action(Verb.WAIT) in actions) == (gather is Gather.EAGER)


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        (Schedule.INTERLEAVED, [1, 2, 4, 3, 0]),
        (Schedule.AFTER_BACKWARD, [4, 3, 2, 1, 0]),
        (Schedule.ON_STEP, [4, 3, 2, 1, 0]),
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_lazy_gathers_start_with_what_the_next_forward_needs_first(
    schedule: Schedule, order: list[int], is_known: bool
) -> None:
    machine = Machine(schedule, gather=Gather.LAZY)
    for known_now in (False, is_known):
        actions = _backward(machine, num_buckets=5, is_known=known_now, is_changed=not known_now, early=range(1, 3))
    assert [a.bucket for a in actions if a.verb is Verb.GATHER] == order
    if is_known and schedule is Schedule.INTERLEAVED:  # the two early ones do not wait for the last bucket
        assert actions.index(Action(Verb.GATHER, 1)) < actions.index(Action(Verb.START_REDUCE, 3))


@pytest.mark.parametrize(
    ("agreement", "expected"),
    [(Agreement.NEVER, [0, 0, 0]), (Agreement.PER_LAYOUT, [2, 0, 0]), (Agreement.ALWAYS, [2, 2, 2])],
)
def test_ranks_agree_on_used_parameters_as_often_as_the_graph_can_change(
    agreement: Agreement, expected: list[int]
) -> None:
    machine = Machine(Schedule.INTERLEAVED, agreement=agreement)
    counts = []
    for is_known in (False, True, False):
        actions = _backward(machine, num_buckets=2, is_known=is_known, is_changed=not counts)
        counts.append(sum(a.verb is Verb.AGREE for a in actions))
    assert counts == expected


def test_step_between_backwards_asks_for_nothing() -> None:
    machine = Machine(Schedule.INTERLEAVED)
    assert machine.step_called() == ()
    _to_initialized(machine)
    assert machine.step_called() == ()


def test_a_new_backward_without_step_skips_the_update() -> None:
    machine = Machine(Schedule.ON_STEP, agreement=Agreement.PER_LAYOUT)
    _to_reduced(machine)
    assert known(machine, 0) == reduce(0)
    assert known(machine, 1, is_last=True) == reduce(1)
    assert machine.step_called() == (
        *(Action(verb, bucket) for bucket in (0, 1) for verb in (Verb.AGREE, Verb.STEP, Verb.GATHER)),
        Action(Verb.WAIT),
        Action(Verb.FINISH),
    )
    assert machine.step_called() == ()


def test_an_update_that_is_skipped_asks_for_nothing_and_the_next_one_is_made() -> None:
    machine = Machine(Schedule.ON_STEP)
    _to_reduced(machine)
    machine.step_skipped()
    assert machine.phase is Phase.INITIALIZED
    assert machine.step_called() == ()
    known(machine, 0)
    known(machine, 1, is_last=True)
    assert Action(Verb.FINISH) in machine.step_called()


def _update(machine: Machine, *, is_joined: bool = False) -> None:
    for index in (0, 1):
        machine.bucket_ready(index, is_last=index == 1, is_known=True, is_joined=is_joined)


@pytest.mark.parametrize("schedule", Schedule)
def test_who_calls_step_after_one_update_calls_it_after_all(schedule: Schedule) -> None:
    machine = Machine(schedule)
    _to_initialized(machine)
    _update(machine)  # step() was called by nobody, or after every backward
    machine.step_called()
    _update(machine)
    if schedule is Schedule.ON_STEP:
        _update(machine)  # which leaves an update out
        return
    before = (machine.phase, machine.next_bucket)
    with pytest.raises(IllegalEventError, match=r"step\(\) was not called after the last backward"):
        known(machine, 0)
    assert (machine.phase, machine.next_bucket) == before
    machine.step_called()
    _update(machine)


def test_a_rank_that_has_joined_calls_no_step() -> None:
    machine = Machine(Schedule.INTERLEAVED)
    _to_initialized(machine)
    machine.step_called()
    for _ in range(3):
        _update(machine, is_joined=True)


def test_what_is_done_at_once_and_what_the_lane_does_are_told_by_the_verb() -> None:
    assert {Verb.RECORD, Verb.START_REDUCE, Verb.ASSIGN} == AT_ONCE
    for schedule, gather, agreement in product(Schedule, Gather, Agreement):
        machine = Machine(schedule, gather=gather, agreement=agreement)
        emitted = {a.verb for a in _backward(machine, num_buckets=3, is_known=False, is_changed=True)}
        assert emitted | {Verb.AGREE, Verb.WAIT} == set(Verb)
