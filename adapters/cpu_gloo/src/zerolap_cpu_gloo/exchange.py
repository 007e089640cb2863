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

from zerolap import Parts

_ALIGNMENT = 64
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
        self.num_bytes = -(-like.nbytes // _ALIGNMENT) * _ALIGNMENT
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


class Inbox:
    """Memory for messages, used in a circle and never more than the largest of the recent buckets, or eight messages.

    The peers' messages wait at the peers until there is room, so buckets in flight cost no memory here. Waiting for receives
    in the order they were asked for, as a lane does, always finds the next one posted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._head = 0
        self._lent: deque[tuple[int, Receive]] = deque()  # where each starts, oldest first
        self._waiting: deque[Receive] = deque()
        self._recent: deque[int] = deque(maxlen=_NUM_RECENT)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def ask(self, receives: Sequence[Receive], *, bucket_bytes: int) -> None:
        with self._lock:
            self._recent.append(bucket_bytes)
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
            while self._lent and self._lent[0][1].is_done:
                self._lent.popleft()
            self._post_what_fits()

    def _post_what_fits(self) -> None:
        while self._waiting and (start := self._place_for(self._waiting[0].num_bytes)) is not None:
            receive = self._waiting.popleft()
            self._head = start + receive.num_bytes
            self._lent.append((start, receive))
            receive.post(self._memory[start : self._head])

    def _place_for(self, size: int) -> int | None:
        if not self._lent:
            wanted = max(size, min(max(self._recent), _MAX_INBOX_BYTES))
            if self._memory.nbytes != wanted:
                self._memory = torch.empty(0, dtype=torch.uint8)  # what is there goes first
                self._memory = torch.empty(wanted, dtype=torch.uint8)
            return 0
        oldest = self._lent[0][0]
        if self._head > oldest:  # free: from the head to the end, and from the beginning to the oldest
            if self._head + size <= self._memory.nbytes:
                return self._head
            return 0 if size <= oldest else None
        return self._head if self._head + size <= oldest else None


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
    parts: Sequence[Tensor], into: Tensor, stage: Stage, *, group: dist.ProcessGroup, tag: int, inbox: Inbox
) -> Callable[[], None]:
    """Send ``parts[i]`` to the i-th peer, and sum up in ``into`` what they send; call the result to finish."""
    me, mine = stage.place, parts[stage.place]
    others = [(i, rank) for i, rank in enumerate(stage.peers) if i != me]
    own = _messages(mine)
    receives = [
        [Receive(inbox, piece, group=group, src=rank, tag=tag * _MAX_MESSAGES + place) for _, rank in others]
        for place, piece in enumerate(own)
    ]
    inbox.ask([each for row in receives for each in row], bucket_bytes=sum(part.nbytes for part in parts))
    sends = [
        group.send([piece], rank, tag * _MAX_MESSAGES + place)
        for i, rank in others
        for place, piece in enumerate(_messages(parts[i]))
    ]

    def finish() -> None:
        for piece, row, total in zip(own, receives, _messages(into), strict=True):
            _add_up(piece, [*row[:me], None, *row[me:]], total)
        for send in sends:
            send.wait()

    return finish


def _add_up(own: Tensor, coming: Sequence[Receive | None], into: Tensor) -> None:
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


def _messages(part: Tensor) -> Sequence[Tensor]:
    return torch.split(part, _MESSAGE_BYTES // part.element_size()) if part.numel() else ()


def start_gather_stage(parts: Sequence[Tensor], stage: Stage, *, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """Send this rank's part to every peer, and receive theirs where they belong."""
    mine = parts[stage.place]
    others = [(i, rank) for i, rank in enumerate(stage.peers) if i != stage.place]
    works = [group.recv([parts[i]], rank, tag) for i, rank in others if parts[i].numel()]
    return works + [group.send([mine], rank, tag) for _, rank in others if mine.numel()]


def reduce_in_stages(
    parts: Parts, into: Tensor, stages: Sequence[Stage], *, group: dist.ProcessGroup, tag: int, inbox: Inbox
) -> None:
    """A whole reduce-scatter. Blocks until done."""
    ends, base = _ends(parts), 0
    memory = torch.cat(parts.tensors) if parts.whole is None else parts.whole
    for stage in stages:
        blocks = [memory[ends[a] - base : ends[b] - base] for a, b in stage.blocks]
        total = into if stage is stages[-1] else torch.empty_like(blocks[stage.place])
        start_reduce_stage(blocks, total, stage, group=group, tag=tag, inbox=inbox)()
        memory, base = total, ends[stage.blocks[stage.place][0]]


def gather_in_stages(parts: Parts, stages: Sequence[Stage], *, group: dist.ProcessGroup, tag: int) -> None:
    """A whole all-gather. Blocks until done."""
    ends = _ends(parts)
    whole = torch.cat(parts.tensors) if parts.whole is None else parts.whole
    for stage in reversed(stages):
        blocks = [whole[ends[a] : ends[b]] for a, b in stage.blocks]
        for work in start_gather_stage(blocks, stage, group=group, tag=tag):
            work.wait()
    if parts.whole is None:
        torch._foreach_copy_(parts.tensors, [whole[a:b] for a, b in pairwise(ends)])


def bytes_of_gather(parts: Parts, stages: Sequence[Stage]) -> int:
    """What this rank sends: in each stage its block, to every peer."""
    blocks = ((parts.tensors[slice(*stage.blocks[stage.place])], len(stage.peers) - 1) for stage in stages)
    return sum(sum(part.nbytes for part in block) * num_peers for block, num_peers in blocks)


def _ends(parts: Parts) -> list[int]:
    return list(accumulate((part.numel() for part in parts.tensors), initial=0))
