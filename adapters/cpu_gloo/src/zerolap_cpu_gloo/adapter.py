"""The adapter, and its reduce-scatter and all-gather by point-to-point messages. The memory for what comes is elsewhere.

The library's own reduce-scatter is an all-reduce underneath, with twice the bytes. Here a rank sends what must be sent and no
more: P(n-1)/n for either collective. Between 3 and 15 ranks that share no memory both work in a ring, which has a module of its own.
Between others they work in *stages*. In a stage of f ranks each sends every other one its f-th of the
block they share, and goes on with its own f-th alone. One stage of all n ranks is the direct exchange: n-1 messages a rank, all
under way at once, summed in rank order. Stages whose sizes multiply to n (2, 2, 2 is recursive halving) need fewer messages,
but wait for each other. ``stage_sizes`` chooses, by measurement.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise, zip_longest
from math import isqrt

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap import Adapter, Capabilities, GroupSpec, Lane, Parts, Pending, ThreadLane, Waitable
from zerolap._torch import Backend, foreach_copy_
from zerolap_cpu_gloo.mapping import share_memory
from zerolap_cpu_gloo.memory import (
    MAX_INBOX_BYTES,
    Inbox,
    Receive,
    SharedMemory,
    SharedReceive,
    copy_out,
)
from zerolap_cpu_gloo.pages import Pages
from zerolap_cpu_gloo.ring import MOST_TOGETHER, Ring

_MAX_MESSAGES = 4096  # to a peer for one bucket; each has a tag of its own


class CpuGlooAdapter(Adapter):
    """CPU tensors over Gloo; ranks of one host exchange by shared memory, those of different hosts by messages."""

    name = "cpu_gloo"
    device_type = "cpu"
    backend = "gloo"
    capabilities = Capabilities(
        futures_complete_at_enqueue=False,  # a future is done when a worker thread has moved the bytes
        exact_cut=64,  # vector kernels and their tails round differently; 64 held for every optimizer measured, on one thread
        has_float64=True,
        one_issue_order=False,  # messages of different groups have connections of their own
    )

    def __init__(self, *, shares_memory: bool = True) -> None:
        """Ranks of one host exchange by shared memory, unless told not to: to measure what the network does, for instance."""
        self._shares_memory = shares_memory
        self._inbox = Inbox()
        self._shared: dict[str, SharedMemory] = {}
        self._progress: dict[str, Lane] = {}
        self._rings: dict[str, Ring] = {}
        self._through: dict[str, list[dist.ProcessGroup]] = {}  # groups that were opened together

    def why_unavailable(self) -> str | None:
        return None if dist.is_available() and dist.is_gloo_available() else "this torch was built without Gloo"

    def make_backend(self, spec: GroupSpec) -> Backend:
        return dist.ProcessGroupGloo(spec.store, spec.rank, spec.size, spec.timeout)

    def stage_sizes(self, num_ranks: int) -> tuple[int, ...]:
        return stage_sizes(num_ranks)

    @property
    def max_receive_bytes(self) -> int:
        return MAX_INBOX_BYTES

    @property
    def kept_bytes(self) -> int:
        return self._inbox.num_bytes + sum(memory.num_bytes for memory in self._shared.values())

    def release_memory(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; it keeps what is freed between other blocks
        if trim is not None:
            trim(0)

    def recycler(self) -> Pages:
        return Pages()

    def open_group(self, like: dist.ProcessGroup, *, name: str) -> dist.ProcessGroup:
        group = super().open_group(like, name=name)
        timeout = self.timeout(like).total_seconds()
        self._shared[group.group_name] = (
            share_memory(group, timeout=timeout) if self._shares_memory else SharedMemory(group, {})
        )
        if Ring.is_for(group.size()) and not self._shared[group.group_name].is_used:
            together = self._through.setdefault(_family_of(group), [])
            number = len(together) if len(together) < MOST_TOGETHER else 0
            together.append(group)
            through = together[0] if number else group
            self._rings[group.group_name] = Ring(group, through=through, number=number)
        return group

    def close_group(self, group: dist.ProcessGroup) -> None:
        self._through.pop(_family_of(group), None)
        ring = self._rings.pop(group.group_name, None)
        if ring is not None:
            ring.close()
        memory = self._shared.pop(group.group_name, None)
        if memory is not None:
            memory.close()
        self._inbox.forget(group)
        progress = self._progress.pop(group.group_name, None)
        if progress is not None:
            progress.close()

    def reduce_scatter(self, parts: Parts, *, into: Tensor, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        stages, memory = stages_of(group.rank(), group.size()), self._shared_by(group)
        sent = parts.nbytes - parts.tensors[group.rank()].nbytes
        ring = self._rings.get(group.group_name)
        if ring is not None:
            return Pending(ring.reduce(parts, into, tag=tag), tensors=(parts, into), what=what, sent_bytes=sent)
        if len(stages) == 1:
            finish = start_reduce_stage(parts.tensors, into, stages[0], tag=tag, inbox=self._inbox, memory=memory)
            return Pending((), tensors=(parts, into), what=what, sent_bytes=sent, finish=finish)
        in_stages = partial(reduce_in_stages, parts, into, stages, tag=tag, inbox=self._inbox, memory=memory)
        work = self._progress_of(group).submit(in_stages)
        return Pending([work], tensors=(parts, into), what=what, sent_bytes=sent)

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        stages, memory = stages_of(group.rank(), group.size()), self._shared_by(group)
        ring = self._rings.get(group.group_name)
        if ring is not None:
            sent = ring.sent_by_gather(parts)
            return Pending(ring.gather(parts, tag=tag), tensors=(parts,), what=what, sent_bytes=sent)
        works: list[Waitable]
        if len(stages) == 1:
            deliveries, works = start_gather_stage(parts.tensors, stages[0], tag=tag, memory=memory)
            if deliveries:  # whoever waits or not: a sender may be waiting for room
                works.append(self._progress_of(group).submit(partial(copy_out, deliveries)))
        else:
            in_stages = partial(gather_in_stages, parts, stages, tag=tag, memory=memory)
            works = [self._progress_of(group).submit(in_stages)]
        return Pending(works, tensors=(parts,), what=what, sent_bytes=bytes_of_gather(parts, stages))

    def all_to_all(self, sent: Parts, received: Parts, *, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        memory = self._shared_by(group)
        deliveries, works = start_all_to_all(sent.tensors, received.tensors, tag=tag, memory=memory)
        if deliveries:  # whoever waits or not: a sender may be waiting for room
            works.append(self._progress_of(group).submit(partial(copy_out, deliveries)))
        return Pending(works, tensors=(sent, received), what=what, sent_bytes=sent.nbytes)

    def _shared_by(self, group: dist.ProcessGroup) -> SharedMemory:
        return self._shared.get(group.group_name) or SharedMemory(group, {})  # somebody else's group: no neighbours

    def _progress_of(self, group: dist.ProcessGroup) -> Lane:
        """Where exchanges of several stages run, and what lies in shared memory is copied, whoever waits or not."""
        name = group.group_name
        if name not in self._progress:
            self._progress[name] = ThreadLane(f"progress-{name}")
        return self._progress[name]


def _family_of(group: dist.ProcessGroup) -> str:
    """What the names of groups that one engine opens have in common: all but their number."""
    name: str = group.group_name
    return name.rpartition("-")[0] or name


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One exchange among ``peers``, this rank included; each has one of the equal ``blocks`` of ranks' parts."""

    peers: Sequence[int]
    blocks: Sequence[tuple[int, int]]
    place: int  # of this rank among its peers


def stage_sizes(num_ranks: int) -> tuple[int, ...]:
    """How many ranks exchange in each stage.

    Measured by benchmarks/exchange.py with buckets of 0.25 and 4 MB: one stage is the fastest up to 8 ranks, two of about equal
    size from 16 on (0.83 of the time at 16, 0.6 to 0.8 at 32). A prime number of ranks stays with one.
    """
    factors = [factor for factor in range(2, isqrt(num_ranks) + 1) if num_ranks % factor == 0]
    return (factors[-1], num_ranks // factors[-1]) if num_ranks >= 16 and factors else (num_ranks,)


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
    parts: Sequence[Tensor], into: Tensor, stage: Stage, *, tag: int, inbox: Inbox, memory: SharedMemory
) -> Callable[[], None]:
    """Send ``parts[i]`` to the i-th peer, and sum up in ``into`` what they send; call the result to finish."""
    me, mine, group = stage.place, parts[stage.place], memory.group
    others = [(i, rank) for i, rank in enumerate(stage.peers) if i != me]
    most_bytes = memory.piece_bytes
    own = _pieces(mine, most_bytes)
    coming: list[list[Receive | SharedReceive]] = []
    messages: list[Receive] = []
    for place, piece in enumerate(own):
        number = tag * _MAX_MESSAGES + place
        row: list[Receive | SharedReceive] = []
        for _, rank in others:
            if rank in memory.ranks:
                row.append(memory.ask(piece, src=rank, tag=number))
            else:
                messages.append(Receive(inbox, piece, group=group, src=rank, tag=number))
                row.append(messages[-1])
        coming.append(row)
    bucket_bytes = sum([part.nbytes for part in parts])
    if messages:
        inbox.ask(messages, bucket_bytes=bucket_bytes)
    sends: list[Waitable] = []
    # Piece by piece, as they are read: what waits for room shall be what somebody waits for.
    for place, pieces in enumerate(zip_longest(*(_pieces(parts[i], most_bytes) for i, _ in others))):
        for (_, rank), piece in zip(others, pieces, strict=True):
            if piece is not None:
                number = tag * _MAX_MESSAGES + place
                is_near = rank in memory.ranks
                sends.append(memory.send(piece, (rank,), tag=number) if is_near else group.send([piece], rank, number))

    def finish() -> None:
        for piece, row, total in zip(own, coming, _pieces(into, most_bytes), strict=True):
            _add_up(piece, [*row[:me], None, *row[me:]], total)
        for send in sends:
            send.wait()

    return finish


def _add_up(own: Tensor, coming: Sequence[Receive | SharedReceive | None], into: Tensor) -> None:
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


def _pieces(part: Tensor, most_bytes: int) -> Sequence[Tensor]:
    return torch.split(part, most_bytes // part.element_size()) if part.numel() else ()


def start_gather_stage(
    parts: Sequence[Tensor], stage: Stage, *, tag: int, memory: SharedMemory
) -> tuple[list[tuple[SharedReceive, Tensor]], list[Waitable]]:
    """Send this rank's part to every peer, and receive theirs where they belong: what is left to copy, and what to wait for then."""
    mine, group = parts[stage.place], memory.group
    near: list[tuple[int, int]] = []
    far: list[tuple[int, int]] = []
    for i, rank in enumerate(stage.peers):
        if i != stage.place:
            (near if rank in memory.ranks else far).append((i, rank))
    works: list[Waitable] = [group.recv([parts[i]], rank, tag) for i, rank in far if parts[i].numel()]
    works += [group.send([mine], rank, tag) for _, rank in far if mine.numel()]
    deliveries: list[tuple[SharedReceive, Tensor]] = []
    rows: list[list[tuple[SharedReceive, Tensor]]] = []
    if near:
        for i, rank in near:
            pieces = _pieces(parts[i], memory.piece_bytes)
            rows.append(
                [(memory.ask(piece, src=rank, tag=tag * _MAX_MESSAGES + k), piece) for k, piece in enumerate(pieces)]
            )
        deliveries = [each for row in zip_longest(*rows) for each in row if each is not None]
        neighbours = [rank for _, rank in near]
        for place, piece in enumerate(_pieces(mine, memory.piece_bytes)):
            works.append(memory.send(piece, neighbours, tag=tag * _MAX_MESSAGES + place))
    return deliveries, works


def start_all_to_all(
    sent: Sequence[Tensor], received: Sequence[Tensor], *, tag: int, memory: SharedMemory
) -> tuple[list[tuple[SharedReceive, Tensor]], list[Waitable]]:
    """Send each rank its part, and receive from each where that belongs: what is left to copy, and what to wait for then.

    Rank r begins with r + 1, so that no two begin with the same one.
    """
    group, me = memory.group, memory.group.rank()
    others = [(me + step) % len(sent) for step in range(1, len(sent))]
    far, near = ([rank for rank in others if (rank in memory.ranks) is is_near] for is_near in (False, True))
    works: list[Waitable] = [
        group.recv([received[rank]], rank, tag) for rank in reversed(far) if received[rank].numel()
    ]
    works += [group.send([sent[rank]], rank, tag) for rank in far if sent[rank].numel()]
    rows = []
    for rank in reversed(near):
        pieces = enumerate(_pieces(received[rank], memory.piece_bytes))
        rows.append([(memory.ask(piece, src=rank, tag=tag * _MAX_MESSAGES + k), piece) for k, piece in pieces])
    for rank in near:
        for place, piece in enumerate(_pieces(sent[rank], memory.piece_bytes)):
            works.append(memory.send(piece, (rank,), tag=tag * _MAX_MESSAGES + place))
    return [each for row in zip_longest(*rows) for each in row if each is not None], works


def reduce_in_stages(
    parts: Parts, into: Tensor, stages: Sequence[Stage], *, tag: int, inbox: Inbox, memory: SharedMemory
) -> None:
    """A whole reduce-scatter. Blocks until done."""
    ends, base = _ends(parts), 0
    whole = torch.cat(parts.tensors) if parts.whole is None else parts.whole
    for stage in stages:
        blocks = [whole[ends[a] - base : ends[b] - base] for a, b in stage.blocks]
        total = into if stage is stages[-1] else torch.empty_like(blocks[stage.place])
        start_reduce_stage(blocks, total, stage, tag=tag, inbox=inbox, memory=memory)()
        whole, base = total, ends[stage.blocks[stage.place][0]]


def gather_in_stages(parts: Parts, stages: Sequence[Stage], *, tag: int, memory: SharedMemory) -> None:
    """A whole all-gather. Blocks until done."""
    ends = _ends(parts)
    whole = torch.cat(parts.tensors) if parts.whole is None else parts.whole
    for stage in reversed(stages):
        blocks = [whole[ends[a] : ends[b]] for a, b in stage.blocks]
        deliveries, works = start_gather_stage(blocks, stage, tag=tag, memory=memory)
        copy_out(deliveries)
        for work in works:
            work.wait()
    if parts.whole is None:
        foreach_copy_(parts.tensors, [whole[a:b] for a, b in pairwise(ends)])


def bytes_of_gather(parts: Parts, stages: Sequence[Stage]) -> int:
    """What this rank sends: in each stage its block, to every peer."""
    blocks = ((parts.tensors[slice(*stage.blocks[stage.place])], len(stage.peers) - 1) for stage in stages)
    return sum(sum(part.nbytes for part in block) * num_peers for block, num_peers in blocks)


def _ends(parts: Parts) -> list[int]:
    return list(accumulate((part.numel() for part in parts.tensors), initial=0))
