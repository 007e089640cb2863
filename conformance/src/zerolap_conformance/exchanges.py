"""Collectives whose outcome is known: started in any form, and compared bit by bit when they have arrived.

Values are whole numbers that use all the bits of a dtype but those that a sum over the ranks needs, so that sums are exact, and the
same in whatever order they are taken. What lies before and behind a tensor is watched, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import zerolap
from zerolap import Adapter
from zerolap.schedule.ownership import GroupRank
from zerolap_conformance.support import device_of, expect_equal

Verb = Literal["all-reduce", "maximum", "broadcast", "reduce-scatter", "all-gather"]
VERBS: tuple[Verb, ...] = ("all-reduce", "maximum", "broadcast", "reduce-scatter", "all-gather")
REDUCED = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
MOVED = (*REDUCED, torch.uint8)
_EXACT_BITS = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.int64: 62,
    torch.int32: 31,
    torch.uint8: 8,
}
_MARK = 77  # what lies around tensors


class Form(NamedTuple):
    """What is exchanged: by which verb, how much of what, and how it lies in memory."""

    verb: Verb
    dtype: torch.dtype
    sizes: tuple[int, ...]  # of each rank's part; one size for those verbs that have no parts
    tag: int = 0
    root: int = 0
    is_scattered: bool = False  # parts have memory of their own each
    is_scalar: bool = False
    is_inside: bool = True  # other memory lies before and behind

    def __str__(self) -> str:
        sizes = self.sizes if len(set(self.sizes)) > 1 else f"{self.sizes[0]} elements"
        return f"{self.verb} of {'a scalar' if self.is_scalar else sizes} of {self.dtype}"


@dataclass(slots=True)
class Exchange:
    """A collective under way. ``check`` is called when it was waited for; it tells the caller's memory from what it should be."""

    pending: zerolap.Pending
    check: Callable[[], None]


def reduced_by(adapter: Adapter) -> tuple[torch.dtype, ...]:
    """The dtypes that are reduced: of those that training may ask for, what the device can hold at all."""
    return _held(adapter, REDUCED)


def moved_by(adapter: Adapter) -> tuple[torch.dtype, ...]:
    return _held(adapter, MOVED)


def _held(adapter: Adapter, dtypes: Sequence[torch.dtype]) -> tuple[torch.dtype, ...]:
    more = (torch.float64,) if adapter.capabilities.has_float64 else ()
    return tuple(dtype for dtype in (*dtypes, *more) if can_hold(device_of(adapter), dtype))


@cache
def can_hold(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are tensors of this dtype on the device. Single precision there must be."""
    if dtype in (torch.float32, torch.int64) or device.type == "cpu":
        return True
    try:
        torch.ones(2, dtype=dtype).to(device).cpu()
    except Exception:  # whatever a device says of a dtype that it does not have
        return False
    return True


def numbers(numel: int, dtype: torch.dtype, *, seed: int, rank: int, num_ranks: int) -> Tensor:
    """What a rank has of what is summed: the same on whatever rank it is computed."""
    dice = torch.Generator().manual_seed(1_000_003 * seed + rank)
    most = 2 ** _EXACT_BITS[dtype] // max(2, num_ranks) - 1
    least = 0 if dtype == torch.uint8 else -most
    values = torch.randint(least, most + 1, (min(numel, _PERIOD),), generator=dice, dtype=torch.int64).to(dtype)
    if dtype.is_floating_point:  # here and there what has a meaning of its own
        info = torch.finfo(dtype)
        values[seed % 7 + 3 :: 29] = -0.0
        values[seed % 5 + 11 :: 31] = float("inf") if rank == seed % num_ranks else 1.0
        values[seed % 3 + 5 :: 37] = info.tiny / 2 if rank == seed % num_ranks else 0.0
    return _repeated(values, numel)


def anything(numel: int, dtype: torch.dtype, *, seed: int, rank: int) -> Tensor:
    """What a rank has of what is moved: any bits."""
    dice = torch.Generator().manual_seed(1_000_003 * seed + rank)
    count = min(numel, _PERIOD)
    values = torch.randint(0, 256, (count * dtype.itemsize,), generator=dice, dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point:
        for place, special in enumerate((-0.0, float("inf"), torch.finfo(dtype).tiny / 4)):
            values[(seed + place) % 11 + place :: 23] = special
    return _repeated(values, numel)


_PERIOD = 65_537  # a prime: what is taken for something else is seldom the same


def _repeated(values: Tensor, numel: int) -> Tensor:
    return values if numel <= values.numel() else values.repeat(-(-numel // values.numel()))[:numel]


def start(
    adapter: Adapter,
    group: dist.ProcessGroup,
    form: Form,
    *,
    seed: int,
    data: Callable[[int, int], Tensor] | None = None,
    expected: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> Exchange:
    """Start a collective. ``data(numel, rank)`` is what ranks have, and ``expected`` what becomes of it, if not the usual."""
    size, what = group.size(), f"{form}, tag {form.tag}"
    total = sum(form.sizes)
    is_moved = form.verb in ("broadcast", "all-gather")

    def usual(n: int, rank: int) -> Tensor:
        if is_moved:
            return anything(n, form.dtype, seed=seed, rank=rank)
        return numbers(n, form.dtype, seed=seed, rank=rank, num_ranks=size)

    of_rank = data or usual
    if form.verb in ("all-reduce", "maximum", "broadcast"):
        return _of_one(adapter, group, form, [of_rank(total, rank) for rank in range(size)], expected, what)
    if form.verb == "reduce-scatter":
        exchange = _scatter(adapter, group, form, [of_rank(total, rank) for rank in range(size)], expected, what)
    else:
        exchange = _gather(adapter, group, form, of_rank(total, 0), what)
    if len(set(form.sizes)) == 1:
        least, sent = form.sizes[0] * form.dtype.itemsize * (size - 1), exchange.pending.sent_bytes
        assert least <= sent <= 1.1 * least + 512 * size, f"{what}: at least {least} bytes are sent, it says {sent}"
    return exchange


def summed(all_of_them: Sequence[Tensor]) -> Tensor:
    total = all_of_them[0]
    for each in all_of_them[1:]:
        total = total + each
    return total


def _of_one(
    adapter: Adapter,
    group: dist.ProcessGroup,
    form: Form,
    have: Sequence[Tensor],
    expected: Callable[[Sequence[Tensor]], Tensor] | None,
    what: str,
) -> Exchange:
    memory, x = _placed(have[group.rank()], device_of(adapter), form)
    if form.verb == "broadcast":
        pending = adapter.broadcast(x, src=GroupRank(form.root), group=group, what=what)
        outcome = have[form.root]
    else:
        is_sum = form.verb == "all-reduce"
        op = dist.ReduceOp.SUM if is_sum else dist.ReduceOp.MAX
        pending = adapter.all_reduce(x, op=op, group=group, what=what)
        outcome = (expected or summed)(have) if is_sum else torch.stack(list(have)).amax(0)
    return Exchange(pending, lambda: _expect_inside(memory, [outcome], form, what))


def _scatter(
    adapter: Adapter,
    group: dist.ProcessGroup,
    form: Form,
    have: Sequence[Tensor],
    expected: Callable[[Sequence[Tensor]], Tensor] | None,
    what: str,
) -> Exchange:
    device, rank = device_of(adapter), group.rank()
    mine = [part.to(device, copy=True) for part in torch.split(have[rank], list(form.sizes))]
    sent, parts = _as_parts(mine, form)
    memory, into = _placed(torch.zeros(form.sizes[rank], dtype=form.dtype), device, form)
    pending = adapter.reduce_scatter(parts, into=into, group=group, tag=form.tag, what=what)
    outcome = torch.split((expected or summed)(have), list(form.sizes))[rank]

    def check() -> None:
        _expect_inside(memory, [outcome], form, what)
        _expect_inside(sent, list(torch.split(have[rank], list(form.sizes))), form, f"what was given to the {what}")

    return Exchange(pending, check)


def _gather(adapter: Adapter, group: dist.ProcessGroup, form: Form, whole: Tensor, what: str) -> Exchange:
    device, rank = device_of(adapter), group.rank()
    outcome = list(torch.split(whole, list(form.sizes)))
    # Where the others' parts come is something else before, whatever comes.
    begin = [(part if r == rank else part.flip(0).add(1)).to(device, copy=True) for r, part in enumerate(outcome)]
    memory, parts = _as_parts(begin, form)
    pending = adapter.all_gather(parts, group=group, tag=form.tag, what=what)
    return Exchange(pending, lambda: _expect_inside(memory, outcome, form, what))


def _placed(values: Tensor, device: torch.device, form: Form) -> tuple[list[Tensor], Tensor]:
    """A tensor with these values, and the memory it lies in."""
    if form.is_scalar:
        memory = values.reshape(()).to(device, copy=True)
        return [memory.reshape(1)], memory
    if not (form.is_inside or form.is_scattered):
        memory = values.to(device, copy=True)
        return [memory], memory
    memory = _surrounded([values.to(device)])
    return [memory], memory[_BEFORE : _BEFORE + values.numel()]


_BEFORE, _BEHIND = 3, 2


def _surrounded(values: Sequence[Tensor]) -> Tensor:
    mark = values[0].new_full((_BEFORE,), _MARK)
    return torch.cat([mark, *values, mark[:_BEHIND]])


def _as_parts(values: Sequence[Tensor], form: Form) -> tuple[list[Tensor], zerolap.Parts]:
    """Parts with these values: in one piece of memory, or in one each."""
    if form.is_scattered:
        memories = [_surrounded([each]) for each in values]
        tensors = [memory[_BEFORE : _BEFORE + each.numel()] for memory, each in zip(memories, values, strict=True)]
        return memories, zerolap.Parts.of(tensors)
    if not form.is_inside:
        whole = torch.cat(list(values))
        return [whole], zerolap.Parts.of(list(torch.split(whole, list(form.sizes))))
    memory = _surrounded(values)
    return [memory], zerolap.Parts.of(list(torch.split(memory[_BEFORE:-_BEHIND], list(form.sizes))))


def _expect_inside(memory: Sequence[Tensor], values: Sequence[Tensor], form: Form, what: str) -> None:
    """What lies in memory, and that what lies around it is as it was."""
    if form.is_scalar or not (form.is_inside or form.is_scattered):
        expect_equal(torch.cat(list(memory)), torch.cat(list(values)), what)
        return
    expected = [_surrounded([each]) for each in values] if form.is_scattered else [_surrounded(values)]
    for seen, each in zip(memory, expected, strict=True):
        seen = seen.detach().cpu()
        inner = slice(_BEFORE, seen.numel() - _BEHIND)
        expect_equal(seen[inner], each[inner], what)
        expect_equal(seen, each, f"what lies before ({_BEFORE}) and behind the tensors of the {what}")


# --- any form -----------------------------------------------------------------------------------------------------------


def any_form(dice: random.Random, adapter: Adapter, num_ranks: int, *, verb: Verb | None = None) -> Form:
    """One that training could ask for; the same on all ranks whose dice are the same."""
    chosen: Verb = dice.choice(VERBS) if verb is None else verb
    dtypes = moved_by(adapter) if chosen in ("broadcast", "all-gather") else reduced_by(adapter)
    has_parts = chosen in ("reduce-scatter", "all-gather")
    kind = dice.random()
    numel = dice.choice(
        [dice.randint(1, 9), dice.randint(1, 300), 2 ** dice.randint(0, 12), 2 * dice.randint(1, 2000) + 1]
    )
    if kind < 0.04:
        numel = dice.choice([2**16, 2**18 + dice.randint(0, 1), 300_001, 2**20 + dice.randint(0, 3)])
    sizes = [numel] * (num_ranks if has_parts else 1)
    if has_parts and dice.random() < 0.5:
        sizes = [max(0, min(numel, 5000) - dice.choice([0, 1, 2, r, 10 * r])) for r in range(num_ranks)]
        dice.shuffle(sizes)
    if has_parts and dice.random() < 0.2:
        sizes[dice.randrange(num_ranks)] = 0
    if not sum(sizes):
        sizes[0] = 1
    return Form(
        verb=chosen,
        dtype=dice.choice(dtypes),
        sizes=tuple(sizes),
        tag=dice.randrange(256),
        root=dice.randrange(num_ranks),
        is_scattered=has_parts and dice.random() < 0.4,
        is_scalar=chosen == "all-reduce" and dice.random() < 0.15 and sizes == [1],
        is_inside=dice.random() < 0.6,
    )
