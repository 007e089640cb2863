"""Sharing memory between the ranks of one host, once, when a group is opened. What it is used for is in ``memory``."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap._logging import logger_of
from zerolap_cpu_gloo.memory import MESSAGE_BYTES, SharedMemory, head_bytes, piece_bytes, segment_bytes

logger = logger_of("zerolap.cpu_gloo")

Host: TypeAlias = tuple[int, int, int]  # its kernel's start, the network's and the processes' namespace


def share_memory(group: dist.ProcessGroup, *, timeout: float = 600) -> SharedMemory:
    """Find out which ranks of the group are on this host, and share memory with them. All ranks of the group call it.

    Hosts are told apart by their kernel and their network: two network namespaces of one machine stand for two hosts. Where memory
    cannot be shared (another container, another user, no such system call, a limit) messages go by the network, as between hosts:
    a rank that cannot map its own memory and that of every neighbour is nobody's neighbour, so that both sides of every pair agree.
    The others go on sharing theirs.
    """
    rank, num_ranks = group.rank(), group.size()
    size = segment_bytes(num_ranks)
    segments: dict[int, Tensor] = {}
    cards = torch.zeros(num_ranks, 6, dtype=torch.int64)
    able = torch.zeros(num_ranks, dtype=torch.int64)
    reserve, why = None, None
    with ExitStack() as stack:
        try:
            segments[rank], cards[rank], reserve = _make_own(num_ranks, size, stack)
        except (OSError, RuntimeError, MemoryError) as error:  # RuntimeError is torch's: it cannot be opened or mapped
            why = f"{type(error).__name__}: {error}"
        group.allreduce([cards]).wait()
        if why is None:
            mapped, why = _map_neighbours(cards.tolist(), size=size, me=rank)
            segments |= mapped
        able[rank] = why is None
        group.allreduce([able]).wait()
        is_able = able.tolist()
        segments = {other: segment for other, segment in segments.items() if is_able[rank] and is_able[other]}
        if why is not None:
            logger.warning("this rank exchanges by messages and not by shared memory: %s", why)
        hosts = [tuple(host) for (_, _, _, *host), other in zip(cards.tolist(), is_able, strict=True) if other]
        is_shared = len(set(hosts)) < len(hosts)  # somewhere, which all ranks know
        most_bytes = piece_bytes(num_ranks) if is_shared else MESSAGE_BYTES
        memory = SharedMemory(
            group, segments, reserve=reserve, piece_bytes=most_bytes, timeout=timeout, is_used=is_shared
        )
        if segments:
            weakref.finalize(memory, stack.pop_all().close)
        return memory


def _make_own(num_ranks: int, size: int, stack: ExitStack) -> tuple[Tensor, Tensor, Callable[[int], bool]]:
    """This rank's segment, what the others need to find it, and what makes sure of so many bytes of it behind the head."""
    host, head = _host(), head_bytes(num_ranks)
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
    """The segments of all others of this host, or of some and why there are not more."""
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


def _host() -> Host:
    """What ranks that can share memory, and are to, have in common; raises if this one cannot."""
    if not hasattr(os, "memfd_create"):
        raise NotImplementedError("this system has no memfd_create")
    boot = int(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""), 16) >> 66
    return boot, Path("/proc/self/ns/net").stat().st_ino, Path("/proc/self/ns/pid").stat().st_ino
