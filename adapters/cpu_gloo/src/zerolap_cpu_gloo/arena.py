"""Memory that ranks of one host share: what one sends another is put down once, and read where it lies. No sums.

A rank puts what it sends into its own *arena*, which the others of its host have mapped, and sends them a *note* of where it is, as
an ordinary message. So waiting, time limits and the end of a peer are those of messages. A reader counts in its own arena what it
has read of whom; a sender looks there when it needs room. If there is none, the note says that the bytes come as a message, too.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap._logging import logger_of
from zerolap_cpu_gloo.ring import Ring

logger = logger_of("zerolap.cpu_gloo")

ALIGNMENT = 64
_PAGE = 4096
LETTER_BYTES = 16 * 2**20
_MOST_BYTES = 2 * LETTER_BYTES  # that have not been read yet
_FEW_BYTES = 4 * 2**20  # are not worth saving
_AS_MESSAGE = -1
_WHOLE_TAG = 2**30  # added to a note's tag: what did not fit

Host: TypeAlias = tuple[int, int, int]  # its kernel's start, the network's and the processes' namespace


class Letter:
    """Something to come from a rank of this host. Asked for in the order in which it is sent."""

    def __init__(self, arena: Arena, like: Tensor, *, src: int, tag: int) -> None:
        self._arena = arena
        self._like = like
        self._src = src
        self._tag = tag
        self._note = torch.empty(1, dtype=torch.int64, device="cpu")
        self._work = arena.group.recv([self._note], src, tag)
        self.is_read = False

    def wait(self) -> Tensor:
        """What came. It is lent until ``give_back()``."""
        self._work.wait()
        place = int(self._note)
        if place != _AS_MESSAGE:
            return self._arena.look(self._src, place, self._like)
        whole = torch.empty_like(self._like)
        self._arena.group.recv([whole], self._src, _WHOLE_TAG + self._tag).wait()
        return whole

    def give_back(self) -> None:
        self.is_read = True
        self._arena.note_read(self._src)


class Delivery:
    """A letter that is copied to where it belongs, by whoever waits for it."""

    def __init__(self, letter: Letter, to: Tensor) -> None:
        self._letter = letter
        self._to = to

    def wait(self) -> None:
        self._to.copy_(self._letter.wait())
        self._letter.give_back()


class Arena:
    """This rank's memory and that of its neighbours: the other ``ranks`` of a group on the same host, if there are any.

    One thread sends and asks; any may read.
    """

    def __init__(
        self, group: dist.ProcessGroup, memories: dict[int, Tensor], *, reserve: Callable[[int], bool] | None = None
    ) -> None:
        self.group = group
        self._rank, num_ranks = group.rank(), group.size()
        self._content = {rank: memory[_head_bytes(num_ranks) :] for rank, memory in memories.items()}
        self.ranks = frozenset(memories)
        neighbours = self.ranks - {self._rank}
        # Each rank counts in its own memory what it has read of whom.
        counts = {rank: memory[: 8 * num_ranks].view(torch.int64) for rank, memory in memories.items()}
        self._read_of = {rank: counts[self._rank][rank] for rank in neighbours}
        self._read_by = {rank: counts[rank][self._rank] for rank in neighbours}
        self._reading = threading.Lock()
        self._ring = Ring(0, most=_FEW_BYTES, may_grow=reserve)
        self._lent: deque[list[tuple[int, int]]] = deque()  # who has yet to read what is in the ring: rank and number
        self._num_sent = dict.fromkeys(neighbours, 0)
        self._num_read = dict.fromkeys(neighbours, 0)
        self._unread: dict[int, deque[Letter]] = {rank: deque() for rank in neighbours}

    @property
    def num_bytes(self) -> int:
        return self._ring.size

    def close(self) -> None:
        """Expect nothing more; letters that never came would keep the group, and its connections."""
        self._unread = {rank: deque() for rank in self._unread}

    # --- sending ------------------------------------------------------------------------------------------------------

    def expect(self, num_bytes: int) -> None:
        """So much is sent at once: there shall be room for it twice, for readers are not always as fast, but not for more."""
        self._ring.most = min(max(2 * num_bytes, self._ring.most), _MOST_BYTES)

    def send(self, piece: Tensor, ranks: Sequence[int], *, tag: int) -> list[dist.Work]:
        """To neighbours; what is returned is to be waited for before ``piece`` is changed."""
        place = self._take(piece.nbytes, ranks)
        if place != _AS_MESSAGE:
            self.look(self._rank, place, piece).copy_(piece)
        note = torch.tensor([place], device="cpu")
        works = [self.group.send([note], rank, tag) for rank in ranks]
        if place == _AS_MESSAGE:
            works += [self.group.send([piece], rank, _WHOLE_TAG + tag) for rank in ranks]
        return works

    def _take(self, num_bytes: int, ranks: Sequence[int]) -> int:
        numbers = []
        for rank in ranks:
            self._num_sent[rank] += 1
            numbers.append((rank, self._num_sent[rank]))
        self._free_what_was_read()
        place = self._ring.take(-(-num_bytes // ALIGNMENT) * ALIGNMENT)
        if place is None:
            return _AS_MESSAGE
        self._lent.append(numbers)
        return place

    def _free_what_was_read(self) -> None:
        while self._lent:
            readers = self._lent[0]
            while readers and int(self._read_by[readers[-1][0]]) >= readers[-1][1]:
                readers.pop()
            if readers:
                return
            self._lent.popleft()
            self._ring.free_oldest()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def ask(self, like: Tensor, *, src: int, tag: int) -> Letter:
        """What ``src`` sends next; of the size and type of ``like``."""
        letter = Letter(self, like, src=src, tag=tag)
        self._unread[src].append(letter)
        return letter

    def look(self, rank: int, place: int, like: Tensor) -> Tensor:
        return self._content[rank][place : place + like.nbytes].view(like.dtype)

    def note_read(self, src: int) -> None:
        # By whoever has read it. The lock also keeps the reading before the counting, for processors that would swap them.
        with self._reading:
            unread = self._unread[src]
            while unread and unread[0].is_read:
                unread.popleft()
                self._num_read[src] += 1
            self._read_of[src].fill_(self._num_read[src])


def open_arena(group: dist.ProcessGroup) -> Arena:
    """Find out which ranks of the group are on this host, and share memory with them. All ranks of the group call it.

    Hosts are told apart by their kernel and their network: two network namespaces of one machine stand for two hosts. Where memory
    cannot be shared (another container, another user, no such system call, a limit) messages go by the network, as between hosts:
    a rank that cannot map its own memory and that of every neighbour is nobody's neighbour, so that both sides of every pair agree.
    The others go on sharing theirs.
    """
    rank, num_ranks = group.rank(), group.size()
    size = _head_bytes(num_ranks) + _MOST_BYTES
    memories: dict[int, Tensor] = {}
    cards = torch.zeros(num_ranks, 6, dtype=torch.int64)
    able = torch.zeros(num_ranks, dtype=torch.int64)
    reserve, why = None, None
    with ExitStack() as stack:
        try:
            memories[rank], cards[rank], reserve = _make_own(num_ranks, size, stack)
        except (
            OSError,
            RuntimeError,
            MemoryError,
        ) as error:  # RuntimeError is torch's, for what cannot be opened or mapped
            why = f"{type(error).__name__}: {error}"
        group.allreduce([cards]).wait()
        if why is None:
            mapped, why = _map_neighbours(cards.tolist(), size=size, me=rank)
            memories |= mapped
        able[rank] = why is None
        group.allreduce([able]).wait()
        is_able = able.tolist()
        memories = {other: memory for other, memory in memories.items() if is_able[rank] and is_able[other]}
        if why is not None:
            logger.warning("this rank exchanges by messages and not by shared memory: %s", why)
        arena = Arena(group, memories, reserve=reserve)
        if memories:
            weakref.finalize(arena, stack.pop_all().close)
        return arena


def _make_own(num_ranks: int, size: int, stack: ExitStack) -> tuple[Tensor, Tensor, Callable[[int], bool]]:
    """This rank's memory, what the others need to find it, and what makes sure of so many bytes of it behind the head."""
    host, head = _host(), _head_bytes(num_ranks)
    file = os.memfd_create("zerolap")
    stack.callback(os.close, file)  # the memory lives on while somebody has it mapped
    os.ftruncate(file, size)
    os.posix_fallocate(file, 0, head)
    memory = _map(os.getpid(), file, size)
    secret = secrets.randbits(62)
    _secret_in(memory, num_ranks).fill_(secret)

    # The kernel promises no memory with a file's size: where there is none, writing ends the process (SIGBUS). So bytes are asked for
    # before they are written first, which takes no longer than the writing would.
    def reserve(num_bytes: int) -> bool:
        try:
            os.posix_fallocate(file, head, num_bytes)
        except OSError as error:
            logger.warning("%d bytes of shared memory cannot be had, so more is sent by messages: %s", num_bytes, error)
            return False
        return True

    return memory, torch.tensor([os.getpid(), file, secret, *host]), reserve


def _map_neighbours(cards: list[list[int]], *, size: int, me: int) -> tuple[dict[int, Tensor], str | None]:
    """The memory of all others of this host, or of some and why there are not more."""
    found: dict[int, Tensor] = {}
    host = cards[me][3:]
    for rank, (pid, file, secret, *their_host) in enumerate(cards):
        if rank == me or their_host != host:
            continue
        try:
            memory = _map(pid, file, size)
        except (OSError, RuntimeError, MemoryError) as error:  # not ours to open, or too much
            return found, f"the memory of rank {rank} cannot be mapped: {error}"
        if _secret_in(memory, len(cards)) != secret:
            return found, f"process {pid} is another one here than for rank {rank}"
        found[rank] = memory
    return found, None


def _map(pid: int, file: int, size: int) -> Tensor:
    return torch.from_file(f"/proc/{pid}/fd/{file}", shared=True, size=size, dtype=torch.uint8)


def _secret_in(memory: Tensor, num_ranks: int) -> Tensor:
    return memory[8 * num_ranks : 8 * num_ranks + 8].view(torch.int64)


def _head_bytes(num_ranks: int) -> int:
    """Room for a count per rank and the secret, in whole pages."""
    return -(-(8 * num_ranks + 8) // _PAGE) * _PAGE


def _host() -> Host:
    """What ranks that can share memory, and are to, have in common; raises if this one cannot."""
    if not hasattr(os, "memfd_create"):
        raise NotImplementedError("this system has no memfd_create")
    boot = int(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""), 16) >> 66
    return boot, Path("/proc/self/ns/net").stat().st_ino, Path("/proc/self/ns/pid").stat().st_ino
