"""Memory for what ranks send each other: shared by ranks of one host, received into by the others. No sums, nothing is mapped here.

[Note: shared memory]
A rank copies what it sends into its own shared-memory segment, which the others of its host have mapped, and sends them a *note* of
where it lies, as an ordinary message. So waiting, time limits and the end of a peer are those of messages. A reader counts in its own
segment what it has read of whom; a sender looks there when it needs room. A segment is small, whatever is sent: what finds no room waits
in order at the sender, whose own thread sends it when readers have made some. What would never find room comes as a message, too, and
its note says so.

That ends: of all pieces that somebody has yet to read take the first, in the order of buckets and pieces, which is that of sending and of
reading on every rank. All before it were read, so it has room, and is sent; and its reader waits for nothing else.

Both kinds of memory are rings: what is taken is given back in the same order. Both kinds of receives are used alike: ``wait()`` lends
what came until ``give_back()``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap import Waitable

_ALIGNMENT = 64
_PAGE = 4096
MESSAGE_BYTES = 4 * 2**20  # what is summed is received in pieces of this size: a large bucket needs no more memory
MAX_INBOX_BYTES = 8 * MESSAGE_BYTES
_NUM_RECENT = 256
# Of all segments of a host for one group. With half of it a step of two ranks took longer; more ranks copy less at once anyway.
_HOST_BYTES, _HOST_BYTES_OF_TWO = 8 * 2**20, 16 * 2**20
_LEAST_RING_BYTES = 512 * 2**10
_LEAST_PIECE_BYTES = 64 * 2**10
_AS_MESSAGE = -1
_LOOK_SECONDS = 500e-6  # between looks for room: more often would take time from whoever makes it
_WHOLE_TAG = 2**30  # added to a note's tag: what did not fit


class Ring:
    """Places in memory used in a circle, taken and given back in one order: ``size`` bytes, or as few as will do up to ``most``.

    ``may_grow``, if given, is asked before there are so many; once it has said no, there are never more than at that time.
    """

    def __init__(self, size: int, *, most: int = 0, may_grow: Callable[[int], bool] | None = None) -> None:
        self.size = size
        self.most = most
        self._may_grow = may_grow
        self._is_refused = False
        self._head = 0
        self._starts: deque[int] = deque()  # of what is taken, oldest first

    def take(self, size: int) -> int | None:
        """Where the next ``size`` bytes may lie; None if there is no room for them yet."""
        start = self._place_for(size)
        if start is None and self.size < self.most and not self._is_refused:
            self._grow_to(min(self.size + size, self.most))
            start = self._place_for(size)
        if start is not None:
            self._starts.append(start)
            self._head = start + size
        return start

    def may_ever_hold(self, size: int) -> bool:
        return size <= (self.size if self._is_refused else max(self.size, self.most))

    def free_oldest(self) -> None:
        self._starts.popleft()

    def _grow_to(self, size: int) -> None:
        if self._may_grow is None or self._may_grow(size):
            self.size = size
        else:
            self._is_refused = True

    def _place_for(self, size: int) -> int | None:
        if not self._starts:
            return 0 if size <= self.size else None
        oldest = self._starts[0]
        if self._head > oldest:  # free: from the head to the end, and from the beginning to the oldest
            if self._head + size <= self.size:
                return self._head
            return 0 if size <= oldest else None
        return self._head if self._head + size <= oldest else None


# --- messages -------------------------------------------------------------------------------------------------------------------------


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
        self._inbox.post_now(self)
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

    def post_now(self, receive: Receive) -> None:
        """Post this one in memory of its own, if somebody waits for it before its turn."""
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
        wanted = max(size, min(max(self._recent), MAX_INBOX_BYTES))
        if self._memory.nbytes != wanted:
            self._memory = torch.empty(0, dtype=torch.uint8)  # what is there goes first
            self._memory = torch.empty(wanted, dtype=torch.uint8)
            self._ring = Ring(wanted)


# --- shared memory --------------------------------------------------------------------------------------------------------------------


class SharedReceive:
    """Something to come from a rank of this host. Asked for in the order in which it is sent."""

    def __init__(self, memory: SharedMemory, like: Tensor, *, src: int, tag: int) -> None:
        self._memory = memory
        self._like = like
        self._src = src
        self._tag = tag
        self._note = torch.empty(1, dtype=torch.int64, device="cpu")
        self._work = memory.group.recv([self._note], src, tag)
        self.is_read = False

    def wait(self) -> Tensor:
        """What came. It is lent until ``give_back()``."""
        self._work.wait()
        place = int(self._note)
        if place != _AS_MESSAGE:
            return self._memory.view(self._src, place, self._like)
        whole = torch.empty_like(self._like)
        self._memory.group.recv([whole], self._src, _WHOLE_TAG + self._tag).wait()
        return whole

    def give_back(self) -> None:
        self.is_read = True
        self._memory.count_read(self._src)


def copy_out(deliveries: Iterable[tuple[SharedReceive, Tensor]]) -> None:
    """Wait for what comes and copy it to where it belongs."""
    for receive, into in deliveries:
        into.copy_(receive.wait())
        receive.give_back()


def ring_bytes(num_ranks: int) -> int:
    """What a segment holds that was not read yet. All segments of a host together do not grow with its ranks."""
    return max(
        _LEAST_RING_BYTES, (_HOST_BYTES if num_ranks > 2 else _HOST_BYTES_OF_TWO) // max(2, num_ranks) // _PAGE * _PAGE
    )


def piece_bytes(num_ranks: int) -> int:
    """What is sent at once through shared memory: a segment has room for one for every other rank, and the next one."""
    return max(_LEAST_PIECE_BYTES, ring_bytes(num_ranks) // max(2, num_ranks) // _PAGE * _PAGE)


class _Sending:
    """A piece that waits for room, and its way to the readers."""

    def __init__(self, piece: Tensor, ranks: Sequence[int], *, tag: int, timeout: float) -> None:
        self.piece, self.ranks, self.tag = piece, ranks, tag
        self._timeout = timeout
        self._is_sent = threading.Event()
        self._works: list[dist.Work] = []

    def sent(self, works: list[dist.Work]) -> None:
        self._works = works
        self._is_sent.set()

    def wait(self) -> None:
        if not self._is_sent.wait(self._timeout):
            raise TimeoutError(f"ranks {list(self.ranks)} have not read what was sent before for {self._timeout:.0f} s")
        for work in self._works:
            work.wait()


class SharedMemory:
    """The segments of this rank and its neighbours: the other ``ranks`` of a group on the same host, if there are any.

    One thread sends and asks; any may read. See [Note: shared memory].
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        segments: dict[int, Tensor],
        *,
        reserve: Callable[[int], bool] | None = None,
        piece_bytes: int = MESSAGE_BYTES,
        timeout: float = 600,
        is_used: bool = False,
    ) -> None:
        """``piece_bytes`` is what is sent at once, to neighbours and others: the same on all ranks of the group; ``is_used``, by any of them."""
        self.group = group
        self.piece_bytes = piece_bytes
        self._rank, num_ranks = group.rank(), group.size()
        self._content = {rank: segment[head_bytes(num_ranks) :] for rank, segment in segments.items()}
        self.ranks = frozenset(segments)
        self.is_used = is_used
        neighbours = self.ranks - {self._rank}
        # Each rank counts in its own segment what it has read of whom.
        counts = {rank: segment[: 8 * num_ranks].view(torch.int64) for rank, segment in segments.items()}
        self._read_of = {rank: counts[self._rank][rank] for rank in neighbours}
        self._read_by = {rank: counts[rank][self._rank] for rank in neighbours}
        self._reading = threading.Lock()
        self._ring = Ring(0, most=ring_bytes(num_ranks), may_grow=reserve)
        self._lent: deque[list[tuple[int, int]]] = deque()  # who has yet to read what is in the ring: rank and number
        self._num_sent = dict.fromkeys(neighbours, 0)
        self._num_read = dict.fromkeys(neighbours, 0)
        self._unread: dict[int, deque[SharedReceive]] = {rank: deque() for rank in neighbours}
        self._timeout = timeout
        self._sending = threading.Condition()
        self._waiting: deque[_Sending] = deque()  # for room; a thread sends them while there are any
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        return self._ring.size

    def close(self) -> None:
        """Expect nothing more; what never came would keep the group, and its connections."""
        self._unread = {rank: deque() for rank in self._unread}
        with self._sending:
            self._is_closed = True
            self._waiting.clear()

    def send(self, piece: Tensor, ranks: Sequence[int], *, tag: int) -> Waitable:
        """To neighbours; what is returned is to be waited for before ``piece`` is changed."""
        sending = _Sending(piece, ranks, tag=tag, timeout=self._timeout)
        with self._sending:
            if self._waiting or not self._send_now(sending):
                self._waiting.append(sending)
                if len(self._waiting) == 1:
                    threading.Thread(target=self._send_waiting, name="zerolap-send", daemon=True).start()
        return sending

    def _send_waiting(self) -> None:
        while True:
            with self._sending:
                while self._waiting and self._send_now(self._waiting[0]):
                    self._waiting.popleft()
                if not self._waiting or self._is_closed:
                    return
            time.sleep(_LOOK_SECONDS)

    def _send_now(self, sending: _Sending) -> bool:
        """Send it, if there is room; or as a message, if there never will be."""
        piece, place = sending.piece, self._place_for(sending.piece.nbytes)
        if place is None:
            return False
        numbers = []
        for rank in sending.ranks:
            self._num_sent[rank] += 1
            numbers.append((rank, self._num_sent[rank]))
        if place != _AS_MESSAGE:
            self._lent.append(numbers)
            self.view(self._rank, place, piece).copy_(piece)
        note = torch.tensor([place], device="cpu")
        works = [self.group.send([note], rank, sending.tag) for rank in sending.ranks]
        if place == _AS_MESSAGE:
            works += [self.group.send([piece], rank, _WHOLE_TAG + sending.tag) for rank in sending.ranks]
        sending.sent(works)
        return True

    def _place_for(self, num_bytes: int) -> int | None:
        self._free_what_was_read()
        needed = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        place = self._ring.take(needed)
        return _AS_MESSAGE if place is None and not self._ring.may_ever_hold(needed) else place

    def _free_what_was_read(self) -> None:
        while self._lent:
            readers = self._lent[0]
            while readers and int(self._read_by[readers[-1][0]]) >= readers[-1][1]:
                readers.pop()
            if readers:
                return
            self._lent.popleft()
            self._ring.free_oldest()

    def ask(self, like: Tensor, *, src: int, tag: int) -> SharedReceive:
        """What ``src`` sends next; of the size and type of ``like``."""
        receive = SharedReceive(self, like, src=src, tag=tag)
        self._unread[src].append(receive)
        return receive

    def view(self, rank: int, place: int, like: Tensor) -> Tensor:
        return self._content[rank][place : place + like.nbytes].view(like.dtype)

    def count_read(self, src: int) -> None:
        # By whoever has read it. The lock also keeps the reading before the counting, for processors that would swap them.
        with self._reading:
            unread = self._unread[src]
            while unread and unread[0].is_read:
                unread.popleft()
                self._num_read[src] += 1
            self._read_of[src].fill_(self._num_read[src])


def head_bytes(num_ranks: int) -> int:
    """What lies before the content of a segment: a count per rank and the secret, in whole pages."""
    return -(-(8 * num_ranks + 8) // _PAGE) * _PAGE


def segment_bytes(num_ranks: int) -> int:
    return head_bytes(num_ranks) + ring_bytes(num_ranks)
