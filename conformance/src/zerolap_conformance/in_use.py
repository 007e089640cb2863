"""Tier 2: collectives as training uses them: hundreds of times, in any form and mixture, from any thread, and nothing is left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import torch
import torch.distributed as dist

from zerolap import Adapter
from zerolap_conformance.exchanges import VERBS, Exchange, Form, Verb, any_form, moved_by, reduced_by, start
from zerolap_conformance.leftovers import expect_nothing_left
from zerolap_conformance.requirements import requirement
from zerolap_conformance.support import device_of, own_group, world

NUM_USES = 330
AGE_SECONDS = 1.2


def _number(verb: Verb) -> int:
    return VERBS.index(verb)


def _use(adapter: Adapter, verb: Verb) -> None:
    """One verb, hundreds of times, of which a few are under way at once."""
    group, dice = own_group(adapter), random.Random(_number(verb))
    under_way: list[Exchange] = []
    forms: list[Form] = []
    for turn in range(NUM_USES):
        form = any_form(dice, adapter, group.size(), verb=verb)._replace(tag=turn % 256)
        under_way.append(start(adapter, group, form, seed=turn))
        forms.append(form)
        while len(under_way) > dice.choice([0, 0, 1, 4]):
            place = dice.choice([0, -1]) if _may_be_waited_for_in_any_order(forms) else 0
            _arrive(under_way.pop(place))
            forms.pop(place)
    for each in under_way:
        _arrive(each)


def _may_be_waited_for_in_any_order(forms: Sequence[Form]) -> bool:
    """Small ones may. Of those that fill what there is of room, the first is waited for first, as training does."""
    return sum(sum(form.sizes) * form.dtype.itemsize for form in forms) < 50_000


def _arrive(exchange: Exchange) -> None:
    exchange.pending.wait()
    exchange.check()


for _place, _verb in enumerate(VERBS, 1):
    _a = "An" if _verb[0] == "a" else "A"
    requirement(
        f"USE-{_place}",
        f"{_a} {_verb} gives the same bits the {NUM_USES}th time as the first, whatever its form, dtype and length.",
        tier=2,
        seconds=120,
    )(lambda adapter, verb=_verb: _use(adapter, verb))


def _mixtures(
    adapter: Adapter, groups: Sequence[dist.ProcessGroup], seed: int, number: int
) -> Iterator[list[tuple[int, Form]]]:
    """Batches of what is under way at once, by group. Tags differ within a group."""
    dice, tags = random.Random(seed), iter(range(10**9))
    while number > 0:
        batch = []
        is_like = dice.random() < 0.3  # many of one form, whose results could be taken for each other's
        like = any_form(dice, adapter, groups[0].size())._replace(verb=dice.choice(["reduce-scatter", "all-gather"]))
        like = like._replace(sizes=(dice.randint(1, 200),) * groups[0].size(), dtype=torch.float32, is_scalar=False)
        for _ in range(dice.choice([1, 2, 5, 9])):
            place = dice.randrange(len(groups))
            form = like if is_like else any_form(dice, adapter, groups[place].size())
            batch.append((place, form._replace(tag=next(tags) % 256)))
        number -= len(batch)
        yield batch


def _mix(adapter: Adapter, groups: Sequence[dist.ProcessGroup], *, seed: int, number: int) -> None:
    dice, own = random.Random(seed), random.Random(dist.get_rank())
    with ThreadPoolExecutor(1, initializer=_take_device, initargs=(adapter,)) as other:
        for turn, batch in enumerate(_mixtures(adapter, groups, seed, number)):
            is_elsewhere, waits_elsewhere = dice.random() < 0.35, dice.random() < 0.35

            def begin(batch: list[tuple[int, Form]] = batch, turn: int = turn) -> list[Exchange]:
                return [start(adapter, groups[at], form, seed=100 * turn + i) for i, (at, form) in enumerate(batch)]

            def end(under_way: list[Exchange], order: Sequence[int]) -> None:
                for i in order:
                    _arrive(under_way[i])

            if own.random() < 0.03:
                time.sleep(0.02)  # this rank comes late
            under_way = other.submit(begin).result() if is_elsewhere else begin()
            order = list(range(len(batch)))
            if dice.random() < 0.5 and _may_be_waited_for_in_any_order([form for _, form in batch]):
                dice.shuffle(order)
            if dice.random() < 0.03:
                time.sleep(0.11)  # nobody waits for what has long arrived
            other.submit(end, under_way, order).result() if waits_elsewhere else end(under_way, order)


def _take_device(adapter: Adapter) -> None:
    if adapter.device_type != "cpu":
        torch.accelerator.set_device_index(device_of(adapter).index or 0)  # a thread's own


@requirement(
    "MIX-1",
    "Collectives of all kinds and forms, in several groups and from several threads, give their own results.",
    tier=2,
    seconds=120,
)
def mixes(adapter: Adapter) -> None:
    _mix(adapter, [own_group(adapter) for _ in range(4)], seed=1, number=500)


@requirement(
    "MIX-2",
    "Groups of some ranks, or of all in another order, give all results as those of all ranks do.",
    tier=2,
    seconds=120,
    min_ranks=2,
)
def mixes_in_groups_of_some(adapter: Adapter) -> None:
    num_ranks, kind = dist.get_world_size(), dist.get_backend_config(world())
    whole = list(range(num_ranks))
    some = [whole[::-1], whole[1:], whole[1:] + whole[:1], whole[::2], whole[:-1]]
    for number, ranks in enumerate(ranks for i, ranks in enumerate(some) if ranks not in some[:i]):
        like = dist.new_group(ranks, backend=kind, sort_ranks=False)
        if dist.get_rank() in ranks:
            assert like is not None
            _mix(adapter, [own_group(adapter, like) for _ in range(2)], seed=number, number=130)
        dist.all_reduce(torch.zeros(1))


@requirement("MIX-3", "What has been in use for some seconds works as before.", tier=2, seconds=120)
def works_for_seconds(adapter: Adapter) -> None:
    groups = [own_group(adapter) for _ in range(2)]
    begin, is_over = time.monotonic(), torch.zeros(1)
    seed = 10
    while not is_over.item():
        _mix(adapter, groups, seed=seed, number=40)
        time.sleep(0.1)
        is_over.fill_(time.monotonic() - begin > AGE_SECONDS)
        dist.all_reduce(is_over, op=dist.ReduceOp.MIN)
        seed += 1
    _mix(adapter, groups, seed=seed, number=250)


@requirement(
    "MIX-4", "A hundred collectives may be under way at once, and be waited for in any order.", tier=2, seconds=120
)
def takes_a_hundred_at_once(adapter: Adapter) -> None:
    group = own_group(adapter)
    size = group.size()
    for number, verb in enumerate(VERBS):
        dtypes = moved_by(adapter) if verb in ("broadcast", "all-gather") else reduced_by(adapter)
        under_way = []
        for i in range(100):
            form = Form(verb=verb, dtype=dtypes[i // 10 % len(dtypes)], sizes=(30,) * (size if number > 2 else 1))
            form = form._replace(tag=2 * i + 50, root=i % size, is_scattered=number > 2 and i % 3 == 0)
            under_way.append(start(adapter, group, form, seed=i))
        for each in (under_way, under_way[::-1], under_way[::2] + under_way[1::2])[number % 3]:
            _arrive(each)


@requirement("LEAK-1", "Collectives leave no memory, threads or open files behind.", tier=2, seconds=120)
def leaves_nothing_behind(adapter: Adapter) -> None:
    groups = [own_group(adapter) for _ in range(2)]
    _mix(adapter, groups, seed=5, number=300)

    def work() -> None:
        _mix(adapter, groups, seed=5, number=260)
        for verb in VERBS:
            _many_at_once(adapter, groups[0], verb)

    work()
    expect_nothing_left(adapter, work, "435 collectives")


def _many_at_once(adapter: Adapter, group: dist.ProcessGroup, verb: Verb) -> None:
    """Small ones, and some large ones behind them."""
    num_parts = group.size() if verb in ("reduce-scatter", "all-gather") else 1
    under_way = []
    for i in range(35):
        form = Form(verb=verb, dtype=torch.float32, sizes=(20 if i < 30 else 150_000,) * num_parts, tag=i)
        under_way.append(start(adapter, group, form, seed=i))
    for each in under_way:
        _arrive(each)


@requirement(
    "LEAK-2",
    "A group that is closed leaves nothing behind, harms no other, and may be closed twice.",
    tier=2,
    seconds=120,
)
def closes_groups(adapter: Adapter) -> None:
    kept = own_group(adapter)

    turned = dist.new_group(
        list(reversed(range(dist.get_world_size()))), backend=dist.get_backend_config(world()), sort_ranks=False
    )
    turns = count()

    def come_and_go() -> None:
        group = own_group(adapter, turned if next(turns) % 2 else None)
        _mix(adapter, [group], seed=6, number=4)
        dist.all_reduce(torch.zeros(1))  # nobody closes what another still uses
        adapter.close_group(group)
        adapter.close_group(group)

    def several() -> None:
        for _ in range(8):
            come_and_go()

    several()
    expect_nothing_left(adapter, several, "8 groups")
    _mix(adapter, [kept], seed=7, number=40)
