"""Exchanges of hosts in a ring: every rank sends to the one ahead of it and receives from the one behind, and no others.

[Note: one connection]
If each rank sends to all others, its wire is shared by n - 1 connections, and so is that of whoever receives. They never share it
evenly, queues form where several meet, and each has to find its rate anew when another one ends: at the end of a step, and where gathers
follow reductions, wires are idle for it. A rank that sends to one neighbour only has one connection, and all of the wire; so gathers
take the same as reductions. A part makes n - 1 hops. What fills the gaps between them are others: buckets are cut up, and some pieces are under
way at once.

That ends: pieces of one kind go to a few lanes in turn, in the order of buckets, which is the same on every rank. One at the head of its lane waits
for nothing but the same piece on other ranks; the first that is not done is at the head everywhere as soon as all have started it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap import Parts, ThreadLane, Waitable

_NUM_LANES = 3  # of each kind: one waits for a hop, one moves bytes, one is about to
_MOST_RECEIVED_BYTES = 4 * 2**20  # by one piece, all hops together
_MOST_PIECES, _MOST_HOPS = 256, 16
_TAGS_OF_GROUP = 2**29
MOST_TOGETHER = 3  # groups on the same connections: there are no more tags


class Ring:
    """The lanes of one group, and the group whose connections it uses: its own, or one that was opened together with it."""

    def __init__(self, group: dist.ProcessGroup, *, through: dist.ProcessGroup, number: int) -> None:
        """``number`` is its place among the groups that use the same connections."""
        self._through = through
        self._first_tag = (number + 1) * _TAGS_OF_GROUP  # lower ones are other exchanges'
        self._rank, self._size = group.rank(), group.size()
        self._lanes = [ThreadLane(f"ring-{group.group_name}-{i}") for i in range(_NUM_LANES)]
        self._num_started = 0

    @staticmethod
    def is_for(num_ranks: int) -> bool:
        """Two have one neighbour anyway, and many are better off with fewer steps: see ``stage_sizes``."""
        return 2 < num_ranks < _MOST_HOPS

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def reduce(self, parts: Parts, into: Tensor, *, tag: int) -> list[Waitable]:
        """Sums travel round, and every rank adds its own part: the owner of a part last."""
        return [
            self._submit(_ReducePiece(self._hops(number), mine, into[begin : begin + mine[self._rank].numel()]))
            for number, begin, mine in self._pieces(parts, tag)
        ]

    def gather(self, parts: Parts, *, tag: int) -> list[Waitable]:
        """Every rank's part travels round."""
        return [self._submit(_GatherPiece(self._hops(number), mine)) for number, _, mine in self._pieces(parts, tag)]

    def sent_by_gather(self, parts: Parts) -> int:
        return parts.nbytes - parts.tensors[(self._rank + 1) % self._size].nbytes

    def _submit(self, piece: Callable[[], None]) -> Waitable:
        self._num_started += 1
        return self._lanes[self._num_started % _NUM_LANES].submit(piece)

    def _hops(self, number: int) -> _Hops:
        return _Hops(self._through, rank=self._rank, size=self._size, first_tag=self._first_tag + number * _MOST_HOPS)

    def _pieces(self, parts: Parts, tag: int) -> Iterator[tuple[int, int, Sequence[Tensor]]]:
        """A number that no other has, where it begins in this rank's part, and what belongs to it of every part."""
        most = _MOST_RECEIVED_BYTES // (self._size - 1)
        num_pieces = max(1, min(_MOST_PIECES, -(-parts.longest_nbytes // most)))
        for i in range(num_pieces):
            spans = [(i * part.numel() // num_pieces, (i + 1) * part.numel() // num_pieces) for part in parts.tensors]
            of_all = [part[a:b] for part, (a, b) in zip(parts.tensors, spans, strict=True)]
            yield tag * _MOST_PIECES + i, spans[self._rank][0], of_all


class _Hops:
    """The messages of one piece."""

    def __init__(self, group: dist.ProcessGroup, *, rank: int, size: int, first_tag: int) -> None:
        self.rank, self.size = rank, size
        self._group = group
        self._first_tag = first_tag

    def send(self, part: Tensor, hop: int) -> list[dist.Work]:
        ahead = (self.rank + 1) % self.size
        return [self._group.send([part], ahead, self._first_tag + hop)] if part.numel() else []

    def receive(self, into: Tensor, hop: int) -> list[dist.Work]:
        behind = (self.rank - 1) % self.size
        return [self._group.recv([into], behind, self._first_tag + hop)] if into.numel() else []


class _ReducePiece:
    def __init__(self, hops: _Hops, parts: Sequence[Tensor], into: Tensor) -> None:
        self._hops, self._parts, self._into = hops, parts, into

    def __call__(self) -> None:
        hops, size = self._hops, self._hops.size
        passing = [self._parts[(hops.rank - 1 - hop) % size] for hop in range(size)]  # our own is the last
        sums = [torch.empty_like(part) for part in passing[1:]]
        coming = [hops.receive(memory, hop) for hop, memory in enumerate(sums)]  # all are asked for at once
        sends = hops.send(passing[0], 0)
        for hop, (own, memory, works) in enumerate(zip(passing[1:], sums, coming, strict=True), start=1):
            _wait(works)
            if hop < size - 1:
                sends += hops.send(memory.add_(own), hop)
            else:
                torch.add(memory, own, out=self._into)
        _wait(sends)


class _GatherPiece:
    def __init__(self, hops: _Hops, parts: Sequence[Tensor]) -> None:
        self._hops, self._parts = hops, parts

    def __call__(self) -> None:
        hops, size = self._hops, self._hops.size
        passing = [self._parts[(hops.rank - hop) % size] for hop in range(size)]  # our own is the first
        coming = [hops.receive(part, hop) for hop, part in enumerate(passing[1:])]
        sends: list[dist.Work] = []
        for hop, part in enumerate(passing[:-1]):
            if hop:
                _wait(coming[hop - 1])
            sends += hops.send(part, hop)
        _wait(coming[-1])
        _wait(sends)


def _wait(works: Sequence[Waitable]) -> None:
    for work in works:
        work.wait()
