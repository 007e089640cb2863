"""Reduce-scatter and all-gather by point-to-point messages, and the memory that receives what comes.

The library's own reduce-scatter is an all-reduce underneath, with twice the bytes. Here a rank sends what must be sent and no
more: P(n-1)/n for either collective. Both work in *stages*. In a stage of f ranks each sends every other one its f-th of the
block they share, and goes on with its own f-th alone. One stage of all n ranks is the direct exchange: n-1 messages a rank, all
under way at once, summed in rank order. Stages whose sizes multiply to n (2, 2, 2 is recursive halving) need fewer messages,
but wait for each other. ``stage_sizes`` chooses, by measurement.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import isqrt

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap import Parts, Waitable
from zerolap._torch import foreach_copy_
from zerolap_cpu_gloo.arena import ALIGNMENT, LETTER_BYTES, Arena, Delivery, Letter
from zerolap_cpu_gloo.ring import Ring

_MESSAGE_BYTES = (
    4 * 2**20
)  # what is summed is received in pieces of this size, so that a large bucket needs no more memory
_MAX_MESSAGES = 4096  # to a peer for one bucket; each has a tag of its own
_MAX_INBOX_BYTES = 8 * _MESSAGE_BYTES
_NUM_RECENT = 256


class Receive:
    """One message to come. Posted when there is memory for it, in the order asked for."""

    def __init__(self, inbox: Inbox, like: Tensor, *, group: dist.ProcessGroup, src: int, tag: int) -> None:
        self._inbox = inbox
        self._like = like
        self._group = group
        self._src = src
        self._tag = tag
        self._work: dist.Work | None = None
        self._tensor: Tensor | None = None
        self.num_bytes = -(-like.nbytes // ALIGNMENT) * ALIGNMENT
        self.is_done = False

    def post(self, memory: Tensor) -> None:
        self._tensor = memory[: self._like.nbytes].view(self._like.dtype)
        self._work = self._group.recv([self._tensor], self._src, self._tag)

    def wait(self) -> Tensor:
        """What came. Its memory is lent until ``give_back()``."""
        self._inbox.hurry(self)
        assert self._work is not None
        assert self._tensor is not None
        self._work.wait()
        return self._tensor

    def give_back(self) -> None:
        self._tensor = None
        self._inbox.take_back(self)

    def is_of(self, group: dist.ProcessGroup) -> bool:
        return self._group is group


class Inbox:
    """Memory for messages, used in a circle: as much as the largest of the recent buckets, but for two messages to eight.

    The peers' messages wait at the peers until there is room, so buckets in flight cost no memory here. Waiting for receives
    in the order they were asked for, as a lane does, always finds the next one posted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._ring = Ring(0)
        self._lent: deque[Receive] = deque()  # oldest first
        self._waiting: deque[Receive] = deque()
        self._recent: deque[int] = deque(maxlen=_NUM_RECENT)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def ask(self, receives: Sequence[Receive], *, bucket_bytes: int) -> None:
        with self._lock:
            # Two of them, the first of which is the largest: one comes while the other is added.
            self._recent.append(max(bucket_bytes, 2 * receives[0].num_bytes))
            self._waiting.extend(receives)
            self._post_what_fits()

    def hurry(self, receive: Receive) -> None:
        """Post this one now, in memory of its own, if somebody waits for it before its turn."""
        with self._lock:
            if receive in self._waiting:
                self._waiting.remove(receive)
                receive.post(torch.empty(receive.num_bytes, dtype=torch.uint8))

    def take_back(self, receive: Receive) -> None:
        with self._lock:
            receive.is_done = True
            while self._lent and self._lent[0].is_done:
                self._lent.popleft()
                self._ring.free_oldest()
            self._post_what_fits()

    def forget(self, group: dist.ProcessGroup) -> None:
        """Expect nothing more of a group that is closed; what never came would keep it, and its connections."""
        with self._lock:
            self._waiting = deque(each for each in self._waiting if not each.is_of(group))
            for receive in [each for each in self._lent if each.is_of(group)]:
                receive.is_done = True
            if all(receive.is_done for receive in self._lent):
                self._lent.clear()
                self._memory, self._ring = torch.empty(0, dtype=torch.uint8), Ring(0)

    def _post_what_fits(self) -> None:
        while self._waiting:
            if not self._lent:
                self._fit_to(self._waiting[0].num_bytes)
            start = self._ring.take(self._waiting[0].num_bytes)
            if start is None:
                return
            receive = self._waiting.popleft()
            self._lent.append(receive)
            receive.post(self._memory[start : start + receive.num_bytes])

    def _fit_to(self, size: int) -> None:
        wanted = max(size, min(max(self._recent), _MAX_INBOX_BYTES))
        if self._memory.nbytes != wanted:
            self._memory = torch.empty(0, dtype=torch.uint8)  # what is there goes first
            self._memory = torch.empty(wanted, dtype=torch.uint8)
            self._ring = Ring(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One exchange among ``peers``, this rank included; each has one of the equal ``blocks`` of ranks' parts."""

    peers: Sequence[int]
    blocks: Sequence[tuple[int, int]]
    place: int  # of this rank among its peers


def stage_sizes(num_ranks: int) -> list[int]:
    """How many ranks exchange in each stage.

    Measured by benchmarks/exchange.py with buckets of 0.25 and 4 MB: one stage is the fastest up to 8 ranks, two of about equal
    size from 16 on (0.83 of the time at 16, 0.6 to 0.8 at 32). A prime number of ranks stays with one.
    """
    factors = [factor for factor in range(2, isqrt(num_ranks) + 1) if num_ranks % factor == 0]
    return [factors[-1], num_ranks // factors[-1]] if num_ranks >= 16 and factors else [num_ranks]


@cache
def stages_of(rank: int, num_ranks: int, sizes: tuple[int, ...] = ()) -> tuple[Stage, ...]:
    """What ``rank`` does in each stage; ``sizes`` multiply to the number of ranks."""
    stages, low, width = [], 0, num_ranks
    for size in sizes or stage_sizes(num_ranks):
        width //= size
        place, inside = (rank - low) // width, (rank - low) % width
        starts = [low + i * width for i in range(size)]
        peers, blocks = [start + inside for start in starts], [(start, start + width) for start in starts]
        stages.append(Stage(peers=peers, blocks=blocks, place=place))
        low = starts[place]
    return tuple(stages)


def start_reduce_stage(
    parts: Sequence[Tensor], into: Tensor, stage: Stage, *, tag: int, inbox: Inbox, arena: Arena
) -> Callable[[], None]:
    """Send ``parts[i]`` to the i-th peer, and sum up in ``into`` what they send; call the result to finish."""
    me, mine, group = stage.place, parts[stage.place], arena.group
    others = [(i, rank) for i, rank in enumerate(stage.peers) if i != me]
    # Peers agree on it: who is near whom is the same for all of a host.
    most_bytes = LETTER_BYTES if arena.ranks.issuperset(stage.peers) else _MESSAGE_BYTES
    own = _messages(mine, most_bytes)
    coming: list[list[Receive | Letter]] = []
    from_afar: list[Receive] = []
    for place, piece in enumerate(own):
        number = tag * _MAX_MESSAGES + place
        row: list[Receive | Letter] = []
        for _, rank in others:
            if rank in arena.ranks:
                row.append(arena.ask(piece, src=rank, tag=number))
            else:
                from_afar.append(Receive(inbox, piece, group=group, src=rank, tag=number))
                row.append(from_afar[-1])
        coming.append(row)
    if from_afar:
        inbox.ask(from_afar, bucket_bytes=sum(part.nbytes for part in parts))
    sends: list[dist.Work] = []
    if arena.ranks:
        arena.expect(sum(part.nbytes for part in parts) - mine.nbytes)
    for i, rank in others:
        for place, piece in enumerate(_messages(parts[i], most_bytes)):
            number = tag * _MAX_MESSAGES + place
            if rank in arena.ranks:
                sends += arena.send(piece, (rank,), tag=number)
            else:
                sends.append(group.send([piece], rank, number))

    def finish() -> None:
        for piece, row, total in zip(own, coming, _messages(into, most_bytes), strict=True):
            _add_up(piece, [*row[:me], None, *row[me:]], total)
        for send in sends:
            send.wait()

    return finish


def _add_up(own: Tensor, coming: Sequence[Receive | Letter | None], into: Tensor) -> None:
    """Sum in the order of ``coming``, where None stands for our own; memory goes back as soon as it is added."""
    first = coming[0]
    total = own if first is None else first.wait()
    for receive in coming[1:]:
        torch.add(total, own if receive is None else receive.wait(), out=into)
        for done in (first, receive):
            if done is not None:
                done.give_back()
        first, total = None, into
    if total is own:
        into.copy_(own)  # there is nobody else


def _messages(part: Tensor, most_bytes: int) -> Sequence[Tensor]:
    return torch.split(part, most_bytes // part.element_size()) if part.numel() else ()


def start_gather_stage(
    parts: Sequence[Tensor], stage: Stage, *, tag: int, arena: Arena
) -> tuple[list[Delivery], list[Waitable]]:
    """Send this rank's part to every peer, and receive theirs where they belong: what is left to copy, and what to wait for then."""
    mine, group = parts[stage.place], arena.group
    near: list[tuple[int, int]] = []
    far: list[tuple[int, int]] = []
    for i, rank in enumerate(stage.peers):
        if i != stage.place:
            (near if rank in arena.ranks else far).append((i, rank))
    works: list[Waitable] = [group.recv([parts[i]], rank, tag) for i, rank in far if parts[i].numel()]
    works += [group.send([mine], rank, tag) for _, rank in far if mine.numel()]
    deliveries: list[Delivery] = []
    if near:
        for i, rank in near:
            for place, piece in enumerate(_messages(parts[i], LETTER_BYTES)):
                deliveries.append(Delivery(arena.ask(piece, src=rank, tag=tag * _MAX_MESSAGES + place), piece))
        arena.expect(mine.nbytes)
        for place, piece in enumerate(_messages(mine, LETTER_BYTES)):
            works += arena.send(piece, [rank for _, rank in near], tag=tag * _MAX_MESSAGES + place)
    return deliveries, works


def reduce_in_stages(
    parts: Parts, into: Tensor, stages: Sequence[Stage], *, tag: int, inbox: Inbox, arena: Arena
) -> None:
    """A whole reduce-scatter. Blocks until done."""
    ends, base = _ends(parts), 0
    memory = torch.cat(parts.tensors) if parts.whole is None else parts.whole
    for stage in stages:
        blocks = [memory[ends[a] - base : ends[b] - base] for a, b in stage.blocks]
        total = into if stage is stages[-1] else torch.empty_like(blocks[stage.place])
        start_reduce_stage(blocks, total, stage, tag=tag, inbox=inbox, arena=arena)()
        memory, base = total, ends[stage.blocks[stage.place][0]]


def gather_in_stages(parts: Parts, stages: Sequence[Stage], *, tag: int, arena: Arena) -> None:
    """A whole all-gather. Blocks until done."""
    ends = _ends(parts)
    whole = torch.cat(parts.tensors) if parts.whole is None else parts.whole
    for stage in reversed(stages):
        blocks = [whole[ends[a] : ends[b]] for a, b in stage.blocks]
        for works in start_gather_stage(blocks, stage, tag=tag, arena=arena):
            wait_for_all(works)
    if parts.whole is None:
        foreach_copy_(parts.tensors, [whole[a:b] for a, b in pairwise(ends)])


def wait_for_all(works: Sequence[Waitable]) -> None:
    for work in works:
        work.wait()


def bytes_of_gather(parts: Parts, stages: Sequence[Stage]) -> int:
    """What this rank sends: in each stage its block, to every peer."""
    blocks = ((parts.tensors[slice(*stage.blocks[stage.place])], len(stage.peers) - 1) for stage in stages)
    return sum(sum(part.nbytes for part in block) * num_peers for block, num_peers in blocks)


def _ends(parts: Parts) -> list[int]:
    return list(accumulate((part.numel() for part in parts.tensors), initial=0))
