"""Pages of memory that are handed on: what is beside them stays, and nothing is taken from who uses it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from zerolap_cpu_gloo import pages
from zerolap_cpu_gloo.pages import Pages

MB = 2**20


def _resident() -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024


def _tensors(*sizes: int) -> list[torch.Tensor]:
    """Parts of one block of memory, one behind the other, at odd places."""
    return list(torch.arange(sum(sizes), dtype=torch.int64).split(sizes))


@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_is_done_only_what_was_discarded_changes(seed: int) -> None:
    choose, kept = random.Random(seed), Pages()
    tensors = _tensors(*(choose.randrange(1, 200_000) for _ in range(24)))
    there = [True] * len(tensors)
    for tensor, fill in zip(tensors, range(24), strict=True):
        tensor.fill_(fill)
    for turn in range(2000):
        place = choose.randrange(24)
        if there[place]:
            kept.discard(tensors[place])
        else:
            kept.refill(tensors[place])
            tensors[place].fill_(place)
            if choose.random() < 0.2:
                kept.release(choose.choice((0, MB, 3 * MB)))
        there[place] = not there[place]
        if turn % 7 == 0:
            for each, tensor in enumerate(tensors):
                assert not there[each] or tensor.eq(each).all(), (turn, each)


def test_what_is_discarded_goes_back_to_the_system_when_it_is_released() -> None:
    tensors = _tensors(*[10 * MB // 8] * 10)
    for tensor in tensors:
        tensor.fill_(1)
    before, kept = _resident(), Pages()
    for tensor in tensors:
        kept.discard(tensor)
    assert before - _resident() < 10
    kept.release(33 * MB)
    assert 60 <= before - _resident() <= 75
    assert 32 * MB <= kept.num_bytes <= 33 * MB
    kept.release()
    assert before - _resident() >= 95


def test_what_is_kept_is_handed_on_and_costs_nothing() -> None:
    first, second = _tensors(*[40 * MB // 8] * 2)
    kept = Pages()
    kept.discard(second)
    kept.release()
    first.fill_(7)
    before = _resident()
    kept.discard(first)
    kept.refill(second)
    assert second[1000 : -MB // 8].eq(7).all(), "other pages came"
    second.fill_(8)
    assert abs(_resident() - before) < 10, "memory for both"
    assert not first[1000 : -MB // 8].any(), "what was handed on is still there"


def test_moving_pages_does_not_break_memory_into_ever_more_parts() -> None:
    """The system keeps a note of every part, and has only so many."""
    kept, tensors, counts = Pages(), _tensors(*(MB // 8 * (3 + place % 5) for place in range(12))), []
    for turn in range(120):
        for place in range(12):
            kept.refill(tensors[place])
            tensors[place].fill_(place)
            kept.discard(tensors[place - 1])
        if turn % 40 == 39:
            counts.append(Path("/proc/self/maps").read_text().count("\n"))
    assert counts[-1] <= counts[0] + 5, counts


def test_memory_that_was_freed_is_not_taken_from_who_has_it_now() -> None:
    kept = Pages()
    for _ in range(20):
        gone = torch.ones(MB)
        kept.discard(gone)
        del gone
        others = [torch.full((MB,), 3.0) for _ in range(4)]
        kept.refill(torch.empty(2 * MB))
        assert all(other.eq(3).all() for other in others)


def test_where_pages_cannot_be_moved_they_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = pages._libc
    assert libc is not None

    class Refusing:
        """A kernel that has unmapped what was there before it found that it cannot move anything."""

        def mremap(self, old: object, size: object, new_size: object, flags: object, to: object) -> int | None:
            libc.munmap(to, size)
            return pages._FAILED

        def __getattr__(self, name: str) -> object:
            return getattr(libc, name)

    monkeypatch.setattr(pages, "_libc", Refusing())
    first, second = _tensors(*[20 * MB // 8] * 2)
    kept = Pages()
    kept.discard(second)
    kept.release()
    kept.discard(first)
    kept.refill(second)
    second.fill_(5)
    before = _resident()
    kept.discard(second)
    assert kept.num_bytes == 0
    assert before - _resident() > 18
